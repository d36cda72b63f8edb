"""Who gives up, and when."""

import pytest

from hicache.config import WorkloadConfig
from hicache.workload.patience import patience_of
from tests.scheduler.world import request_of

REQUESTS = [request_of(number, [1], [1]) for number in range(2000)]


def patience(*, share: float, mean_s: float = 10.0, seed: int = 0) -> dict[int, int]:
    config = WorkloadConfig(kind="chat", abort_share=share, patience_s=mean_s)
    return patience_of(REQUESTS, config, seed=seed)


def test_nobody_gives_up_by_default() -> None:
    assert patience_of(REQUESTS, WorkloadConfig(kind="chat"), seed=0) == {}


def test_about_that_share_gives_up_after_about_that_time() -> None:
    drawn = patience(share=0.3, mean_s=4.0)
    assert len(drawn) == pytest.approx(600, rel=0.1)
    assert sum(drawn.values()) / len(drawn) == pytest.approx(4e9, rel=0.1)
    assert min(drawn.values()) >= 1


def test_everybody_may() -> None:
    assert set(patience(share=1.0)) == set(range(2000))


def test_a_smaller_share_is_a_part_of_a_larger_one() -> None:
    fewer, more = patience(share=0.1), patience(share=0.5)
    assert fewer.items() < more.items()


def test_seeds_differ_and_equal_ones_do_not() -> None:
    assert patience(share=0.5) == patience(share=0.5)
    assert patience(share=0.5) != patience(share=0.5, seed=1)


def test_half_the_patience_is_half_the_time() -> None:
    slow, fast = patience(share=0.5, mean_s=8.0), patience(share=0.5, mean_s=4.0)
    assert all(abs(slow[number] - 2 * fast[number]) <= 2 for number in slow)
