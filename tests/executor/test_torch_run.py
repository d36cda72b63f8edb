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


def run_in(folder, *overrides):
    return subprocess.run(
        [sys.executable, "-m", "experiments.run", *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("run"), *SMALL)


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


def test_the_state_at_the_end_of_a_chunk_gives_the_logits_of_a_cold_start(tmp_path):
    blocks = ([1, 2, 3], [1, 9])  # of 512 tokens, every fourth of which is computed
    rows = [
        {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 2, "hash_ids": ids}
        for ids in blocks
    ]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = run_in(
        tmp_path,
        *SMALL[:3],
        *SMALL[5:],
        "workload=trace",
        "workload.path=two.jsonl",
        "workload.token_stride=4",
        "scheduler.chunk_tokens=128",
        "compat=sglang_0_5_23",
    )
    assert "logits equal: 2 of 2" in ended.stdout, ended.stderr
    summary = json.loads((Path(ended.stdout.splitlines()[-1]) / "summary.json").read_text())
    assert summary["cache/device_hit_tokens"] == 128
