from dataclasses import replace

import numpy as np
import pytest

from hicache.config import Arrivals, WorkloadConfig
from hicache.request import Request, TokenSpans
from hicache.workload.feeder import Feeder, Release

ONE = TokenSpans(np.array([1], np.int32), np.array([1], np.int32))


def request(number: int, arrival: int, parent: int | None = None, think: int = 0) -> Request:
    return Request(
        id=number,
        session_id=0,
        arrival_ns=arrival,
        prompt=ONE,
        output=ONE,
        parent_id=parent,
        think_ns=think,
    )


# 0 -> 2 -> 4, 0 -> 3 (a sub-agent), 1 -> 5, and 6 alone
TREES = [
    request(0, 10),
    request(1, 10),
    request(2, 20, parent=0, think=7),
    request(3, 30, parent=0, think=2),
    request(4, 40, parent=2, think=5),
    request(5, 50, parent=1, think=100),
    request(6, 60),
]


def feeder(mode: Arrivals, *, concurrency: int = 1) -> Feeder:
    return Feeder(TREES, WorkloadConfig(arrivals=mode, concurrency=concurrency))


def named(releases: list[Release]) -> list[tuple[int, int]]:
    return [(time_ns, released.id) for time_ns, released in releases]


def test_open_arrivals_release_everything_at_its_time() -> None:
    released = feeder(Arrivals.open).initial()
    assert named(released) == [(10, 0), (10, 1), (20, 2), (30, 3), (40, 4), (50, 5), (60, 6)]


def test_an_answer_releases_nothing_under_open_arrivals() -> None:
    feed = feeder(Arrivals.open)
    feed.initial()
    assert feed.on_answered(0, 15) == []


def test_causal_arrivals_begin_with_the_roots() -> None:
    assert named(feeder(Arrivals.causal).initial()) == [(10, 0), (10, 1), (60, 6)]


def test_a_causal_child_waits_for_its_time_or_for_its_parent() -> None:
    feed = feeder(Arrivals.causal)
    feed.initial()
    assert named(feed.on_answered(0, 25)) == [(25, 2), (30, 3)]


def test_closed_arrivals_start_as_many_trees_as_there_are_places() -> None:
    assert named(feeder(Arrivals.closed, concurrency=2).initial()) == [(0, 0), (0, 1)]


def test_the_first_trees_of_a_closed_workload_may_start_one_after_another():
    config = WorkloadConfig(arrivals=Arrivals.closed, concurrency=2, stagger_s=7e-9)
    apart = Feeder(TREES, config)
    assert named(apart.initial()) == [(0, 0), (7, 1)]


def test_a_closed_child_comes_a_think_time_after_the_answer() -> None:
    feed = feeder(Arrivals.closed)
    feed.initial()
    assert named(feed.on_answered(0, 1000)) == [(1002, 3), (1007, 2)]


def test_a_place_is_free_when_all_of_a_tree_is_answered() -> None:
    feed = feeder(Arrivals.closed)
    feed.initial()
    feed.on_answered(0, 100)
    feed.on_answered(2, 200)
    assert named(feed.on_answered(4, 300)) == []  # the sub-agent is still at work
    assert named(feed.on_answered(3, 400)) == [(400, 1)]


def test_a_drop_takes_all_descendants_with_it() -> None:
    feed = feeder(Arrivals.causal)
    feed.initial()
    assert [gone.id for gone in feed.on_dropped(0, 11).requests] == [2, 3, 4]


def test_a_drop_leaves_the_rest_of_the_tree() -> None:
    feed = feeder(Arrivals.causal)
    feed.initial()
    feed.on_answered(0, 15)
    assert [gone.id for gone in feed.on_dropped(2, 25).requests] == [4]


def test_a_drop_under_closed_arrivals_starts_the_next_tree() -> None:
    feed = feeder(Arrivals.closed)
    feed.initial()
    dropped = feed.on_dropped(0, 70)
    assert named(dropped.released) == [(70, 1)]


def test_a_dropped_request_cannot_be_answered() -> None:
    feed = feeder(Arrivals.causal)
    feed.initial()
    feed.on_answered(0, 20)
    feed.on_dropped(2, 21)
    with pytest.raises(ValueError, match="request 4 was already answered or dropped"):
        feed.on_answered(4, 50)


def test_a_drop_under_open_arrivals_takes_nothing_along() -> None:
    feed = feeder(Arrivals.open)
    feed.initial()
    assert feed.on_dropped(0, 11).requests == []
    for number in (2, 3, 4):
        feed.on_answered(number, 50)
    assert len(feed._unsettled) == 3


@pytest.mark.parametrize("mode", list(Arrivals))
def test_every_request_is_released_once_and_settled(mode: Arrivals) -> None:
    feed = feeder(mode, concurrency=2)
    waiting = feed.initial()
    served: list[int] = []
    now_ns = 0
    while waiting:
        waiting.sort(key=lambda release: (release[0], release[1].id))
        time_ns, released = waiting.pop(0)
        now_ns = max(now_ns, time_ns) + 3
        served.append(released.id)
        waiting += feed.on_answered(released.id, now_ns)
    assert sorted(served) == [0, 1, 2, 3, 4, 5, 6]
    assert len(feed._unsettled) == 0


def test_a_request_settled_twice_is_refused() -> None:
    feed = feeder(Arrivals.open)
    feed.on_answered(6, 70)
    with pytest.raises(ValueError, match="request 6 was already answered or dropped"):
        feed.on_dropped(6, 80)


def test_a_child_without_its_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="request 4 follows request 2, which does not come before"):
        Feeder([TREES[0], TREES[4]], WorkloadConfig(arrivals=Arrivals.open))


# 0 -> 1 and 2 (sub-agents), which 3 joins as it follows 0; 3 -> 4
JOINED = [
    request(0, 10),
    request(1, 20, parent=0),
    request(2, 20, parent=0),
    replace(request(3, 30, parent=0, think=5), joins=(1, 2)),
    request(4, 40, parent=3),
]


@pytest.mark.parametrize(("mode", "wanted"), [(Arrivals.causal, 70), (Arrivals.closed, 75)])
def test_a_request_waits_for_all_the_sub_agents_that_it_joins(mode: Arrivals, wanted: int) -> None:
    feed = Feeder(JOINED, WorkloadConfig(arrivals=mode))
    feed.initial()
    assert [each.id for _, each in feed.on_answered(0, 15)] == [1, 2]
    assert feed.on_answered(2, 60) == []
    assert named(feed.on_answered(1, 70)) == [(wanted, 3)]


@pytest.mark.parametrize("answered", [None, 1])
def test_a_request_is_dropped_with_the_first_sub_agent_that_it_joins(answered: int | None) -> None:
    feed = Feeder(JOINED, WorkloadConfig(arrivals=Arrivals.closed))
    feed.initial()
    feed.on_answered(0, 15)
    if answered:
        assert feed.on_answered(answered, 20) == []
    assert [each.id for each in feed.on_dropped(2, 30).requests] == [3, 4]
    if not answered:
        assert feed.on_dropped(1, 40).requests == []
