"""The program that computes hit rate against capacity."""

import json
from pathlib import Path

from experiments.studies import capacity
from hicache.cli.schema import config_of


def test_the_curve_rises_to_what_a_cache_without_limit_hits(tmp_path: Path) -> None:
    config = config_of("experiment=capacity", "workload=chat", "workload.num_sessions=20")

    capacity.carry_out(config, tmp_path)

    summary = json.loads((tmp_path / "summary.json").read_text())
    rates = [summary[f"oracle/lru_{gib}_gib_token_hit_rate"] for gib in capacity.CAPACITIES_GIB]
    assert rates == sorted(rates)
    assert rates[-1] == summary["oracle/infinite_token_hit_rate"] > 0


def test_checkpoints_cost_hits(tmp_path: Path) -> None:
    config = config_of(
        "experiment=capacity", "workload=chat", "workload.num_sessions=20", "model=qwen3_next_80b"
    )

    capacity.carry_out(config, tmp_path)

    summary = json.loads((tmp_path / "summary.json").read_text())
    bound = summary["oracle/infinite_token_hit_rate"]
    assert 0 < summary["oracle/lru_maximum_token_hit_rate"] < bound
