"""Who is looked at first."""

from types import SimpleNamespace
from typing import Any

from hicache.clock import SECOND_NS
from hicache.config import SchedulerConfig
from hicache.policies.policy import presets
from tests.cache.small import world_of


def first_of(order: str, *reqs: dict[str, float], **knobs: Any) -> int:
    """The index of the one that is looked at first: each has a prompt of 1,000 tokens."""
    config = SchedulerConfig(order=order, **knobs)
    ranking = presets(world_of(scheduler=config)).requests

    def rank(number: int) -> float:
        told = reqs[number]
        req: Any = SimpleNamespace(
            number=number,
            target_len=told.get("prompt", 1000),
            submitted_ns=int(told.get("came_s", 0) * SECOND_NS),
        )
        match: Any = SimpleNamespace(usable_len=told.get("cached", 0))
        return ranking.sort_key(req, match)

    return min(range(len(reqs)), key=rank)


def test_first_come_is_first_served_whatever_they_have() -> None:
    assert first_of("fcfs", {"prompt": 900}, {"prompt": 10, "cached": 9}) == 0


def test_the_longest_prefix_is_first() -> None:
    assert first_of("longest_prefix", {"cached": 100}, {"cached": 300}, {"cached": 200}) == 1


def test_the_least_work_left_is_first() -> None:
    short, cached = {"prompt": 300}, {"prompt": 1000, "cached": 750}
    assert first_of("shortest_remaining", {"prompt": 900}, short, cached) == 2


def test_a_second_of_waiting_forgives_the_share_of_work_that_aging_says() -> None:
    long, short = {"prompt": 900}, {"prompt": 400, "came_s": 4}  # half a second apart in work
    assert first_of("shortest_remaining", long, short, aging=0.1) == 1
    assert first_of("shortest_remaining", long, short, aging=0.2) == 0
    assert first_of("shortest_remaining", long, short, aging=0.0) == 1
