"""The bench, dry: every case at toy sizes, and what it does when something is wrong."""

import json
import math
import sys

import pytest
import torch

from hicache.kernels.bench import __main__ as bench
from hicache.kernels.bench import cases as bench_cases
from hicache.kernels.bench.measure import Bench, quantiles
from hicache.kernels.bench.session import Session


@pytest.fixture
def toy():
    return Bench(
        torch.device("cpu"), device_bytes=1 << 18, host_bytes=1 << 18, num_layers=2, repeats=1
    )


@pytest.fixture
def toy_transfer(toy):
    return Session(toy).across("to_host", 16, 256)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", "--dry-run", *arguments])
    return bench.main()


def test_a_dry_run_walks_through_every_case(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--json", str(tmp_path / "bench.json")) == 0
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["failed"] == {}
    assert {goal["goal"] for goal in document["goals"]} == {f"G{n}" for n in range(1, 11)}
    assert all(goal["holds"] is None and goal["why"] for goal in document["goals"])
    assert {record["op"] for record in document["records"]} >= {"pages", "slots", "sweep", "index"}
    assert all(record["gb_per_s"] is None for record in document["records"])
    printed = capsys.readouterr().out
    assert "G10  not measured" in printed


def test_a_case_that_fails_is_reported_and_the_others_go_on(monkeypatch, capsys, tmp_path):
    def broken(session):
        raise RuntimeError("on purpose")

    monkeypatch.setitem(bench_cases.CASES, "pages", broken)
    path = tmp_path / "bench.json"
    assert run(monkeypatch, "--op", "pages", "--op", "indices", "--json", str(path)) == 1
    document = json.loads(path.read_text())
    assert "on purpose" in document["failed"]["pages"]
    assert any(record["op"] == "index" for record in document["records"])
    assert "FAILED pages: RuntimeError: on purpose" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["missing", "wrong", "stray"])
def test_verification_refuses_a_copy_that_is(fault, toy, toy_transfer):
    table = toy_transfer.table

    def faulty_launch():
        toy_transfer.launch()
        named = int(toy_transfer.dst_ids[1])
        if fault == "missing":
            table.dst[1][named, -1] = toy_poison()
        elif fault == "wrong":
            table.dst[1][named, 0] ^= 1
        else:
            others = set(range(table.num_dst_items)) - set(toy_transfer.dst_ids.tolist())
            table.dst[1][others.pop(), -1] ^= 1

    sentence = "written outside of the ids" if fault == "stray" else "differs from its source"
    with pytest.raises(RuntimeError, match=f"buffer 1: .*{sentence}"):
        toy.verify(toy_transfer, faulty_launch)


def toy_poison():
    return int.from_bytes(b"\xa5" * 8, "little", signed=True)


def test_verification_accepts_a_right_copy(toy, toy_transfer):
    toy.verify(toy_transfer, toy_transfer.launch)
    assert toy_transfer.num_bytes == 1 << 18


@pytest.mark.parametrize(
    ("judge", "got", "holds"),
    [
        ("at_least", 0.92, True),
        ("at_least", 0.91, False),
        ("at_most", 1.05, True),
        ("at_most", 1.06, False),
        ("at_least", math.nan, None),
    ],
)
def test_a_goal_is_judged_by_its_measured_ratio(judge, got, holds, toy):
    session = Session(toy)
    getattr(session, judge)("G1", "a ratio", got, 0.92 if judge == "at_least" else 1.05)
    assert session.goals[0].holds is holds


def test_quantiles_are_of_the_times_given():
    timing = quantiles([float(i) for i in range(11)])
    assert (timing.p20_s, timing.p50_s, timing.p80_s) == (2.0, 5.0, 8.0)


def test_without_a_gpu_only_a_dry_run_starts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main() == 2
    assert "--dry-run needs none" in capsys.readouterr().err


def test_a_bench_that_is_stopped_keeps_what_it_has(monkeypatch, tmp_path):
    def stopped(session):
        raise KeyboardInterrupt

    monkeypatch.setitem(bench_cases.CASES, "pages", stopped)
    path = tmp_path / "bench.json"
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "--op", "indices", "--op", "pages", "--json", str(path))
    operations = {record["op"] for record in json.loads(path.read_text())["records"]}
    assert operations == {"ceiling", "index"}
