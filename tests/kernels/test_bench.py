"""The bench, dry: every case at toy sizes, and what it does when something is wrong."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import wrong_copies

from hicache.workbench.bench import __main__ as bench
from hicache.workbench.bench import cases as bench_cases
from hicache.workbench.bench import contest as bench_contest
from hicache.workbench.bench.measure import KIB, Bench, quantiles
from hicache.workbench.bench.session import Cell, Session


@pytest.fixture
def toy():
    return Bench(
        torch.device("cpu"), device_bytes=1 << 18, host_bytes=1 << 18, num_layers=2, repeats=1
    )


@pytest.fixture
def toy_transfer(toy):
    return toy.transfer("to_host", 16, 256)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", "--dry-run", *arguments])
    return bench.main()


def test_a_dry_run_walks_through_every_case(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--json", str(tmp_path / "bench.json")) == 0
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["failed"] == {}
    assert {goal["goal"] for goal in document["goals"]} == {f"G{n}" for n in range(1, 11)} - {"G5"}
    assert all(goal["holds"] is None and goal["why"] for goal in document["goals"])
    assert {record["op"] for record in document["records"]} >= {"pages", "slots", "sweep", "index"}
    assert all(record["gb_per_s"] is None for record in document["records"])
    printed = capsys.readouterr().out
    assert "G10  not measured" in printed
    assert "nan" not in printed


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


@pytest.fixture
def in_the_tests(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)


def test_a_kernel_of_the_users_own_is_a_column(monkeypatch, capsys, tmp_path, in_the_tests):
    path = tmp_path / "bench.json"
    assert run(monkeypatch, "--kernel", "wrong_copies:right", "--json", str(path)) == 0
    document = json.loads(path.read_text())
    cells = [cell for cell in document["contest"] if cell["kernel"] == "wrong_copies:right"]
    assert [cell["direction"] for cell in cells] == [
        "device", "device", "to_device", "to_device", "to_host", "to_host", "states"
    ]  # fmt: skip
    assert {cell["remark"] for cell in cells} == {"right"}
    printed = capsys.readouterr().out
    (head,) = [line for line in printed.splitlines() if line.startswith("to_device")]
    assert head.split()[1] == "ours"
    assert head.split()[-1] == "wrong_copies:right"
    assert (
        "memcpy_batch (device, to_device, to_host, states): declined: the copy engine needs a GPU"
        in printed
    )


def test_a_wrong_kernel_fails_the_bench_and_leaves_the_contest(toy, monkeypatch):
    monkeypatch.setattr(bench_contest.peers, "PEERS", {})
    session = Session(toy, {"mine": wrong_copies.source_eater})
    bench_contest.contest(session)
    assert "an item differs" in session.failures["mine"]
    assert list(session.failures) == ["mine"]
    mine = [cell for cell in session.cells if cell.kernel == "mine"]
    ours = [cell for cell in session.cells if cell.kernel == "ours"]
    assert len(mine) < len(ours)


def test_a_wrong_kernel_makes_the_exit_code_1(monkeypatch, capsys, in_the_tests):
    monkeypatch.setattr(bench_contest.peers, "PEERS", {})
    assert run(monkeypatch, "--kernel", "wrong_copies:source_eater") == 1
    assert (
        "FAILED wrong_copies:source_eater: device, 4 KiB: RuntimeError" in capsys.readouterr().out
    )


@pytest.mark.parametrize(("broken", "code"), [("ours", 1), ("sgl_warps", 0)])
def test_a_broken_peer_is_the_peers_affair_and_ours_is_not(broken, code, monkeypatch):
    def raising(src, dst):
        raise RuntimeError("on purpose")

    peer = {"sgl_warps": raising} if broken == "sgl_warps" else {}
    monkeypatch.setattr(bench_contest.peers, "PEERS", peer)
    monkeypatch.setattr(bench_contest, "DIRECTIONS", {"device": ("device", "device_target")})
    if broken == "ours":
        monkeypatch.setattr(bench_contest.contract, "ours", raising)
    assert run(monkeypatch, "--op", "contest") == code


def test_a_kernel_that_is_not_there_is_refused_in_one_sentence(monkeypatch, capsys):
    assert run(monkeypatch, "--kernel", "no_such_file:mine") == 2
    assert capsys.readouterr().err.count("\n") == 1


def measured(toy):
    session = Session(toy)
    for direction, ceiling in (("device", 2e12), ("to_device", 48e9)):
        for size in (4 * KIB, 1024 * KIB, 1 << 29):
            session.cells.append(
                Cell(
                    direction=direction,
                    num_bytes=size,
                    kernel="ours",
                    p50_s=5e-6 + size / ceiling,
                )
            )
    return session


def test_a_contest_is_a_table_of_times_and_rates(toy):
    text = bench_contest.table(measured(toy).cells)
    assert "512 MiB" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("1 MiB")]
    assert rows == [["1", "MiB", "5.5", "/", "189.8"], ["1", "MiB", "26.8", "/", "39.1"]]


def test_a_contest_judges_peers_at_the_largest_transfer_that_was_timed(toy):
    session = measured(toy)
    for name, p50_s in (("vllm_blocks", 2e-2), ("sgl_warps", 1e-2)):
        cell = Cell(direction="to_device", num_bytes=1 << 29, kernel=name, p50_s=p50_s)
        session.cells.append(cell)
    bench_contest._judge(session, "to_device")
    ours_s = 5e-6 + (1 << 29) / 48e9
    judged = {goal.what: goal for goal in session.goals}
    faster, slower = (
        judged[f"to_device, 512 MiB, over {name}"] for name in ("vllm_blocks", "sgl_warps")
    )
    assert (faster.got, faster.holds) == (pytest.approx(2e-2 / ours_s), True)
    assert (slower.got, slower.holds) == (pytest.approx(1e-2 / ours_s), False)
    assert judged["to_device, 512 MiB, over sglang_unified"].holds is None
