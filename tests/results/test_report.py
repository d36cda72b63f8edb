import json
import re

import pytest
from matplotlib.figure import Figure

from hicache.clock import SECOND_NS
from hicache.config import CacheConfig, ExperimentConfig, GeneratedConfig, PrefetchConfig
from hicache.results import figures, report
from hicache.results.metrics import QUEUE_CAUSES, Status, summarize
from hicache.results.tracking import plain, write_json
from hicache.runs.stored import flat, read_rows
from tests.conftest import row_at


@pytest.fixture
def run_dir(tmp_path, make_record, measures, rows):
    write_json(tmp_path / "summary.json", summarize([make_record(0)], measures))
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.yaml").write_text("name: <b>bold</b>\n")
    return tmp_path


CONFIG = ExperimentConfig()


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def page_of(run_dir, config=CONFIG, records=(), **changes):
    summary = summary_of(run_dir) | changes
    options = {"title": "a run", "knobs": flat(plain(config)), "records": records}
    rows = read_rows(run_dir)
    return report.write_report(run_dir, summary=summary, rows=rows, **options).read_text()


def test_the_page_holds_figures_numbers_and_the_config(run_dir, make_record):
    page = page_of(run_dir, records=[make_record(0)])
    assert re.findall(r'"title": "([^"]*)"', page)[:2] == [
        "Prompt tokens over time, by tier",
        "Requests over time",
    ]
    assert "cache/token_hit_rate" in page
    assert "&lt;b&gt;bold" in page
    summary = summary_of(run_dir)
    shown = {key for key in summary if f"<td>{key}</td>" in page}
    assert shown == {key for key, value in summary.items() if value}
    assert "cache/token_hit_rate" in shown
    assert page_of(run_dir, records=[make_record(0)]) == page


def test_the_page_names_the_settings_of_the_run(run_dir):
    workload, cache = GeneratedConfig(kind="chat"), CacheConfig(write_policy="write_back")
    prefetch = PrefetchConfig(stop="best_effort")
    page = page_of(
        run_dir, ExperimentConfig(seed=3, workload=workload, cache=cache, prefetch=prefetch)
    )
    told = (
        "workload chat, model ???, hardware ???, replicas 1, executor simulated, storage none, "
        "host GiB 256.0, cache policy lru, write policy write_back, "
        "prefetch stop policy best_effort, seed 3"
    )
    assert f"<p>{told}</p>" in page
    assert "<p>1 requests: 1 finished, 0 rejected, 0 aborted<br>" in page


def test_the_page_shows_the_load_and_every_objection(run_dir):
    others = {f"load/rho_{each}": 0.1 for each in ("queue", "read", "write", "workers")}
    page = page_of(run_dir, **others, **{"load/rho_gpu": 0.9})
    assert "ρ gpu 0.90, ρ queue 0.10, ρ read 0.10, ρ write 0.10, ρ workers 0.10</p>" in page
    assert "<li>GPU overloaded, ρ 0.90: " in page
    assert "<li>only 1 session" in page


def test_the_page_lists_the_slowest_requests_with_what_they_waited_for(run_dir, make_record):
    slow = {"queue_ns": 7000, "queue_for_ns": {"tokens": 6500, "step": 500}}
    records = [
        make_record(number, first_token_ns=number * SECOND_NS + 423 + number, prefill_ns=400)
        for number in range(12)
    ]
    records.append(make_record(12, first_token_ns=12 * SECOND_NS + 7423, **slow))
    page = page_of(run_dir, records=records)
    ids = re.findall(r'<tr><td class="number">(\d+)</td>', page)
    assert ids == ["12", "11", "10", "9", "8", "7", "6", "5", "4", "3"]
    assert f"<td>88% waiting for {QUEUE_CAUSES['tokens']}</td>" in page


def test_the_page_shows_miss_reasons_only_if_recorded(run_dir, make_record, measures):
    assert "Not recorded" in page_of(run_dir)
    explained = make_record(0, computed_for={"first_seen": 225, "prefetch_stopped": 75})
    page = page_of(run_dir, **summarize([explained], measures))
    assert "Not recorded" not in page
    assert re.findall(r'<tr><td class="number">([\d.]+%)</td>', page) == ["75.0%", "25.0%"]


def test_the_title_of_the_figure_fits_into_it(rows):
    name = "adhoc/2026-01-01_00-00-00-000000_abcdef"
    figure = figures.draw_tokens(rows, run=name)
    figure.draw_without_rendering()
    told = figure._suptitle
    assert told.get_text() == name
    assert told.get_window_extent().x1 <= figure.bbox.x1
    assert max(axes.get_tightbbox().y1 for axes in figure.axes) < told.get_window_extent().y0


def test_the_page_draws_the_ttft_as_a_distribution_and_over_the_prompt_length(run_dir, make_record):
    numbers = range(1, 5)
    records = [
        make_record(n, first_token_ns=n * SECOND_NS + n * 423, queue_ns=n * 423 - 423)
        for n in numbers
    ]
    rejected = make_record(9, status=Status.rejected, first_token_ns=None, finish_ns=None)
    page = page_of(run_dir, records=[*records, rejected])
    *_, shares, lengths = json.loads(re.search(r'"charts"\), (\[.*\]), true', page)[1])
    ttft = shares["series"][0]
    assert (ttft["name"], shares["x"]["log"]) == ("TTFT", True)
    for number in numbers:
        (first, *_) = [x for x, y in zip(ttft["x"], ttft["y"], strict=True) if y >= number / 4]
        assert first == pytest.approx(number * 423e-9, rel=0.05)
    (dots,) = lengths["series"]
    assert dots["name"] == "50 % and more"
    assert dots["x"] == [1000] * 4
    assert dots["y"] == pytest.approx([n * 423e-9 for n in numbers])


def test_the_figure_shows_a_queue_of_one_interval_out_of_a_thousand():
    waiting = [7 if index == 401 else 0 for index in range(1000)]
    rows = [row_at(i + 1.0) | {"queue/waiting_count": n} for i, n in enumerate(waiting)]
    _, bottom = figures.draw_tokens(rows).axes
    line = next(line for line in bottom.lines if line.get_label() == "waiting (most)")
    assert max(line.get_ydata()) == 7


def test_a_run_with_a_cut_list_of_overrides_still_has_a_report(run_dir):
    (run_dir / ".hydra").mkdir()
    (run_dir / ".hydra" / "overrides.yaml").write_text("- seed=1\n- ")
    assert "hicache run seed=1 " in page_of(run_dir)


def test_a_run_without_intervals_or_finished_requests_still_has_a_report(run_dir):
    (run_dir / "metrics.jsonl").write_text("")
    assert "<p>" in page_of(run_dir)


def test_the_areas_of_an_interval_add_up_to_its_hit_rate(rows):
    top = figures.draw_tokens(rows).axes[0]
    tops = [stairs.get_data().values for stairs in top.patches]
    last = rows[-1]
    device = last["interval/device_hit_tokens"]
    hits = device + last["interval/host_hit_tokens"] + last["interval/storage_hit_tokens"]
    total = hits + last["interval/computed_tokens"]
    assert tops[0][-1] == pytest.approx(device / total)
    assert tops[2][-1] == pytest.approx(hits / total)
    assert tops[-1][-1] == pytest.approx(1)
    without = [{key: row[key] for key in row if "peer" not in key} for row in rows]
    assert len(figures.draw_tokens(without).axes[0].patches) == len(tops) - 1


def test_merged_intervals_are_weighted_by_their_tokens():
    rows = [
        row_at(i + 1.0, computed=30, device_hit=850 if i % 5 == 0 else 0)
        for i in range(5 * report.MAX_BARS)
    ]
    top = figures.draw_tokens(rows).axes[0]
    values, _, _ = top.patches[0].get_data()
    assert values.tolist() == pytest.approx([0.85] * report.MAX_BARS)


def test_text_that_looks_like_mathematics_is_drawn_unchanged(tmp_path):
    figure = Figure()
    texts = ("$mmmm$", "mmmm", "a$x_{$b")
    names = figures.literal(lambda: [figure.text(0, 0, text) for text in texts])()
    figures.save(figure, tmp_path / "figure.png")
    widths = [name.get_window_extent().width for name in names]
    assert widths[0] > 1.2 * widths[1]
