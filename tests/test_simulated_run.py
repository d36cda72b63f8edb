"""A simulated run, from the command line to its last line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WATCHED = """
import sys
sys.argv[0] = "run"
from hicache.cli.run import main
main()
print(*(name for name in ("torch", "triton", "wandb") if name in sys.modules))
"""
TINY = (
    "workload=builtin",
    "workload.num_sessions=10",
    "workload.limit=20",
    "storage=memory",
    "executor=simulated",
    "engine.check_invariants=true",
)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Twenty requests, and then the names of heavy modules that were imported for them."""
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *TINY],
        cwd=tmp_path_factory.mktemp("run"),
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_succeeds(done):
    assert done.returncode == 0, done.stderr


def test_it_imports_neither_torch_nor_triton_nor_a_tracker_nobody_asked_for(done):
    assert done.stdout.splitlines()[-1] == ""


def test_its_tokens_add_up(done):
    run_dir = Path(done.stdout.splitlines()[-2])
    summary = json.loads((run_dir / "summary.json").read_text())
    names = ("device_hit", "host_hit", "storage_hit", "computed", "rejected", "aborted")
    assert summary["request/count"] == 20
    assert summary["request/prompt_tokens"] == sum(summary[f"cache/{n}_tokens"] for n in names)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Where a policy of the user's own lies, and a sweep goes to."""
    path = tmp_path_factory.mktemp("mine")
    (path / "my_policies.py").write_text(
        "from hicache.policies.eviction import Fifo\n\n\nclass Mine(Fifo):\n    pass\n"
    )
    return path


def sweep(directory: Path, num_workers: int) -> subprocess.CompletedProcess[str]:
    """Two jobs beside each other, or after one another."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "experiments.run", "-m", "hydra/launcher=joblib", *TINY),
            *("cache.policy=fifo,my_policies:Mine", "hydra.sweep.dir=sweep"),
            f"hydra.launcher.n_jobs={num_workers}",
        ],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.fixture(scope="module")
def side_by_side(directory) -> str:
    return sweep(directory, num_workers=2).stdout


def test_jobs_of_a_sweep_run_side_by_side(directory, side_by_side):
    jobs = ("0_policy=fifo", "1_policy=my_policies_Mine")
    fifo, mine = (directory / "sweep" / job / "summary.json" for job in jobs)
    assert mine.read_text() == fifo.read_text()
    assert f"{jobs[0]} (1 of 2)  →  token hit rate" in side_by_side
    assert "already finished" not in side_by_side


@pytest.mark.soak
def test_jobs_of_such_a_sweep_are_not_made_twice(directory, side_by_side):
    printed = sweep(directory, num_workers=1).stdout
    assert "1_policy=my_policies_Mine (2 of 2)  →  already finished" in printed
    assert "0_policy=fifo (1 of 2)  →  already finished" in printed
