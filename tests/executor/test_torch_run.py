"""Real time from the command line: three tiers, and logits that are those of a cold start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "executor=torch",
    "executor.device=cpu",
    "model=tiny_hybrid",
    "workload=agents",
    "workload.limit=4",
    "executor.verify=true",
    "engine.check_invariants=true",
)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return subprocess.run(
        [sys.executable, "-m", "experiments.run", *SMALL],
        cwd=tmp_path_factory.mktemp("run"),
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_succeeds(done):
    assert done.returncode == 0, done.stderr


def test_it_prints_that_all_logits_are_equal(done):
    assert "logits equal: 4 of 4" in done.stdout


def test_it_says_that_its_loads_are_those_of_the_machine_it_was_told_of(done):
    assert "ρ gpu is that of h200, ρ read and write" in done.stdout


def test_exposed_times_are_in_the_fields_of_a_simulated_run(done):
    summary = json.loads((Path(done.stdout.splitlines()[-1]) / "summary.json").read_text())
    assert summary["verify/unequal_count"] == 0
    assert summary["request/load_back_s_mean"] >= 0
    assert summary["request/prefill_s_mean"] > 0


def test_equal_logits_without_hits_are_not_called_verified(done):
    # four requests of an agent hit on the device alone
    summary = json.loads((Path(done.stdout.splitlines()[-1]) / "summary.json").read_text())
    hits = {tier: summary[f"cache/{tier}_hit_tokens"] for tier in ("device", "host", "storage")}
    untested = [tier for tier, count in hits.items() if not count]
    assert summary["verify/untested_count"] == len(untested) > 0
    assert f"NOT VERIFIED, because nothing was hit on {' and '.join(untested)}" in done.stdout
    assert f"not verified: {len(untested)} tier(s) in use without a hit" in done.stdout
