"""Sparse Prefix Caching: the dynamic program finds what trying all placements finds."""

from itertools import combinations
from random import Random

import numpy as np
import pytest

from experiments.studies.states import Sparse, placed


def computed(depths: list[int], checkpoints: list[int], start: int) -> int:
    return sum(d - max([start, *(c for c in checkpoints if c <= d)]) for d in depths)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_placement_of_checkpoints_computes_fewer_tokens(seed: int) -> None:
    rng = Random(seed)
    start, budget = rng.randint(0, 5), rng.randint(1, 4)
    depths = [rng.randint(start + 1, start + 12) for _ in range(rng.randint(1, 12))]
    found = placed(np.array(depths), start, budget)
    assert len(found) <= budget
    assert found == sorted({*found})
    every = combinations(range(start + 1, start + 13), budget)
    assert computed(depths, found, start) == min(computed(depths, [*each], start) for each in every)


def test_a_prompt_keeps_its_end_and_the_depths_of_earlier_prompts() -> None:
    policy = Sparse(None, budget=2)
    assert policy.checkpoints("mamba", 0, 100, None) == [100]
    assert policy.checkpoints("mamba", 0, 100, 60) == [100]
    assert policy.checkpoints("mamba", 0, 90, 60) == [60, 90]
    assert policy.checkpoints("mamba", 60, 90, None) == [90]
