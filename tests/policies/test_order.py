"""Which waiting request each setting of `scheduler.order` ranks first."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.config import SchedulerConfig
from hicache.policies.policy import presets
from tests.cache.small import world_of


@pytest.mark.parametrize(
    ("order", "first"), [("fcfs", 0), ("longest_prefix", 3), ("shortest_remaining", 2)]
)
def test_each_order_ranks_the_request_that_it_prefers_first(order, first):
    """By request: tokens of the prompt, and how many of them are cached."""
    requests = [(900, 0), (1000, 600), (300, 0), (1500, 700)]
    sort_key = presets(world_of(scheduler=SchedulerConfig(order=order))).requests.sort_key

    def rank(number: int) -> float:
        req: Any = SimpleNamespace(number=number, target_len=requests[number][0], submitted_ns=0)
        match: Any = SimpleNamespace(usable_len=requests[number][1])
        return sort_key(req, match)

    assert min(range(4), key=rank) == first
