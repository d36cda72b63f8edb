"""A simulated run and a parallel sweep from the command line, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WATCHED = """
import sys
sys.argv[0] = "run"
from hicache.cli.run import main
main()
SLOW = ("torch", "triton", "wandb", "matplotlib", "pooch")
print(*(name for name in SLOW if name in sys.modules))
"""
TINY = (
    *("workload=builtin", "workload.num_sessions=10", "workload.limit=20", "storage=memory"),
    *("executor=simulated", "engine.check_invariants=true"),
)


def lines_of(folder, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_simulated_run_imports_no_slow_library_and_counts_every_token(tmp_path):
    *_, run_dir, imported = lines_of(tmp_path, "-c", WATCHED, *TINY)
    assert imported == ""
    summary = json.loads((tmp_path / run_dir / "summary.json").read_text())
    names = ("device_hit", "host_hit", "storage_hit", "computed", "rejected", "aborted")
    assert summary["request/count"] == 20
    assert summary["request/prompt_tokens"] == sum(summary[f"cache/{n}_tokens"] for n in names)


def test_jobs_of_a_sweep_run_in_parallel(tmp_path):
    (tmp_path / "my_policies.py").write_text(
        "from hicache.policies.eviction import Fifo\n\n\nclass Mine(Fifo):\n    pass\n"
    )
    command = ("-m", "experiments.run", "-m", "hydra/launcher=joblib", "hydra.sweep.dir=sweep")
    jobs = (*TINY, "cache.policy=fifo,my_policies:Mine", "hydra.launcher.n_jobs=2")
    printed = "\n".join(lines_of(tmp_path, *command, *jobs))
    assert "\n0_policy=fifo (1 of 2)  →  token hit rate" in f"\n{printed}"
    fifo, mine = (
        (tmp_path / "sweep" / job / "summary.json").read_text()
        for job in ("0_policy=fifo", "1_policy=my_policies_Mine")
    )
    assert mine == fifo
