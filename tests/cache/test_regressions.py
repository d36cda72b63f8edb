"""Bugs that random walks found, each in the fewest steps that show it."""

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import StorageWrite
from hicache.cache.tree.node import DEVICE, HOST, Lock, Node
from hicache.cache.tree.sequence import Sequence
from hicache.config import PrefetchConfig, StageAt, StorageConfig
from hicache.observe import invariants
from tests.cache.small import (
    complete_all,
    evict_all,
    make_cache,
    node_at,
    prefetcher_of,
    run_request,
    tokens_of,
)


def test_an_abort_before_the_answer_of_storage_is_taken_in_leaves_nothing_staged() -> None:
    cache = make_cache(device=(16, 0, 0), host=(16, 0, 0), storage_queue_bytes=100)
    prefetcher = prefetcher_of(cache, PrefetchConfig(threshold=4, stage_at=StageAt.enqueue), 64)
    sequence = Sequence(tokens_of(16))
    match = cache.match(sequence, 16)
    prefetch = prefetcher.prefetch_from_storage(0, sequence, match, 16, 0)
    assert prefetch is not None
    prefetch.restorable = [1, 2]  # storage has answered ...
    prefetcher.abort(0)
    prefetcher.on_queried(prefetch)  # ... and is heard of only now
    invariants.check_drained(cache, prefetcher)


def test_a_timeout_before_the_answer_of_storage_is_taken_in_leaves_nothing_staged() -> None:
    cache = make_cache(device=(16, 0, 0), host=(16, 0, 0), storage_queue_bytes=100)
    config = PrefetchConfig(threshold=4, stage_at=StageAt.enqueue, stop="best_effort")
    prefetcher = prefetcher_of(cache, config, 64)
    sequence = Sequence(tokens_of(16))
    prefetch = prefetcher.prefetch_from_storage(0, sequence, cache.match(sequence, 16), 16, 0)
    assert prefetch is not None
    prefetch.restorable = [1, 2]
    assert prefetcher.check(0, 1)
    prefetcher.on_queried(prefetch)
    prefetcher.forget(0)
    invariants.check_drained(cache, prefetcher)


def with_a_stuck_leaf(num_states: int) -> tuple[PrefixCache, Node, Lock]:
    """Under write_back, a leaf whose state is on its way to a host without room for its pages."""
    cache = make_cache(
        device=(8, 0, num_states),
        host=(0, 0, 2),
        has_states=True,
        write_policy="write_back",
    )
    run_request(cache, tokens_of(9), 8)
    (node,) = cache.tree.nodes()
    lock = cache.tree.lock_host(node, {MAMBA: node.start})
    cache.tree.residency.put(node, HOST, MAMBA, cache.pools[HOST][MAMBA].allocate(1))  # type: ignore[arg-type]
    return cache, node, lock


def test_a_leaf_whose_state_is_being_saved_stays_when_the_host_has_no_pages_for_it() -> None:
    cache, node, lock = with_a_stuck_leaf(num_states=4)
    assert cache.device.allocate(FULL, 8) is None
    assert node.held[DEVICE][FULL] is not None
    cache.tree.release(lock)


def test_another_leaf_goes_where_the_oldest_may_not() -> None:
    cache, stuck, lock = with_a_stuck_leaf(num_states=6)
    run_request(cache, tokens_of(9, first=100), 8)  # has nothing on the host
    page_ids = cache.device.allocate(FULL, 6)
    assert page_ids is not None
    assert list(cache.tree.nodes()) == [stuck]
    assert cache.device.allocate(FULL, 1) is None
    cache.pools[DEVICE][FULL].free(page_ids)
    cache.tree.release(lock)
    evict_all(cache, DEVICE, FULL)
    assert not list(cache.tree.nodes())
    complete_all(cache)
    invariants.check_drained(cache, None)


def test_the_window_of_a_state_that_is_being_written_stays_on_the_host() -> None:
    cache = make_cache(
        device=(16, 16, 8), host=(16, 8, 4), window_len=4, has_states=True, storage_queue_bytes=100
    )
    run_request(cache, tokens_of(17), 16, state_ends=(2,))
    (first,) = cache.in_flight
    cache.complete(first)  # and a write to storage begins, also of the state after two pages
    (write,) = cache.in_flight
    run_request(cache, tokens_of(9), 8)  # whose window is copied only now
    (second,) = cache.in_flight - {write}
    cache.complete(second)
    (other_write,) = cache.in_flight - {write}
    cache.complete(other_write)
    evict_all(cache, DEVICE, FULL)
    assert node_at(cache, 2).held[DEVICE][FULL] is None
    evict_all(cache, HOST, SWA)
    assert node_at(cache, 2).held[HOST][SWA] is not None
    cache.complete(write)
    invariants.check_drained(cache, None)


def test_the_window_of_a_state_that_is_written_because_it_was_hit_stays_on_the_host() -> None:
    cache = make_cache(
        device=(16, 16, 8),
        host=(16, 8, 4),
        window_len=4,
        has_states=True,
        storage_queue_bytes=100,
        storage=StorageConfig(write="selective"),
        write_policy="write_through_selective",
    )
    prompt = tokens_of(8)
    run_request(cache, prompt, 8)
    run_request(cache, prompt, 8)  # the second hit
    (copied,) = cache.in_flight
    cache.complete(copied)
    (full_and_window,) = cache.in_flight
    cache.complete(full_and_window)
    node = node_at(cache, 2)
    node.stored[MAMBA] = False  # as after an exclusive read, or a state that came later
    sequence = Sequence(tokens_of(9))
    assert cache.acquire(sequence, cache.match(sequence, 9)) is not None
    (write,) = cache.in_flight
    assert isinstance(write, StorageWrite)
    assert [kind for kind, _ in write.pages] == [MAMBA]
    cache.abandon(sequence)
    for kind in (FULL, SWA, MAMBA):
        evict_all(cache, DEVICE, kind)
    assert node.held[DEVICE] == [None, None, None]
    evict_all(cache, HOST, SWA)
    assert node.held[HOST][SWA] is not None
    cache.complete(write)
    evict_all(cache, HOST, SWA)
    assert node.held[HOST][SWA] is None
    invariants.check_drained(cache, None)
