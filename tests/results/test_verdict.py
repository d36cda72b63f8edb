"""The verdict on a run: the page that explains it, its conditions, and where it is printed."""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hicache import experiment
from hicache.cli import compare
from hicache.cli.report import main as draw
from hicache.cli.sweep import sum_up
from hicache.cli.tables.groups import differing_keys, find_runs, group_runs, load_runs
from hicache.cli.tables.sweep_figure import draw_sweep
from hicache.cli.terminal import line_of, show_run
from hicache.config import METRICS
from hicache.results.metrics import summarize
from hicache.results.verdict import (
    CLEAN,
    CONDITIONS,
    SURVIVORS,
    in_short,
    is_overloaded,
    objections,
    stage_lines,
    stages,
)
from hicache.runs.job import run_job
from hicache.runs.schema import config_of

PAGE = (Path(__file__).parents[2] / "docs" / "verdict.md").read_text()
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ")
][1:]
# the lines below each comment, which begins with the name of a condition
COMMANDS = {
    block.partition("\n")[0].partition(":")[0]: block.splitlines()[1:]
    for block in re.findall(r"^# (.+?)(?=\n\n|\n```)", PAGE, flags=re.DOTALL | re.MULTILINE)
}
CLEAN_RUN = PAGE.rpartition("```bash\n")[2].splitlines()[0]
START = "hicache run"
LONG = ("near a knee", "growing queue")  # conditions whose runs have all requests


def overrides_of(command):
    assert command.startswith(START)
    return command.removeprefix(START).split()


def summary_of(*overrides):
    result = experiment.run(config_of(*overrides))
    return summarize(result.records, result.measures)


def run_into(directory, *overrides):
    config = config_of("tracker.wandb_mode=disabled", *overrides)
    outcomes = []
    run_job(config, directory, is_job=True, show=outcomes.append)
    return outcomes[0]


def names_of(*summaries):
    return [each.name for each in objections(summaries)]


def test_the_page_lists_every_condition_with_its_threshold():
    told = [(name, threshold) for name, threshold, *_ in TABLE]
    assert told == [(each.name, f"{each.threshold:g}") for each in [*CONDITIONS, SURVIVORS]]


@pytest.mark.parametrize(
    "condition",
    [pytest.param(each, marks=[pytest.mark.soak] * (each.name in LONG)) for each in CONDITIONS],
    ids=lambda each: each.name,
)
def test_the_command_on_the_page_triggers_its_condition(condition, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *before, command = COMMANDS[condition.name]
    for line in before:
        python, _, target = line.partition(" > ")
        program = shlex.split(python)
        text = subprocess.run([sys.executable, *program[1:]], capture_output=True, check=True)
        Path(target).write_bytes(text.stdout)
    found = objections([summary_of(*overrides_of(command))])
    (objection,) = [each for each in found if each.name == condition.name]
    assert objection.sentence.count(objection.short) == 1
    assert re.search(r"\d", objection.short)


def test_the_default_run_at_a_lower_rate_uses_every_tier_and_has_no_objection():
    summary = summary_of(*overrides_of(CLEAN_RUN))
    assert in_short(objections([summary])) == CLEAN
    assert 0.4 < summary["load/rho_gpu"] < 0.6
    assert summary["load/rho_read"] > 0.3
    assert summary["load/rho_write"] > 0.3
    assert summary["request/storage_wait_s_mean"] > summary["request/prefill_s_mean"]
    hits = [summary[f"cache/{tier}_hit_tokens"] for tier in ("device", "host", "storage")]
    assert min(hits) > 0.1 * summary["request/prompt_tokens"]


PREFETCHED = {
    "request/prompt_tokens": 1000,
    "cache/computed_tokens": 800,
    "prefetch/read_pages": 25,
    "prefetch/discarded_miss_pages": 75,
}
FULL = ("model=llama3_8b", "parallel.tp=1", "storage=none", "workload.limit=null")
STAGED = (*FULL, "workload=shared_prefix", "workload.answer_tokens=1", "workload.stage_s=20")


def test_busy_rounds_of_a_closed_loop_are_not_called_overloaded():
    rounds = ("workload=multi_turn", "workload.num_sessions=8", "workload.rounds=4")
    summary = summary_of(*FULL, *rounds, "workload.barrier=true")
    parts = stages(summary)
    assert list(parts) == [1, 2, 3, 4]
    assert [part["request/count"] for part in parts.values()] == [8] * 4
    gpu = [part["load/rho_gpu"] for part in parts.values()]
    assert 0.7 < min(gpu) < 0.9 < max(gpu)
    for part in parts.values():
        assert names_of(part) == []
        named = names_of({**part, "load/closed_loop": 0})
        assert named == ["overloaded GPU"] * (part["load/rho_gpu"] >= 0.9)
    lines = [line.partition(",")[0] for line in stage_lines(summary)]
    assert lines == [f"stage {number}: ρ gpu {rho:.2f}" for number, rho in enumerate(gpu, 1)]
    busy = {**summary, "load/rho_gpu": 0.95}
    assert not is_overloaded(busy)
    assert is_overloaded({**busy, "load/closed_loop": 0})


@pytest.mark.parametrize("jump", ["true", "false"])
def test_a_load_with_stages_is_judged_by_its_busiest_stage(jump):
    rates = "workload.stage_rates=[0.1,7,0.1,0.1,0.1,0.1,0.1,0.1]"
    summary = summary_of(*STAGED, rates, "workload.groups=60", f"engine.jump={jump}")
    parts = list(stages(summary).values())
    assert len(parts) == 8
    assert sum(part["request/count"] for part in parts) == summary["request/count"]
    gpu, queue = ([part[f"load/rho_{name}"] for part in parts] for name in ("gpu", "queue"))
    assert gpu[1] > 0.9 > gpu[2]
    assert 1 >= max(queue) >= queue[2] > 0.1  # it catches up with what came before
    names = [names_of(part) for part in parts]
    assert names[0] == names[-1] == ["idle"]
    assert "overloaded GPU" in names[1]
    assert summary["load/rho_gpu"] < 0.2
    assert is_overloaded(summary)
    assert "idle" not in names_of(summary)
    lines = stage_lines(summary)
    assert [line.partition(":")[0] for line in lines] == [f"stage {n}" for n in range(1, 9)]
    assert "GPU overloaded" in lines[1]


def test_a_stage_within_the_warm_up_is_left_out():
    summary = summary_of(*STAGED, "workload.stage_rates=[1,1,1]", "workload.warm_up_s=10")
    assert list(stages(summary)) == [2, 3]


@pytest.fixture(scope="module")
def rejecting(tmp_path_factory):
    """The directory and outcomes of two runs: the first rejects what the second serves."""
    directory = tmp_path_factory.mktemp("sweep")
    mode, *shared, swept = overrides_of(COMMANDS[SURVIVORS.name][0])
    assert mode == "-m"
    key, _, values = swept.partition("=")
    outcomes = [
        run_into(directory / str(job), *shared, f"{key}={value}")
        for job, value in enumerate(values.split(","))
    ]
    return directory, outcomes


def test_a_comparison_marks_rows_in_which_different_requests_finished(rejecting, capsys):
    directory, _ = rejecting
    compare.main([str(directory)])
    lines = capsys.readouterr().out.splitlines()
    (note,) = [line for line in lines if "finished in some rows but not in others" in line]
    letter = note.partition(":")[0]
    rows = [line for line in lines if re.match(r"(4|40) ", line)]
    assert len(rows) == 2
    assert all(letter in row.split()[2] for row in rows)
    compare.main([str(directory / "0"), str(directory / "0")])
    printed = capsys.readouterr().out
    assert "prompt tokens rejected" in printed
    assert "finished in some rows" not in printed
    for form in ("--json", "--csv", "--markdown", "--paired"):
        compare.main([str(directory), form])
        assert "rejected" in capsys.readouterr().out


def test_the_verdict_of_a_run_is_printed_and_in_its_report(rejecting, capsys):
    _, (outcome, _) = rejecting
    found = objections([outcome.summary])
    show_run(outcome)
    printed = capsys.readouterr().out
    draw([str(outcome.out_dir)])  # a run of a sweep gets its page on demand
    page = (outcome.out_dir / "report.html").read_text()
    for each in found:
        assert f"verdict    {each.sentence}\n" in printed
        assert f"<li>{each.sentence}</li>" in page
    assert f"({in_short(found)})" in line_of(outcome.out_dir)


def test_the_verdict_of_a_sweep_is_in_its_files_and_its_figure(rejecting, capsys):
    directory, outcomes = rejecting
    sum_up(directory, find_runs(directory), title="a sweep")
    assert "finished in some rows but not in others" in capsys.readouterr().out
    groups = json.loads((directory / "sweep.json").read_text())
    assert all(SURVIVORS.name in group["verdict"] for group in groups)
    rows = csv.DictReader((directory / "sweep.csv").read_text().splitlines())
    told = [in_short(objections([outcome.summary])) for outcome in outcomes]
    assert [row["verdict"] for row in rows] == told
    runs = load_runs([directory])
    figure = draw_sweep(group_runs(runs, differing_keys(runs)), METRICS, title="a sweep")
    line = figure.get_suptitle().split("\n")[1]
    assert line.startswith("verdict: ")
    assert "rejected" in line


def test_an_objection_to_several_runs_names_the_range_and_the_number_of_runs():
    summaries = [
        {"request/prompt_tokens": 100, "cache/rejected_tokens": count} for count in (0, 20, 60)
    ]
    (found,) = objections(summaries)
    assert found.short == "20% to 60% of the prompt tokens rejected"
    assert found.sentence.startswith(f"{found.short} in 2 of 3 runs: ")
    assert " runs: " not in objections(summaries[1:])[0].sentence


@pytest.mark.parametrize(("tier", "names"), [("storage", []), ("device", ["inert host"])])
def test_a_host_is_inert_if_neither_it_nor_storage_is_hit(tier, names):
    hits = {f"cache/{each}_hit_tokens": 0 for each in ("device", "host", "storage")}
    hits[f"cache/{tier}_hit_tokens"] = 500
    assert names_of({"request/prompt_tokens": 1000, "transfer/back_up_bytes": 1, **hits}) == names


def test_a_slow_start_up_asks_for_a_longer_warm_up():
    (found,) = objections([{"request/start_up_ttft_share": 0.9, "request/start_up_share": 0.1}])
    assert "raise workload.warm_up_s" in found.sentence


@pytest.mark.parametrize(
    ("dropped", "more"),
    [
        ({"cut": 40}, {}),  # storage has a quarter of what prefetches ask for
        ({"abandoned_host_room": 20, "abandoned_sidecar_room": 20}, {}),
        ({"abandoned_sidecar_room": 900}, {"cache/computed_tokens": 40}),
        ({"cut": 10}, {"prefetch/read_pages": 0, "prefetch/discarded_miss_pages": 0}),
    ],
)
def test_the_small_host_condition_counts_dropped_tokens_that_storage_holds(dropped, more):
    dropped = {f"prefetch/{key}_tokens": tokens for key, tokens in dropped.items()}
    (found,) = objections([{**PREFETCHED, **dropped, **more}])
    assert (found.name, found.low) == ("small host", 0.01)


START_UP = ("request/start_up_ttft_share", "request/start_up_share")


@pytest.mark.parametrize(
    ("name", "base", "below", "above"),
    [
        ("rejected", {"request/prompt_tokens": 1000}, {"cache/rejected_tokens": 9},
         {"cache/rejected_tokens": 10}),
        ("dropped writes", {},
         {"storage/queued_write_pages": 991, "storage/dropped_write_pages": 9},
         {"storage/queued_write_pages": 990, "storage/dropped_write_pages": 10}),
        ("small host", PREFETCHED, {"prefetch/cut_tokens": 39}, {"prefetch/cut_tokens": 40}),
        ("start-up", {START_UP[1]: 0.25}, {START_UP[0]: 0.34}, {START_UP[0]: 0.36}),
        ("start-up", {}, dict.fromkeys(START_UP, 0.49), dict.fromkeys(START_UP, 0.5)),
        ("idle", {"load/rho_gpu": 0.1}, {"load/rho_read": 0.2}, {"load/rho_gpu": 0.19}),
        ("idle", {"load/rho_gpu": 0.18, "request/prefill_s_mean": 1.0},
         {"request/queue_s_mean": 0.26}, {"request/queue_s_mean": 0.24}),
        ("overloaded GPU", {}, {"load/rho_gpu": 0.89}, {"load/rho_gpu": 0.9}),
        ("overloaded queue", {}, {"load/rho_gpu": 0.95}, {"load/rho_queue": 0.9}),
        ("overloaded storage", {}, {"load/rho_read": 0.89}, {"load/rho_write": 0.9}),
        ("overloaded storage", {}, {"load/rho_workers": 0.89}, {"load/rho_workers": 0.9}),
        ("mostly hits", {"jobs/per_hour": 1.0}, {"cache/token_hit_rate": 0.89},
         {"cache/token_hit_rate": 0.9}),
        ("few sessions", {}, {"request/sessions_count": 20}, {"request/sessions_count": 19}),
        ("collapsed sessions", {}, {"request/largest_session_share": 0.24},
         {"request/largest_session_share": 0.25}),
    ],
)  # fmt: skip
def test_a_condition_holds_from_its_threshold_on(name, base, below, above):
    assert [name in names_of({**base, **each}) for each in (below, above)] == [False, True]
