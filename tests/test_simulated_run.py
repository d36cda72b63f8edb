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
from experiments.run import main
main()
print(*(name for name in ("torch", "triton", "wandb") if name in sys.modules))
"""
TINY = (
    "workload=builtin",
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


def test_jobs_of_a_sweep_run_side_by_side(tmp_path):
    (tmp_path / "my_policies.py").write_text(
        "from hicache.cache.tree.eviction import Fifo\n\n\nclass Mine(Fifo):\n    pass\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.run", "-m", "hydra/launcher=joblib", *TINY),
            *("cache.eviction=my_policies:Mine,fifo", "hydra.launcher.n_jobs=2"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sweep = Path(done.stdout.splitlines()[-1])
    mine, fifo = ((sweep / job / "summary.json").read_text() for job in ("0", "1"))
    assert mine == fifo
    assert "cache.eviction=my_policies:Mine " in done.stdout
