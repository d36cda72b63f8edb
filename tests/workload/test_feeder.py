"""When requests are released: at their time, after their parent, or when a place is free."""

from dataclasses import replace

import numpy as np
import pytest

from hicache.config import Arrivals, WorkloadConfig
from hicache.request import Request, TokenSpans
from hicache.workload.feeder import Feeder, Release

ONE = TokenSpans(np.array([1], np.int32), np.array([1], np.int32))


def request(number: int, arrival: int, parent: int | None = None, think: int = 0) -> Request:
    tokens = {"prompt": ONE, "output": ONE}
    waits = {"parent_id": parent, "think_ns": think}
    return Request(id=number, session_id=0, arrival_ns=arrival, **tokens, **waits)


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
# 0 -> 1 and 2 (sub-agents), which 3 joins as it follows 0; 3 -> 4
JOINED = [
    request(0, 10),
    request(1, 20, parent=0),
    request(2, 20, parent=0),
    replace(request(3, 30, parent=0, think=5), joins=(1, 2)),
    request(4, 40, parent=3),
]


def feeder_of(
    mode: Arrivals, requests: list[Request] = TREES, **settings: float
) -> tuple[Feeder, list[tuple[int, int]]]:
    """Return a feeder, and its first releases as (time in ns, request id)."""
    feeder = Feeder(requests, WorkloadConfig(arrivals=mode, **settings))
    return feeder, named(feeder.initial())


def named(releases: list[Release]) -> list[tuple[int, int]]:
    return [(time_ns, released.id) for time_ns, released in releases]


@pytest.mark.parametrize(
    ("mode", "settings", "released"),
    [
        (Arrivals.open, {}, [(10, 0), (10, 1), (20, 2), (30, 3), (40, 4), (50, 5), (60, 6)]),
        (Arrivals.causal, {}, [(10, 0), (10, 1), (60, 6)]),
        (Arrivals.closed, {"concurrency": 2}, [(0, 0), (0, 1)]),
        (Arrivals.closed, {"concurrency": 2, "stagger_s": 7e-9}, [(0, 0), (7, 1)]),
    ],
)
def test_a_feeder_first_releases_the_requests_that_wait_for_no_answer(mode, settings, released):
    assert feeder_of(mode, **settings)[1] == released


@pytest.mark.parametrize(
    ("mode", "answered_ns", "released"),
    [
        (Arrivals.open, 15, []),
        (Arrivals.causal, 25, [(25, 2), (30, 3)]),  # at their time, but after the answer
        (Arrivals.closed, 1000, [(1002, 3), (1007, 2)]),  # after their think time
    ],
)
def test_an_answer_releases_the_next_turns(mode, answered_ns, released):
    assert named(feeder_of(mode)[0].on_answered(0, answered_ns)) == released


def test_a_closed_loop_releases_the_next_tree_when_a_whole_tree_is_answered_or_dropped():
    feeder, _ = feeder_of(Arrivals.closed, concurrency=1)
    feeder.on_answered(0, 100)
    feeder.on_answered(2, 200)
    assert named(feeder.on_answered(4, 300)) == []  # the sub-agent is still at work
    assert named(feeder.on_answered(3, 400)) == [(400, 1)]
    assert named(feeder.on_dropped(1, 470).released) == [(470, 6)]


def test_a_dropped_request_takes_its_descendants_along():
    feeder, _ = feeder_of(Arrivals.causal)
    assert [gone.id for gone in feeder.on_dropped(0, 11).requests] == [2, 3, 4]
    feeder, _ = feeder_of(Arrivals.causal)
    feeder.on_answered(0, 15)
    assert [gone.id for gone in feeder.on_dropped(2, 25).requests] == [4]
    feeder, _ = feeder_of(Arrivals.open)
    assert feeder.on_dropped(0, 11).requests == []
    for number in (2, 3, 4):
        feeder.on_answered(number, 50)
    assert len(feeder._unsettled) == 3


def test_answering_or_dropping_a_request_again_is_refused():
    feeder, _ = feeder_of(Arrivals.causal)
    feeder.on_answered(0, 20)
    feeder.on_dropped(2, 21)
    with pytest.raises(ValueError, match="request 4 was already answered or dropped"):
        feeder.on_answered(4, 50)
    with pytest.raises(ValueError, match="request 0 was already answered or dropped"):
        feeder.on_dropped(0, 80)


@pytest.mark.parametrize("mode", list(Arrivals))
def test_every_request_is_released_once_and_none_is_left_unanswered(mode):
    feeder = Feeder(TREES, WorkloadConfig(arrivals=mode, concurrency=2))
    waiting, served, now_ns = feeder.initial(), [], 0
    while waiting:
        waiting.sort(key=lambda release: (release[0], release[1].id))
        time_ns, released = waiting.pop(0)
        now_ns = max(now_ns, time_ns) + 3
        served.append(released.id)
        waiting += feeder.on_answered(released.id, now_ns)
    assert sorted(served) == [0, 1, 2, 3, 4, 5, 6]
    assert len(feeder._unsettled) == 0


def test_a_request_must_come_after_its_parent():
    with pytest.raises(ValueError, match="request 4 follows request 2, which does not come before"):
        feeder_of(Arrivals.open, [TREES[0], TREES[4]])


@pytest.mark.parametrize(("mode", "wanted"), [(Arrivals.causal, 70), (Arrivals.closed, 75)])
def test_a_request_waits_for_all_sub_agents_that_it_joins(mode, wanted):
    feeder, _ = feeder_of(mode, JOINED)
    assert [each.id for _, each in feeder.on_answered(0, 15)] == [1, 2]
    assert feeder.on_answered(2, 60) == []
    assert named(feeder.on_answered(1, 70)) == [(wanted, 3)]


@pytest.mark.parametrize("answered", [None, 1])
def test_a_request_is_dropped_with_the_first_dropped_sub_agent_that_it_joins(answered):
    feeder, _ = feeder_of(Arrivals.closed, JOINED)
    feeder.on_answered(0, 15)
    if answered:
        assert feeder.on_answered(answered, 20) == []
    assert [each.id for each in feeder.on_dropped(2, 30).requests] == [3, 4]
    if not answered:
        assert feeder.on_dropped(1, 40).requests == []
