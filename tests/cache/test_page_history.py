"""What is remembered of a page that left, that somebody computes, or that storage has."""

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.page_history import (
    NOBODY,
    THROWN_AWAY,
    WAS_HELD,
    PageHistory,
    Pressure,
)
from hicache.cache.tree.page_registry import Chain, PageRegistry, Stored, place_of
from hicache.request import TokenSpans

NUMBERS = np.arange(8, dtype=np.int32)


@pytest.fixture
def history() -> PageHistory:
    pages = TokenSpans(np.array([0], np.int32), np.array([8], np.int32))
    return PageHistory(PageRegistry({0: pages}, 4))


def chain(request_id: int) -> Chain:
    return Chain(request_id, NUMBERS, 32)


def node_of(first: int, end: int) -> Node:
    node = Node(None, b"", first, end - first)
    node.numbers = NUMBERS[first:end]
    return node


def test_the_last_copy_that_goes_says_for_what_for_whom_and_when(history: PageHistory) -> None:
    assert history.now_ns == 0
    node = node_of(2, 4)
    for tier in (DEVICE, HOST):
        node.held[tier][FULL] = [1, 2]
        history.put(node, tier, FULL)
    assert history.press(Pressure.prefill, chain(7)) == Pressure.none
    history.now_ns = 50
    node.held[DEVICE][FULL] = None
    history.drop(node, DEVICE, FULL)
    assert not history.lost_for[FULL].any()  # it is on the host
    assert history.press(Pressure.back_up, chain(8)) == Pressure.prefill
    history.now_ns = 60
    node.held[HOST][FULL] = None
    history.drop(node, HOST, FULL)
    lost = (history.lost_for[FULL], history.lost_to[FULL], history.lost_ns[FULL])
    assert [np.flatnonzero(each).tolist() for each in lost] == [[2, 3]] * 3
    assert [int(each[2]) for each in lost] == [Pressure.back_up, 8, 60]
    assert not history.lost_for[MAMBA].any()


def test_a_state_is_its_last_page(history: PageHistory) -> None:
    history.put(node_of(2, 4), DEVICE, MAMBA)
    assert np.flatnonzero(history.marks[MAMBA] & WAS_HELD).tolist() == [3]


def test_a_request_owns_what_it_computes_until_it_publishes_or_gives_up(
    history: PageHistory,
) -> None:
    history.admit(chain(0), 2)
    assert history.owners.tolist() == [NOBODY, NOBODY, 1, 1, 1, 1, 1, 1]
    assert np.flatnonzero(history.registry.is_seen).tolist() == [2, 3, 4, 5, 6, 7]
    history.publish(chain(0), 2, 4)
    history.abandon(chain(1), 4, 8)  # another one's pages stay
    assert history.owners.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    history.abandon(chain(0), 4, 5)
    assert history.owners.tolist() == [0, 0, 0, 0, THROWN_AWAY, 1, 1, 1]


def test_pages_that_will_not_be_computed_were_not_seen_unless_somebody_has_them(
    history: PageHistory,
) -> None:
    history.put(node_of(6, 7), DEVICE, FULL)
    history.find(NUMBERS[5:6], FULL)
    history.admit(chain(4), 4)
    history.forget(chain(3))  # not its pages
    assert history.owners.tolist() == [0, 0, 0, 0, 5, 5, 5, 5]
    history.forget(chain(4))
    assert not history.owners.any()
    assert np.flatnonzero(history.registry.is_seen).tolist() == [5, 6]


def test_what_storage_has_stays_written_and_since_then(history: PageHistory) -> None:
    history.now_ns = 10
    history.store(NUMBERS[:2], FULL, Stored.written)
    history.now_ns = 20
    history.store(NUMBERS[:4], FULL, Stored.dropped)
    history.store(NUMBERS[:3], FULL, Stored.written)
    registry = history.registry
    assert registry.stored[FULL][:5].tolist() == [3, 3, 3, Stored.dropped, Stored.never]
    assert registry.written_ns[FULL][:4].tolist() == [10, 10, 20, 0]
    history.take_out(NUMBERS[:1], FULL)
    assert registry.stored[FULL][0] == Stored.never


def test_pages_that_follow_each_other_are_a_slice_of_a_table() -> None:
    assert place_of(NUMBERS[2:5]) == slice(2, 5)
    assert place_of(NUMBERS[3:4]) == slice(3, 4)
    apart = NUMBERS[[1, 2, 5]]
    assert place_of(apart) is apart
