"""What the history of pages records of evictions, requests and storage."""

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA, Window
from hicache.cache.tree.events import Data, Demand, Purpose
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
from hicache.request import Request, TokenSpans
from tests.cache.small import named_kinds
from tests.scheduler.world import request_of

NUMBERS = np.arange(8, dtype=np.int32)
NAMES = NUMBERS.tobytes()


@pytest.fixture
def history() -> PageHistory:
    pages = TokenSpans(np.array([0], np.int32), np.array([8], np.int32))
    return PageHistory(PageRegistry({0: pages}), named_kinds(4, window_len=8, has_states=True))


def sequence(request_id: int) -> Sequence:
    return Sequence(NAMES, "", request(request_id))


def request(request_id: int) -> Request:
    return request_of(request_id, range(32), [1])


def node_of(first: int, end: int) -> Node:
    return Node(None, NAMES[4 * first : 4 * end], first, end - first)


def write(history: PageHistory, items: Data) -> None:
    history.write_queued("a write", items)
    history.write_ended("a write")


def test_the_last_copy_that_goes_says_for_what_for_whom_and_when(history: PageHistory) -> None:
    assert history.now_ns == 0
    node = node_of(2, 4)
    for tier in (DEVICE, HOST):
        node.held[tier][FULL] = [1, 2]
        history.put(node, tier, FULL)
    history.at(50)
    node.held[DEVICE][FULL] = None
    history.evicted(node, DEVICE, FULL, Demand(Purpose.prefill, 7))
    assert not history.lost_for[FULL].any()  # it is on the host
    history.at(60)
    node.held[HOST][FULL] = None
    history.evicted(node, HOST, FULL, Demand(Purpose.back_up, 8))
    lost = (history.lost_for[FULL], history.lost_to[FULL], history.lost_ns[FULL])
    assert [np.flatnonzero(each).tolist() for each in lost] == [[2, 3]] * 3
    assert [int(each[2]) for each in lost] == [Purpose.back_up, 8, 60]
    assert not history.lost_for[MAMBA].any()


def test_a_state_is_its_last_page(history: PageHistory) -> None:
    history.put(node_of(2, 4), DEVICE, MAMBA)
    assert np.flatnonzero(history.marks[MAMBA] & WAS_HELD).tolist() == [3]


def test_a_request_owns_what_it_computes_until_it_publishes_or_gives_up(
    history: PageHistory,
) -> None:
    history.admit(request(0), NAMES, 2)
    assert history.owners.tolist() == [UNOWNED, UNOWNED, 1, 1, 1, 1, 1, 1]
    assert np.flatnonzero(history.registry.is_seen).tolist() == [2, 3, 4, 5, 6, 7]
    history.published(sequence(0), 2, 4)
    history.abandoned(sequence(1), 4, 8)  # another one's pages stay
    assert history.owners.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    history.abandoned(sequence(0), 4, 5)
    assert history.owners.tolist() == [0, 0, 0, 0, THROWN_AWAY, 1, 1, 1]


def test_pages_that_will_not_be_computed_were_not_seen_unless_a_tier_has_them(
    history: PageHistory,
) -> None:
    history.put(node_of(6, 7), DEVICE, FULL)
    write(history, [(node_of(5, 6), FULL)])
    history.admit(request(4), NAMES, 4)
    history.forget(sequence(3))  # not its pages
    assert history.owners.tolist() == [0, 0, 0, 0, 5, 5, 5, 5]
    history.forget(sequence(4))
    assert not history.owners.any()
    assert np.flatnonzero(history.registry.is_seen).tolist() == [5, 6]


def test_what_storage_has_stays_written_and_since_then(history: PageHistory) -> None:
    history.at(10)
    write(history, [(node_of(0, 2), FULL)])
    history.at(20)
    history.write_dropped([(node_of(0, 4), FULL)])
    write(history, [(node_of(0, 1), FULL), (node_of(1, 3), FULL)])
    registry = history.registry
    assert registry.stored[FULL][:5].tolist() == [3, 3, 3, Stored.dropped, Stored.never]
    assert registry.written_ns[FULL][:4].tolist() == [10, 10, 20, 0]
    history.taken_out([(node_of(0, 1), FULL)])
    assert registry.stored[FULL][0] == Stored.never


def test_a_write_names_the_kinds_of_its_pages(history: PageHistory) -> None:
    history.write_queued("a write", [(node_of(2, 4), kind) for kind in (SWA, MAMBA)])
    under_way = [np.flatnonzero(each).tolist() for each in history.registry.stored]
    assert under_way == [[], [2, 3], [3]]


def test_what_storage_reports_is_known_of_pages_windows_and_states(history: PageHistory) -> None:
    history.found(sequence(0), 1, [3, 7], ((SWA, Window(2)), (MAMBA, Window(1))))
    written = [np.flatnonzero(each == Stored.written).tolist() for each in history.registry.stored]
    assert written == [[1, 2, 3, 4, 5, 6, 7], [2, 3, 6, 7], [3, 7]]
    assert np.flatnonzero(history.registry.is_seen).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_pages_that_follow_each_other_are_a_slice_of_a_table() -> None:
    assert place_of(NUMBERS[2:5]) == slice(2, 5)
    assert place_of(NUMBERS[3:4]) == slice(3, 4)
    apart = NUMBERS[[1, 2, 5]]
    assert place_of(apart) is apart
