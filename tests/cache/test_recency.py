"""What counts as a use, and who goes first after it."""

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.events import NO_DEMAND
from hicache.cache.tree.eviction import VictimQueue
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.sequence import Sequence
from hicache.config import QuirksConfig
from tests.cache.small import (
    complete_all,
    make_cache,
    ranking_of,
    run_request,
    tokens_of,
)

NO_HOST = (0, 0, 0)


def cache_of(*firsts: int, **changes: object) -> PrefixCache:
    """Published one after the other: two pages of tokens that begin with each of these."""
    cache = make_cache(**{"device": (40, 40, 9), "host": NO_HOST, **changes})  # type: ignore[arg-type]
    for first in firsts:
        run_request(cache, tokens_of(8, first), 8)
    return cache


def node_of(cache: PrefixCache, first: int) -> Node:
    """The only node whose first token is this one."""
    start = tokens_of(1, first)
    (node,) = [node for node in cache.tree.nodes() if node.edge.startswith(start)]
    return node


def next_victim(cache: PrefixCache) -> Node | None:
    found = cache.tree.victim(DEVICE, FULL, 1)
    return None if found is None else found[0]


# -- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "changes", "goes_first"),
    [
        ("lru", {1: {"tick": 9}}, 2),
        ("lru", {1: {"uses": 9}}, 1),
        ("lfu", {1: {"uses": 9}}, 2),
        ("lfu", {2: {"uses": 0}}, 2),
        ("lfu", {1: {"tick": 9}}, 2),
        ("sglang_slru", {1: {"uses": 2}}, 2),
        ("sglang_slru", {1: {"uses": 3, "tick": 0}, 2: {"uses": 2}, 3: {"uses": 2}}, 1),
        ("sglang_slru", {1: {"tick": 9}}, 2),
        ("fifo", {1: {"tick": 9, "uses": 9}}, 1),
        ("fifo", {1: {"created": 9}}, 2),
    ],
)
def test_a_policy_lets_this_one_of_three_go_first(
    policy: str, changes: dict[int, dict[str, int]], goes_first: int
) -> None:
    cache = cache_of(100, 200, 300, eviction="fifo")
    nodes = {number: node_of(cache, 100 * number) for number in (1, 2, 3)}
    for number, node in nodes.items():
        node.tick = node.created = number
        node.uses = 1
        for name, value in changes.get(number, {}).items():
            setattr(node, name, value)
    queue = VictimQueue(ranking_of(policy))
    for node in nodes.values():
        queue.add(node)
    assert queue.best() is nodes[goes_first]


def test_those_that_are_equal_go_in_the_order_in_which_they_became_leaves() -> None:
    cache = cache_of(100, 200, 300)
    nodes = list(cache.tree.nodes())
    queue = VictimQueue(lambda node: (0.0,))
    for node in nodes:
        queue.add(node)
    assert queue.best() is nodes[0]
    queue.add(nodes[0])  # is there
    assert queue.best() is nodes[0]
    queue.pop(nodes[0], None)
    queue.add(nodes[0])
    assert queue.best() is nodes[1]


def test_a_queue_knows_whom_it_holds() -> None:
    cache = cache_of(100, 200)
    one, other = cache.tree.nodes()
    queue = VictimQueue(lambda node: (0.0,))
    assert (len(queue), queue.best()) == (0, None)
    queue.add(one)
    queue.add(one)
    assert (len(queue), one in queue, other in queue, set(queue)) == (1, True, False, {one})
    queue.pop(one, None)
    queue.pop(one, None)
    assert (len(queue), queue.best()) == (0, None)


def test_a_queue_does_not_grow_with_what_comes_and_goes() -> None:
    cache = cache_of(100, 200)
    one, other = cache.tree.nodes()
    queue = VictimQueue(lambda node: (0.0,))
    queue.add(one)
    for _ in range(1_000):
        queue.add(other)
        queue.pop(other, None)
    assert len(queue._heap) < 100
    assert queue.best() is one


# -- uses ---------------------------------------------------------------------------------------


def test_a_match_is_a_use_of_all_that_matched() -> None:
    cache = cache_of(100, 200)
    cache.tree.match(tokens_of(8, 100), 8)
    assert next_victim(cache) is node_of(cache, 200)


def test_a_split_leaves_the_rest_as_old_as_it_was() -> None:
    cache = cache_of(100, 200)
    cache.tree.match(tokens_of(4, 100), 4)
    assert next_victim(cache) is node_of(cache, 104)


def test_a_split_is_a_use_of_the_rest_where_it_is_asked_for() -> None:
    cache = cache_of(100, 200, quirks=QuirksConfig(split_refreshes=True))
    cache.tree.match(tokens_of(4, 100), 4)
    assert next_victim(cache) is node_of(cache, 200)


def test_nodes_are_numbered_as_they_grow_and_halves_keep_their_number() -> None:
    cache = cache_of(100, 200, 300)
    cache.tree.match(tokens_of(4, 200), 4)
    numbers = [node_of(cache, first).created for first in (100, 200, 204, 300)]
    assert numbers == [1, 2, 2, 3]


def test_publishing_is_a_use_of_the_whole_path() -> None:
    cache = cache_of(100)
    above = node_of(cache, 100)
    sequence = Sequence(tokens_of(17, 100))
    assert cache.acquire(sequence, cache.match(sequence, 17)) is not None
    run_request(cache, tokens_of(8, 200), 8)
    assert cache.extend(sequence, 17)
    cache.finish(sequence, 4)
    assert above.tick > node_of(cache, 200).tick
    assert node_of(cache, 108).tick > above.tick  # the new leaf is the most recent


def test_publishing_what_is_there_already_is_a_use_and_a_hit() -> None:
    cache = cache_of()
    sequences = [Sequence(tokens_of(8, first)) for first in (100, 100, 200)]
    for sequence in sequences:
        assert cache.acquire(sequence, cache.match(sequence, 8)) is not None
        assert cache.extend(sequence, 8)
    for index in (0, 2, 1):
        cache.finish(sequences[index], 2)
    assert node_of(cache, 100).uses == 2
    assert next_victim(cache) is node_of(cache, 200)


def victims(cache: PrefixCache, kind: int) -> list[Node]:
    """Who would go, one after the other."""
    order = []
    while (found := cache.tree.victim(DEVICE, kind, 1)) is not None:
        order.append(found[0])
        cache.tree.residency.queues[DEVICE][kind].pop(found[0], None)
    return order


def test_a_match_is_a_use_of_the_last_window_and_the_page_before_it() -> None:
    cache = make_cache(device=(40, 40, 0), host=NO_HOST, window_len=8)
    run_request(cache, tokens_of(8), 8)
    run_request(cache, tokens_of(12), 12)
    run_request(cache, tokens_of(20), 20)
    run_request(cache, tokens_of(8, 100), 8)
    cache.tree.match(tokens_of(20), 20)
    order = victims(cache, SWA)
    assert order[:2] == [node_of(cache, first) for first in (0, 100)]
    assert set(order[2:]) == {node_of(cache, first) for first in (8, 12)}


def test_of_a_window_of_several_nodes_the_first_leaves_first() -> None:
    cache = make_cache(device=(40, 40, 0), host=NO_HOST, window_len=8)
    run_request(cache, tokens_of(20), 20)
    cache.tree.match(tokens_of(16), 16)  # splits the last node, whose end has been there longer
    cache.tree.match(tokens_of(20), 20)
    assert victims(cache, SWA) == [node_of(cache, first) for first in (0, 4, 12, 16)]


def test_a_match_is_a_use_of_the_state_it_ends_at_and_of_no_other() -> None:
    cache = make_cache(device=(40, 0, 9), host=NO_HOST, has_states=True)
    run_request(cache, tokens_of(16), 16, state_ends=(2,))
    run_request(cache, tokens_of(8, 100), 8)
    cache.tree.match(tokens_of(16), 16)
    assert victims(cache, MAMBA) == [node_of(cache, first) for first in (0, 100, 8)]


def test_publishing_below_a_state_is_no_use_of_it() -> None:
    cache = make_cache(device=(40, 0, 9), host=NO_HOST, has_states=True)
    run_request(cache, tokens_of(8), 8)
    sequence = Sequence(tokens_of(16))
    assert cache.acquire(sequence, cache.match(sequence, 16)) is not None
    run_request(cache, tokens_of(8, 100), 8)
    assert cache.extend(sequence, 16)
    sequence.states[4], sequence.boundary_slot = sequence.boundary_slot, None
    cache.finish(sequence, 4)
    assert victims(cache, MAMBA) == [node_of(cache, first) for first in (0, 100, 8)]


def test_a_copy_to_the_host_is_no_use_on_the_device() -> None:
    cache = make_cache(
        device=(40, 40, 0),
        host=(40, 40, 0),
        window_len=8,
        write_policy="write_back",
    )
    for first in (0, 100):
        run_request(cache, tokens_of(8, first), 8)
    node = node_of(cache, 0)
    cache.tree.residency.put(node, HOST, SWA, [0, 1])
    assert victims(cache, SWA) == [node, node_of(cache, 100)]


# -- what goes along ----------------------------------------------------------------------------


def write_back_cache() -> PrefixCache:
    return make_cache(
        device=(40, 40, 9),
        host=(40, 40, 9),
        window_len=8,
        has_states=True,
        write_policy="write_back",
    )


@pytest.mark.parametrize(
    ("kind", "on_host", "on_device"),
    [
        (SWA, [False, True, True], [True, False, False]),  # its state goes along
        (MAMBA, [False, False, True], [True, True, False]),
    ],
)
def test_an_inner_window_or_state_that_goes_is_saved_without_its_full_pages(
    kind: int, on_host: list[bool], on_device: list[bool]
) -> None:
    cache = write_back_cache()
    run_request(cache, tokens_of(8), 8)
    run_request(cache, tokens_of(16), 16)
    inner = node_of(cache, 0)
    assert cache.device.evict(kind, 1)
    assert [page_ids is not None for page_ids in inner.held[HOST]] == on_host
    assert [page_ids is not None for page_ids in inner.held[DEVICE]] == on_device
    complete_all(cache)


def test_a_leaf_that_goes_is_saved_whole() -> None:
    cache = write_back_cache()
    run_request(cache, tokens_of(8), 8)
    (leaf,) = cache.tree.nodes()
    assert cache.device.evict(FULL, 1)
    assert [page_ids is not None for page_ids in leaf.held[HOST]] == [True, True, True]
    assert [page_ids is not None for page_ids in leaf.held[DEVICE]] == [False, False, False]
    complete_all(cache)


# -- the preset of SGLang -------------------------------------------------------------------------


def windows_on_the_host(*, refreshes: bool) -> PrefixCache:
    """Two windows that only the host holds; the one of the first prompt left the device first."""
    quirks = QuirksConfig(leaving_refreshes=refreshes)
    cache = cache_of(0, 100, host=(40, 40, 9), window_len=8, quirks=quirks)
    complete_all(cache)
    for first in (0, 100):
        node = node_of(cache, first)
        cache.tree.evict(node, DEVICE, SWA, NO_DEMAND)
    return cache


@pytest.mark.parametrize("refreshes", [True, False])
def test_a_match_of_a_window_on_the_host_is_no_use_in_the_preset_of_sglang(
    *, refreshes: bool
) -> None:
    cache = windows_on_the_host(refreshes=refreshes)
    cache.match(Sequence(tokens_of(9)), 9)
    assert cache.tree.victim(HOST, SWA, 1) == (node_of(cache, 0 if refreshes else 100), SWA)


def test_a_lock_on_the_host_is_a_use_of_a_window_in_the_preset_of_sglang() -> None:
    cache = windows_on_the_host(refreshes=True)
    cache.tree.release(cache.tree.lock_anchor(node_of(cache, 0)))
    assert cache.tree.victim(HOST, SWA, 1) == (node_of(cache, 100), SWA)


def test_locked_windows_on_the_host_are_as_recent_as_the_end_of_their_locks() -> None:
    cache = windows_on_the_host(refreshes=True)
    first, second = (cache.tree.lock_anchor(node_of(cache, each)) for each in (0, 100))
    cache.tree.release(second)
    cache.tree.release(first)
    assert cache.tree.victim(HOST, SWA, 1) == (node_of(cache, 100), SWA)


def test_a_locked_window_is_as_recent_as_its_leaf_that_leaves_the_device() -> None:
    quirks = QuirksConfig(leaving_refreshes=True)
    cache = cache_of(0, 100, host=(40, 40, 9), window_len=8, quirks=quirks)
    complete_all(cache)
    node, other = node_of(cache, 0), node_of(cache, 100)
    for each in (node, other):
        cache.tree.residency.drop(each, DEVICE, SWA, [])
    locks = [cache.tree.lock_anchor(each) for each in (node, other)]
    for each in (other, node):
        cache.tree.residency.drop(each, DEVICE, FULL, [])
    for lock in locks:
        cache.tree.release(lock)
    assert cache.tree.victim(HOST, SWA, 1) == (other, SWA)


def test_a_window_that_write_back_held_before_is_as_recent_as_its_eviction() -> None:
    cache = cache_of(
        *(0, 100),
        host=(40, 40, 9),
        window_len=8,
        write_policy="write_back",
        storage_queue_bytes=1000,
        quirks=QuirksConfig(leaving_refreshes=True, evicts_whole=True),
    )
    node, whole = node_of(cache, 0), node_of(cache, 100)
    for each, kind in ((node, SWA), (whole, FULL), (whole, SWA)):
        page_ids = cache.pools[HOST][kind].allocate(2)
        assert page_ids is not None
        cache.tree.residency.put(each, HOST, kind, page_ids)
    assert cache.device.evict(FULL, 1)  # copies the full pages of `node`
    cache.tree.evict(whole, DEVICE, FULL, NO_DEMAND)
    complete_all(cache)
    assert cache.tree.victim(HOST, SWA, 1) == (node, SWA)


@pytest.mark.parametrize("evicts_whole", [True, False])
def test_a_load_back_of_a_state_locks_the_full_pages_on_the_host_in_the_preset_of_sglang(
    *, evicts_whole: bool
) -> None:
    quirks = QuirksConfig(evicts_whole=evicts_whole)
    cache = make_cache(device=(40, 0, 9), host=(40, 0, 9), has_states=True, quirks=quirks)
    run_request(cache, tokens_of(8), 8)
    complete_all(cache)
    node = node_of(cache, 0)
    cache.tree.residency.drop(node, DEVICE, MAMBA, [])
    sequence = Sequence(tokens_of(9))
    acquired = cache.acquire(sequence, cache.match(sequence, 9))
    assert acquired is not None
    assert acquired.load_back is not None
    assert node.locks[HOST][FULL] == evicts_whole
