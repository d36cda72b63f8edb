"""Mistakes that random walks found, each in the fewest steps that show it."""

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import StorageWrite
from hicache.cache.tree.node import DEVICE, HOST, Lock, Node
from hicache.config import StorageConfig
from hicache.observe import invariants
from tests.cache.small import (
    make_cache,
    run_request,
    tokens_of,
)


def with_a_stuck_leaf(num_states: int) -> tuple[PrefixCache, Node, Lock]:
    """Under write_back, a leaf whose state is being copied to a host without room for its pages."""
    cache = make_cache(
        device=(8, 0, num_states), host=(0, 0, 2), has_states=True, write_policy="write_back"
    )
    run_request(cache, tokens_of(9), 8)
    node = cache.node_at(2)
    lock = cache.tree.lock_host(node, {MAMBA: node.start})
    page_ids = cache.pools[HOST][MAMBA].allocate(1)
    cache.tree.residency.put(node, HOST, MAMBA, page_ids)  # type: ignore[arg-type]
    return cache, node, lock


def test_another_leaf_is_evicted_where_the_state_of_the_oldest_is_being_copied():
    cache, stuck, lock = with_a_stuck_leaf(num_states=6)
    run_request(cache, tokens_of(9, first=100), 8)  # has nothing on the host
    page_ids = cache.device.allocate(FULL, 6)
    assert page_ids is not None
    assert list(cache.tree.nodes()) == [stuck]
    assert stuck.held[DEVICE][FULL] is not None
    assert cache.device.allocate(FULL, 1) is None
    cache.pools[DEVICE][FULL].free(page_ids)
    cache.tree.release(lock)
    cache.evict_all(DEVICE, FULL)
    assert not list(cache.tree.nodes())
    cache.complete_all()
    invariants.check_drained(cache, None)


def hybrid_cache(**how: object) -> PrefixCache:
    return make_cache(
        device=(16, 16, 8),
        host=(16, 8, 4),
        window_len=4,
        has_states=True,
        storage_queue_bytes=100,
        **how,  # type: ignore[arg-type]
    )


def window_stays_until(cache: PrefixCache, write: StorageWrite) -> None:
    for kind in (FULL, SWA, MAMBA):
        cache.evict_all(DEVICE, kind)
    node = cache.node_at(2)
    assert node.held[DEVICE] == [None, None, None]
    cache.evict_all(HOST, SWA)
    assert node.held[HOST][SWA] is not None
    cache.complete(write)
    cache.evict_all(HOST, SWA)
    assert node.held[HOST][SWA] is None
    invariants.check_drained(cache, None)


def test_the_window_of_a_state_that_is_written_to_storage_stays_on_the_host():
    cache = hybrid_cache()
    run_request(cache, tokens_of(17), 16, state_ends=(2,))
    (first,) = cache.in_flight
    cache.complete(first)  # a write to storage begins, also of the state after two pages
    (write,) = cache.in_flight
    run_request(cache, tokens_of(9), 8)  # whose window is copied only now
    (second,) = cache.in_flight - {write}
    cache.complete(second)
    (other_write,) = cache.in_flight - {write}
    cache.complete(other_write)
    window_stays_until(cache, write)


def test_the_window_of_a_state_that_is_written_because_it_was_hit_stays_on_the_host():
    storage = StorageConfig(write="selective")
    cache = hybrid_cache(storage=storage, write_policy="write_through_selective")
    for _ in range(2):
        cache.serve(8)
    for _ in range(2):  # the copy to the host, and the write of pages, window and state
        (work,) = cache.in_flight
        cache.complete(work)
    cache.node_at(2).stored[MAMBA] = False  # as after an exclusive read, or a later state
    sequence, _ = cache.begin(9)
    (write,) = cache.in_flight
    assert isinstance(write, StorageWrite)
    assert [kind for kind, _ in write.pages] == [MAMBA]
    cache.abandon(sequence)
    window_stays_until(cache, write)
