import base64
import json
import re

import matplotlib.image
import numpy as np
import pyarrow.parquet as pq
import pytest

from hicache import report
from hicache.metrics import Row, Status, summarize
from hicache.tracking import write_json


@pytest.fixture
def run_dir(tmp_path, make_record, measures, rows):
    write_json(tmp_path / "summary.json", summarize([make_record(0)], measures))
    lines = [json.dumps(row.flat()) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.yaml").write_text("name: <b>bold</b>\n")
    return tmp_path


def ink(path) -> float:
    """Share of pixels that are not white."""
    return float(np.mean(matplotlib.image.imread(path)[..., :3].min(axis=-1) < 0.99))


def test_requests_come_back_from_parquet(tmp_path, make_record):
    rejected = make_record(1, status=Status.rejected, reason="too long", finish_ns=None)
    report.write_requests(tmp_path / "requests.parquet", [make_record(0), rejected])
    first, second = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert (first["status"], first["device_hit_len"], first["queue_ns"]) == ("finished", 400, 100)
    assert (second["status"], second["reason"], second["finish_ns"]) == (
        "rejected",
        "too long",
        None,
    )


def test_a_run_without_requests_has_an_empty_table(tmp_path):
    report.write_requests(tmp_path / "requests.parquet", [])
    assert pq.read_table(tmp_path / "requests.parquet").num_rows == 0


def test_the_page_holds_figures_numbers_and_config(run_dir):
    page = report.write_report(run_dir, title="a run").read_text()
    images = re.findall(r"base64,([^\"]+)", page)
    assert [base64.b64decode(image) for image in images] == [
        (run_dir / name).read_bytes() for name in ("tokens.png", "ttft.png")
    ]
    assert "cache/token_hit_rate" in page
    assert "&lt;b&gt;bold" in page


def test_figures_are_drawn(run_dir):
    report.write_report(run_dir, title="a run")
    assert all(ink(run_dir / name) > 0.05 for name in ("tokens.png", "ttft.png"))


def test_figures_of_equal_runs_are_equal_bytes(run_dir):
    report.write_report(run_dir, title="a run")
    first = (run_dir / "tokens.png").read_bytes()
    report.write_report(run_dir, title="a run")
    assert (run_dir / "tokens.png").read_bytes() == first


def test_a_run_too_short_for_a_row_has_a_report(run_dir):
    (run_dir / "metrics.jsonl").write_text("")
    assert report.write_report(run_dir, title="a run").exists()


def test_the_layers_of_an_interval_stack_up_to_its_tokens(rows):
    top = report.draw_tokens([row.flat() for row in rows]).axes[0]
    tops = [stairs.get_data().values for stairs in top.patches]
    last = rows[-1]
    total = last.device_hit_tokens + last.host_hit_tokens + last.storage_hit_tokens + 300
    assert tops[0][-1] == pytest.approx(last.device_hit_tokens / 10)
    assert tops[-1][-1] == pytest.approx(total / 10)


def test_long_runs_are_drawn_in_fewer_intervals_of_the_same_tokens():
    rows = [Row(time_s=float(i + 1), computed_tokens=60).flat() for i in range(1000)]
    top = report.draw_tokens(rows).axes[0]
    values, edges, _ = top.patches[-1].get_data()
    assert len(values) <= report.MAX_BARS
    assert sum(values * np.diff(edges) * 60) == pytest.approx(60 * 1000)
