"""Published measurements compared with simulated ones."""

import json
from functools import partial

import pytest
import yaml

from experiments.studies import published
from experiments.studies.kept_runs import kept_runs
from experiments.studies.published import (
    CASES,
    Series,
    arms_of,
    knees,
    ranking,
    read_case,
)
from hicache.results.requests_file import columns_of
from hicache.results.server_log import MEASURES
from hicache.runs.schema import config_of

NAMES = sorted(path.stem for path in CASES.glob("*.yaml"))
SMALL = """
title: two clients
source: none
settings: [workload=multi_turn, workload.num_sessions=2, workload.turn_tokens=64, storage=none,
  model=tiny_hybrid]
facts: [{what: rounds, choices: [2, 3], chosen: 2, why: short}]
arms: {"off": [cache.host_gib=0], "on": [cache.host_gib=1]}
results:
- {name: hits, measure: hits, by: round, axis: round, x: [0, 1], settings: [workload.rounds=2],
   theirs: {"off": [0, 50], "on": [0, null]}}
- {name: TTFT, measure: ttft_s, where: round == 0, axis: tokens, x: [100, 2000],
   knobs: ["workload.first_tokens={x}", "workload.rounds={n}"], with: {"n": [1, 2]},
   theirs: {alone: [0.001, 0.01]}, arms: {alone: [workload.num_sessions=1]}}
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # traces of batches are written below it
    (tmp_path / "experiments").symlink_to(CASES.parent)  # which a case names


@pytest.mark.parametrize("name", NAMES)
def test_every_case_has_runs_and_a_value_for_each_published_point(name):
    case = read_case(name)
    for run in (run for arm in arms_of(case) for run in arm.runs):
        config_of(*run)
    for result in case["results"]:
        assert result["measure"] in MEASURES
        assert {len(values) for values in result["theirs"].values()} == {len(result["x"])}
    assert all(fact["choices"] for fact in case["facts"])


def test_a_published_case_is_run_once_and_compared_point_by_point(tmp_path):
    small = yaml.safe_load(SMALL)
    out = tmp_path / "out"
    run = partial(kept_runs, measure=published.frame_of, folder=out, jobs=1)
    found = published.compare({"S": small}, run)["S"]
    assert [(each.arm, each.x, each.theirs) for each in found] == [
        ("off", [0, 1], [0, 50]),
        ("on", [0], [0]),
        ("alone", [100, 2000], [0.001, 0.01]),
    ]
    assert found[0].ours[0] == 0
    assert found[0].ours[1] > 0
    assert 0 < found[2].ours[0] < found[2].ours[1]
    page = published.page({"S": small}, {"S": found})
    assert "| simulated" in page
    assert "| two clients" not in page
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert published.compare({"S": small}, run)["S"] == found
    assert {path: path.stat().st_mtime_ns for path in written} == written  # nothing ran again


def test_a_constant_is_fitted_on_one_point_and_judged_on_the_others(tmp_path, monkeypatch):
    small = yaml.safe_load(SMALL)
    run = partial(kept_runs, measure=published.frame_of, folder=tmp_path / "out", jobs=1)
    slow = published.compare({"S": small}, run, told=["scheduler.server_s=0.05"])["S"]
    assert slow[2].arm == "alone"
    small["results"][1]["theirs"] = {"alone": slow[2].ours}
    small["fit"] = {"setting": "scheduler.server_s"}
    monkeypatch.setattr(published, "read_case", lambda name: small)
    cases = dict(published.variants("S", run))
    assert [*cases] == ["S", "S calibrated"]
    (setting,) = cases["S calibrated"]["facts"][-1]["settings"]
    name, _, value = setting.partition("=")
    assert name == "scheduler.server_s"
    assert float(value) == pytest.approx(0.05, rel=0.01)
    lines = published.compare(cases, run)["S calibrated"]
    judged = published.without_fitted(lines[2], published.fit_of(small))
    assert (judged.x, lines[2].x) == ([2000], [100, 2000])


def test_saturation_and_knees_have_a_range_over_seeds(tmp_path):
    small = yaml.safe_load(SMALL) | {"stages": True}
    small["results"][1] |= {"measure": "requests_per_s", "theirs": {"alone": [9, 5]}}
    run = partial(kept_runs, measure=published.frame_of, folder=tmp_path / "out", jobs=1)
    table = published.knees_table({"S": small}, range(2), run)
    assert "saturation" in table
    assert "range over 2 seeds" in table


def test_only_cases_without_times_or_with_fit_off_are_not_fitted():
    assert [name for name in NAMES if published.fit_of(read_case(name)) is None] == [
        "G",
        "I",
        "O",
        "P",
    ]


@pytest.mark.parametrize(("named", "has_h"), [([], False), (["H"], True)])
def test_a_case_that_needs_a_trace_runs_only_if_it_is_named(named, has_h, monkeypatch):
    seen = []
    monkeypatch.setattr(published, "fitted", lambda *_: 1.0)
    monkeypatch.setattr(published, "compare", lambda cases, *_, **__: seen.extend(cases) or 1 / 0)
    with pytest.raises(SystemExit):
        published.main(named)
    assert ("G" in seen, "H" in seen) == (not has_h, has_h)


@pytest.mark.parametrize("share", [0, 30, 100])
def test_a_batch_repeats_the_given_share_of_earlier_prompts(share):
    spec = {"prompts": 1000, "tokens": 512, "kept": 50, "begins_s": 9.0}
    path = published.batch_trace(hit_percent=share, **spec)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    before = {tuple(line["hash_ids"]) for line in lines[:50]}
    batch = [tuple(line["hash_ids"]) for line in lines[50:]]
    assert [line["timestamp"] for line in lines] == [0] * 50 + [9000] * 1000
    assert sum(each in before for each in batch) == 10 * share
    assert len(set(batch) - before) == 1000 - 10 * share


def line(theirs, ours, measure="ttft_s"):
    names = {"case": "X", "result": "r", "arm": "a", "axis": "x"}
    return Series(
        seed=0, x=list(range(len(theirs))), theirs=theirs, ours=ours, measure=measure, **names
    )


def test_errors_of_hits_are_in_points_and_those_of_times_in_percent():
    assert line([50, 60], [53, 59], "hits").error == pytest.approx(2)
    assert line([2, 4], [1, 5]).error == pytest.approx(37.5)


@pytest.mark.parametrize(
    ("theirs", "ours", "found"),
    [
        ([10, 10, 5.5, 5], [1, 2, 9, 9], (1, 1)),
        ([1, 1.1, 1.2, 9], [9, 1, 1.1, 1.2], (2, 0)),
        ([10, 9.9, 5.9, 3.2, 3.1], [10, 9.9, 9.8, 3.2, 3.1], (2, 2)),
        ([1, 2, 2.1, 2.2, 4], [1, 2, 3, 4, 5], None),  # two bends alike
    ],
)
def test_a_knee_is_where_a_curve_changes_most(theirs, ours, found):
    assert knees(line(theirs, ours)) == found


def test_pairs_of_arms_that_differ_little_are_not_ranked():
    lines = [line([1.0, 10], [1, 10]), line([1.04, 20], [0.5, 15]), line([2.0, 5], [0.9, 6])]
    assert ranking(lines) == (4, 1)


def test_the_error_of_a_gain_compares_ratios_of_means_to_the_first_arm():
    lines = [line([1, 3], [2, 6]), line([2, 6], [2, 6])]
    assert published.gain_errors(lines) == pytest.approx([50])


def test_a_run_has_the_columns_that_the_measures_need():
    assert set(columns_of([])) >= {"round", "stage", "arrival_ns", "first_token_ns", "finish_ns"}
