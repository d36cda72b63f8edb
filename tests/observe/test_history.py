"""What the history of pages records of evictions, requests and storage."""

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA, Window
from hicache.cache.tree.events import Demand, Purpose
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.sequence import Sequence
from hicache.observe.history import (
    THROWN_AWAY,
    UNOWNED,
    WAS_HELD,
    PageHistory,
    PageRegistry,
    Stored,
    place_of,
)
from hicache.request import TokenSpans
from tests.cache.small import named_kinds
from tests.scheduler.world import request_of

NUMBERS = np.arange(8, dtype=np.int32)
NAMES = NUMBERS.tobytes()


@pytest.fixture
def history() -> PageHistory:
    pages = TokenSpans(np.array([0], np.int32), np.array([8], np.int32))
    return PageHistory(PageRegistry({0: pages}), named_kinds(4, window_len=8, has_states=True))


def sequence(request_id: int) -> Sequence:
    return Sequence(NAMES, "", request_of(request_id, range(32), [1]))


def node_of(first: int, end: int) -> Node:
    return Node(None, NAMES[4 * first : 4 * end], first, end - first)


def write(history: PageHistory, *items: tuple[Node, int]) -> None:
    history.write_queued("a write", list(items))
    history.write_ended("a write")


def places(flags: np.ndarray) -> list[int]:
    return np.flatnonzero(flags).tolist()


def test_the_eviction_of_the_last_copy_is_recorded_with_its_purpose_request_and_time(history):
    assert history.now_ns == 0
    node = node_of(2, 4)
    for tier in (DEVICE, HOST):
        node.held[tier][FULL] = [1, 2]
        history.put(node, tier, FULL)
    for now_ns, tier, purpose in ((50, DEVICE, Purpose.prefill), (60, HOST, Purpose.back_up)):
        assert not history.lost_for[FULL].any()
        history.at(now_ns)
        node.held[tier][FULL] = None
        history.evicted(node, tier, FULL, Demand(purpose, 8))
    lost = (history.lost_for[FULL], history.lost_to[FULL], history.lost_ns[FULL])
    assert list(map(places, lost)) == [[2, 3]] * 3
    assert [int(each[2]) for each in lost] == [Purpose.back_up, 8, 60]
    assert not history.lost_for[MAMBA].any()


def test_a_state_is_recorded_at_the_last_page_of_its_node(history):
    history.put(node_of(2, 4), DEVICE, MAMBA)
    assert places(history.marks[MAMBA] & WAS_HELD) == [3]


def test_a_request_owns_the_pages_that_it_computes_until_it_publishes_or_abandons_them(history):
    history.admit(sequence(0).request, NAMES, 2)
    assert history.owners.tolist() == [UNOWNED, UNOWNED, 1, 1, 1, 1, 1, 1]
    assert places(history.registry.is_seen) == [2, 3, 4, 5, 6, 7]
    history.published(sequence(0), 2, 4)
    history.abandoned(sequence(1), 4, 8)  # pages of another request stay
    assert history.owners.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    history.abandoned(sequence(0), 4, 5)
    assert history.owners.tolist() == [0, 0, 0, 0, THROWN_AWAY, 1, 1, 1]


def test_pages_of_a_canceled_request_count_as_seen_only_if_a_tier_has_them(history):
    history.put(node_of(6, 7), DEVICE, FULL)
    write(history, (node_of(5, 6), FULL))
    history.admit(sequence(4).request, NAMES, 4)
    history.forget(sequence(3))  # of another request
    assert history.owners.tolist() == [0, 0, 0, 0, 5, 5, 5, 5]
    history.forget(sequence(4))
    assert not history.owners.any()
    assert places(history.registry.is_seen) == [5, 6]


def test_a_stored_page_keeps_the_time_of_its_first_write_until_it_leaves_storage(history):
    registry = history.registry
    history.at(10)
    write(history, (node_of(0, 2), FULL))
    history.at(20)
    history.write_dropped([(node_of(0, 4), FULL)])
    write(history, (node_of(0, 1), FULL), (node_of(1, 3), FULL))
    assert registry.stored[FULL][:5].tolist() == [3, 3, 3, Stored.dropped, Stored.never]
    assert registry.written_ns[FULL][:4].tolist() == [10, 10, 20, 0]
    history.taken_out([(node_of(0, 1), FULL)])
    assert registry.stored[FULL][0] == Stored.never


def test_writes_and_reports_of_storage_are_recorded_by_kind(history):
    stored = history.registry.stored
    history.write_queued("a write", [(node_of(2, 4), kind) for kind in (SWA, MAMBA)])
    assert list(map(places, stored)) == [[], [2, 3], [3]]
    history.found(sequence(0), 1, [3, 7], ((SWA, Window(2)), (MAMBA, Window(1))))
    written = [places(each == Stored.written) for each in stored]
    assert written == [[1, 2, 3, 4, 5, 6, 7], [2, 3, 6, 7], [3, 7]]
    assert places(history.registry.is_seen) == [1, 2, 3, 4, 5, 6, 7]


def test_consecutive_pages_are_addressed_by_a_slice():
    assert place_of(NUMBERS[2:5]) == slice(2, 5)
    assert place_of(NUMBERS[3:4]) == slice(3, 4)
    apart = NUMBERS[[1, 2, 5]]
    assert place_of(apart) is apart
