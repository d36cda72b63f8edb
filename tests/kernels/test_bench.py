"""The kernel bench: dry runs at small sizes without a GPU, and results from made-up times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wrong_copies

from hicache.workbench.bench import __main__ as bench
from hicache.workbench.bench import cases as bench_cases
from hicache.workbench.bench import contest as bench_contest
from hicache.workbench.bench import step_cases
from hicache.workbench.bench.measure import POISON_WORD, Bench
from hicache.workbench.bench.session import Session

HERE = Path(__file__).parent


def test_the_output_of_the_bench_with_made_up_times_equals_the_recorded_one():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.measured"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=HERE.parents[1]
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    expected = (HERE / "measured.txt").read_text()
    assert ran.stdout.splitlines()[1:] == expected.splitlines()[1:], (
        "if the bench is meant to measure something else now: "
        "TRITON_INTERPRET=1 python -m tests.kernels.measured > tests/kernels/measured.txt"
    )


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A function that runs the bench without a GPU; returns its exit code and its JSON document."""
    monkeypatch.chdir(HERE)
    path = tmp_path / "bench.json"

    def ran(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench", "--dry-run", "--json", str(path), *arguments])
        return bench.main(), json.loads(path.read_text())

    ran.path = path
    return ran


def test_a_dry_run_runs_every_case(run, capsys):
    # test_step_cases.py runs the others
    names = [name for name, case in bench.CASES.items() if case.__module__ != step_cases.__name__]
    code, document = run(*(f"--op={name}" for name in names))
    assert (code, document["failed"]) == (0, {})
    assert {record["op"] for record in document["records"]} >= {"pages", "slots", "sweep", "index"}
    assert all(record["gb_per_s"] is None for record in document["records"])
    printed = capsys.readouterr().out
    assert "nan" not in printed


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), KeyboardInterrupt()])
def test_a_failing_or_interrupted_case_loses_no_other_results(error, run, monkeypatch, capsys):
    def broken(session):
        raise error

    monkeypatch.setitem(bench_cases.CASES, "pages", broken)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run("--op", "indices", "--op", "pages")
        document = json.loads(run.path.read_text())
    else:
        code, document = run("--op", "pages", "--op", "indices")
        assert code == 1
        assert "on purpose" in document["failed"]["pages"]
        assert "FAILED pages: RuntimeError: on purpose" in capsys.readouterr().out
    assert {record["op"] for record in document["records"]} == {"ceiling", "index"}


@pytest.fixture
def toy():
    sizes = {"device_bytes": 1 << 18, "host_bytes": 1 << 18, "num_layers": 2, "repeats": 1}
    return Bench(torch.device("cpu"), **sizes)


@pytest.mark.parametrize("fault", [None, "missing", "wrong", "stray"])
def test_verification_refuses_wrong_copies_and_accepts_right_ones(fault, toy):
    transfer = toy.transfer("to_host", 16, 256)
    table = transfer.table
    assert transfer.num_bytes == 1 << 18

    def launch():
        transfer.launch()
        named = int(transfer.dst_ids[1])
        if fault == "missing":
            table.dst[1][named, -1] = POISON_WORD
        elif fault == "wrong":
            table.dst[1][named, 0] ^= 1
        elif fault == "stray":
            others = set(range(table.num_dst_items)) - set(transfer.dst_ids.tolist())
            table.dst[1][others.pop(), -1] ^= 1

    if fault is None:
        toy.verify(transfer, launch)
        return
    sentence = "written outside of the ids" if fault == "stray" else "differs from its source"
    with pytest.raises(RuntimeError, match=f"buffer 1: .*{sentence}"):
        toy.verify(transfer, launch)


def test_a_bench_without_a_gpu_or_with_an_unknown_kernel_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, sentence in (
        ([], "--dry-run needs none"),
        (["--dry-run", "--kernel", "no_such_file:mine"], "no kernel no_such_file:mine"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        assert bench.main() == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert said.count("\n") == 1


def test_a_users_kernel_is_a_column_of_the_table_that_compares_kernels(run, capsys):
    code, document = run("--kernel", "wrong_copies:right")
    assert code == 0
    cells = [
        cell for cell in document["contest"] if cell["parameters"]["kernel"] == "wrong_copies:right"
    ]
    directions = ["device", "to_device", "to_host"]
    assert [cell["parameters"]["direction"] for cell in cells] == [
        *sorted(directions * 2),
        "states",
    ]
    assert {cell["case"] for cell in cells} == {"right"}
    printed = capsys.readouterr().out
    (head,) = [line.split() for line in printed.splitlines() if line.startswith("to_device")]
    assert (head[1], head[-1]) == ("ours", "wrong_copies:right")
    where = "device, to_device, to_host, states"
    assert f"memcpy_batch ({where}): declined: the copy engine needs a GPU" in printed


def test_a_wrong_kernel_leaves_the_contest_and_fails_the_bench(run, monkeypatch, toy, capsys):
    monkeypatch.setattr(bench_contest.peers, "PEERS", {})
    session = Session(toy, {"mine": wrong_copies.source_eater})
    bench_contest.contest(session)
    assert list(session.failures) == ["mine"]
    assert "an item differs" in session.failures["mine"]
    kernels = [cell.parameters["kernel"] for cell in session.cells]
    assert kernels.count("mine") < kernels.count("ours")
    assert run("--kernel", "wrong_copies:source_eater")[0] == 1
    failed = "FAILED wrong_copies:source_eater: device, 4 KiB: RuntimeError"
    assert failed in capsys.readouterr().out


@pytest.mark.parametrize(("broken", "code"), [("ours", 1), ("sgl_warps", 0)])
def test_an_error_fails_the_bench_in_our_kernel_but_not_in_a_peer(broken, code, run, monkeypatch):
    def raising(src, dst):
        raise RuntimeError("on purpose")

    peers = {"sgl_warps": raising} if broken == "sgl_warps" else {}
    monkeypatch.setattr(bench_contest.peers, "PEERS", peers)
    monkeypatch.setattr(bench_contest, "DIRECTIONS", {"device": ("device", "device_target")})
    if broken == "ours":
        monkeypatch.setattr(bench_contest.contract, "ours", raising)
    assert run("--op", "contest")[0] == code
