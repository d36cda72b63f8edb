"""The program that computes hit rate against capacity."""

import pytest

from experiments.studies.capacity import hit_rates
from hicache.cli.schema import config_of

CHAT = ("experiment=capacity", "workload=chat", "workload.num_sessions=20")


def test_the_curve_rises_to_what_a_cache_without_limit_hits() -> None:
    _, lru, best = zip(*hit_rates(config_of(*CHAT)), strict=True)
    assert list(lru) == sorted(lru)
    assert list(best) == sorted(best)
    assert lru[-1] == best[-1] > 0
    assert all(each <= bound for each, bound in zip(lru, best, strict=True))


def test_a_model_with_states_is_refused() -> None:
    with pytest.raises(ValueError, match="use hicache size model=qwen3_next_80b"):
        hit_rates(config_of(*CHAT, "model=qwen3_next_80b"))
