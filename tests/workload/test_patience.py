"""Which requests are aborted, and after what time."""

import pytest

from hicache.config import GeneratedConfig
from hicache.workload.clients import patience_of
from tests.scheduler.world import request_of

REQUESTS = [request_of(number, [1], [1]) for number in range(2000)]


def patience(share: float = 0.5, mean_s: float = 10.0, seed: int = 0) -> dict[int, int]:
    config = GeneratedConfig(kind="chat", abort_share=share, patience_s=mean_s)
    return patience_of(REQUESTS, config, seed=seed)


def test_by_default_no_request_is_aborted():
    assert patience_of(REQUESTS, GeneratedConfig(kind="chat"), seed=0) == {}


def test_a_share_of_the_requests_is_aborted_after_exponential_times():
    drawn = patience(0.3, 4.0)
    assert len(drawn) == pytest.approx(600, rel=0.1)
    assert sum(drawn.values()) / len(drawn) == pytest.approx(4e9, rel=0.1)
    assert min(drawn.values()) >= 1
    assert set(patience(1.0)) == set(range(2000))
    halved = patience(0.3, 2.0)
    assert all(abs(drawn[number] - 2 * halved[number]) <= 2 for number in drawn)


def test_requests_aborted_at_a_smaller_share_are_also_aborted_at_a_larger_one():
    assert patience(0.1).items() < patience().items() == patience().items()
    assert patience() != patience(seed=1)
