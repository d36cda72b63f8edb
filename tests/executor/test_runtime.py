"""A run in real time from the command line: its logits are those of a cold start."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hicache.executor.real import runtime
from hicache.executor.real.verify import Verdict
from tests.forked import run_script

ROOT = Path(__file__).parents[2]
SMALL = ("executor=torch", "executor.device=cpu", "model=tiny_hybrid", "executor.verify=true")


@pytest.fixture(autouse=True)
def without_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")


def run_in(folder, *overrides):
    """Run an experiment in `folder`; return what it printed and its summary."""
    script = ROOT / "experiments" / "run.py"
    printed = run_script(script, folder, folder / "printed", *SMALL, *overrides)
    return printed, json.loads((folder / printed.splitlines()[-1] / "summary.json").read_text())


def test_a_run_verifies_its_logits_and_names_tiers_without_hits(tmp_path):
    printed, summary = run_in(
        tmp_path, "workload=agents", "workload.limit=4", "engine.check_invariants=true"
    )
    assert "logits equal: 4 of 4" in printed
    assert "ρ gpu is that of h200, ρ read and write" in printed
    assert summary["verify/unequal_count"] == 0
    assert summary["request/load_back_s_mean"] >= 0
    assert summary["request/prefill_s_mean"] > 0
    # four requests of an agent hit on the device alone
    hits = {tier: summary[f"cache/{tier}_hit_tokens"] for tier in ("device", "host", "storage")}
    untested = [tier for tier, count in hits.items() if not count]
    assert summary["verify/untested_count"] == len(untested) > 0
    assert f"NOT VERIFIED, because nothing was hit on {' and '.join(untested)}" in printed
    assert f"not verified: {len(untested)} tier(s) in use without a hit" in printed


def test_the_state_at_the_end_of_a_chunk_gives_the_logits_of_a_cold_start(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 2, "hash_ids": ids}
        for ids in ([1, 2, 3], [1, 9])  # blocks of 512 tokens, every fourth of which is computed
    ]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed, summary = run_in(
        tmp_path,
        *("workload=trace", "workload.path=two.jsonl", "workload.token_stride=4"),
        *("scheduler.chunk_tokens=128", "compat=sglang_0_5_23"),
    )
    assert "logits equal: 2 of 2" in printed
    assert summary["cache/device_hit_tokens"] == 128


@pytest.mark.parametrize("is_interpreted", [True, False])
def test_triton_kernels_on_a_cpu_need_the_interpreter(is_interpreted, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if is_interpreted else "0")
    with nullcontext() if is_interpreted else pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        assert runtime._plane("triton", torch.device("cpu")) is not None


def test_logits_that_are_all_equal_need_no_further_numbers():
    assert str(Verdict(num_equal=3, num_checked=3)) == "logits equal: 3 of 3"
    told = str(Verdict(num_equal=2, num_checked=3, num_tokens=9, num_agree=8, error=0.5))
    assert told.startswith("logits equal: 2 of 3; the same token: 8 of 9; largest difference: 0.5")
