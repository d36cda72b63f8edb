import base64
import json
import re

import matplotlib.image
import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from hicache.config import (
    CacheConfig,
    ExperimentConfig,
    PrefetchConfig,
    WorkloadConfig,
    WritePolicy,
)
from hicache.results import report
from hicache.results.metrics import Row, Status, summarize
from hicache.results.tracking import write_json
from hicache.results.verdict import CONDITIONS


@pytest.fixture
def run_dir(tmp_path, make_record, measures, rows):
    write_json(tmp_path / "summary.json", summarize([make_record(0)], measures))
    lines = [json.dumps(row.flat()) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.yaml").write_text("name: <b>bold</b>\n")
    return tmp_path


CONFIG = ExperimentConfig()


def page_of(run_dir, config=CONFIG):
    summary = json.loads((run_dir / "summary.json").read_text())
    return report.write_report(run_dir, title="a run", summary=summary, config=config)


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
    page = page_of(run_dir).read_text()
    images = re.findall(r"base64,([^\"]+)", page)
    assert [base64.b64decode(image) for image in images] == [
        (run_dir / name).read_bytes() for name in ("tokens.png", "ttft.png")
    ]
    assert "cache/token_hit_rate" in page
    assert "&lt;b&gt;bold" in page


def test_the_page_says_in_words_what_was_run(run_dir):
    config = ExperimentConfig(
        seed=3,
        workload=WorkloadConfig(kind="chat"),
        cache=CacheConfig(write_policy=WritePolicy.write_back),
        prefetch=PrefetchConfig(stop="my_policies:Mine"),
    )
    page = page_of(run_dir, config).read_text()
    told = (
        "workload chat, model ???, hardware ???, replicas 1, executor simulated, storage none, "
        "eviction lru, host GiB 256.0, write policy write_back, "
        "prefetch stop policy my_policies:Mine, seed 3"
    )
    assert f"<p>{told}</p>" in page
    assert "<p>1 requests: 1 finished, 0 rejected, 0 aborted</p>" in page


def test_the_page_tells_the_load_and_what_speaks_against_the_run(run_dir):
    summary = json.loads((run_dir / "summary.json").read_text())
    others = {f"load/rho_{each}": 0.1 for each in ("queue", "read", "write", "workers")}
    write_json(run_dir / "summary.json", summary | others | {"load/rho_gpu": 0.9})
    page = page_of(run_dir).read_text()
    assert (
        "<p>Load: ρ gpu 0.90, ρ queue 0.10, ρ read 0.10, ρ write 0.10, ρ workers 0.10</p>" in page
    )
    assert "<li>GPU overloaded, ρ 0.90: no latency claim" in page
    assert "<li>only 1 session" in page


def tick_labels(axes):
    axes.figure.draw_without_rendering()
    return [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize(
    ("longest_s", "unit"), [(1.3, "s"), (0.2, "ms"), (3e-5, "µs"), (40.0, "s"), (0.0, "")]
)
def test_an_axis_of_times_has_one_unit(make_record, measures, longest_s, unit):
    summary = summarize([make_record(0)], measures)
    times = {key: longest_s for key in summary if "_s_p" in key or "_s_mean" in key}
    figure = report.draw_ttft(summary | times)
    labels = [label for axes in figure.axes for label in tick_labels(axes) if label != "0"]
    assert labels
    if unit:
        assert {label.partition(" ")[2] for label in labels} == {unit}


def test_an_axis_of_tokens_has_one_unit(rows):
    flat = [row.flat() | {"interval/computed_tokens": 13_000} for row in rows]
    labels = [label for label in tick_labels(report.draw_tokens(flat).axes[0]) if label != "0"]
    assert {label[-1] for label in labels} == {"k"}


def test_the_longest_verdict_is_inside_its_figure(make_record, measures, rows):
    name = "adhoc/2026-01-01_00-00-00-000000_abcdef"
    verdict = "; ".join(each.told(0.55, 0.66) for each in CONDITIONS)
    summary = summarize([make_record(0)], measures)
    for figure in (
        report.draw_ttft(summary, run=name, verdict=verdict),
        report.draw_tokens([row.flat() for row in rows], run=name, verdict=verdict),
    ):
        figure.draw_without_rendering()
        told = figure._suptitle
        assert told.get_text().replace("\n", " ") == f"{name} verdict: {verdict}"
        assert told.get_window_extent().x1 <= figure.bbox.x1
        assert max(axes.get_tightbbox().y1 for axes in figure.axes) < told.get_window_extent().y0


def test_figures_name_their_run(run_dir, rows, make_record, measures):
    tokens = report.draw_tokens([row.flat() for row in rows], run="a run")
    ttft = report.draw_ttft(summarize([make_record(0)], measures), run="a run")
    assert [figure.get_suptitle() for figure in (tokens, ttft)] == ["a run", "a run"]


def test_a_queue_that_came_and_went_between_two_drawn_points_is_seen():
    waiting = [7 if index == 401 else 0 for index in range(1000)]
    rows = [Row(time_s=i + 1.0, waiting_count=count).flat() for i, count in enumerate(waiting)]
    _, bottom = report.draw_tokens(rows).axes
    line = next(line for line in bottom.lines if line.get_label() == "waiting (most)")
    assert max(line.get_ydata()) == 7


def test_figures_are_drawn(run_dir):
    page_of(run_dir)
    assert all(ink(run_dir / name) > 0.05 for name in ("tokens.png", "ttft.png"))


def test_figures_of_equal_runs_are_equal_bytes(run_dir):
    page_of(run_dir)
    first = (run_dir / "tokens.png").read_bytes()
    page_of(run_dir)
    assert (run_dir / "tokens.png").read_bytes() == first


def test_a_run_too_short_for_a_row_has_a_report(run_dir):
    (run_dir / "metrics.jsonl").write_text("")
    assert page_of(run_dir).exists()


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


def test_text_that_looks_like_mathematics_is_drawn_as_it_stands(tmp_path):
    figure = Figure()
    names = [figure.text(0, 0, text) for text in ("$mmmm$", "mmmm", "a$x_{$b")]
    report.save(figure, tmp_path / "figure.png")
    widths = [name.get_window_extent().width for name in names]
    assert widths[0] > 1.2 * widths[1]
