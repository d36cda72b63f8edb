"""What goes to storage, and when: by every way of writing there is."""

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.pages import NO_PAGES, PageAllocator
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import BackUp, StorageDelete, StorageWrite
from hicache.cache.tree.node import DEVICE, HOST
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.config import CacheConfig, StorageConfig, Tiering
from hicache.policies.policy import presets
from tests.cache.small import (
    PAGE,
    complete_all,
    evict_all,
    named_kinds,
    node_at,
    run_request,
    tokens_of,
    world_of,
)

PAGE_BYTES = (100, 10, 1)


def cache_of(
    *, has_sidecars: bool = False, queue_bytes: int = 1 << 20, **how: object
) -> PrefixCache:
    """Pools of 40 pages on both tiers, and a storage."""
    window_len = 2 * PAGE if has_sidecars else 0
    kinds = named_kinds(PAGE, window_len=window_len, has_states=has_sidecars, page_bytes=PAGE_BYTES)
    policy = presets(world_of(kinds, storage=StorageConfig(**how)))  # type: ignore[arg-type]
    tree = RadixTree(kinds=kinds)
    pools = tuple([PageAllocator(40) for _ in PAGE_BYTES] for _ in range(2))
    storage = StorageConfig(**how)  # type: ignore[arg-type]
    return PrefixCache(tree, pools, policy.writes, storage, storage_queue_bytes=queue_bytes)  # type: ignore[arg-type]


def back_up(cache: PrefixCache) -> None:
    """All back-ups under way are done; what they book for storage stays."""
    for transfer in list(cache.in_flight):
        if isinstance(transfer, BackUp):
            cache.complete(transfer)


def writes(cache: PrefixCache) -> list[StorageWrite]:
    return [work for work in cache.in_flight if isinstance(work, StorageWrite)]


def written(cache: PrefixCache) -> list[int]:
    """Pages by kind, of all writes under way."""
    pages = [kind for write in writes(cache) for kind, _ in write.pages]
    return [pages.count(kind) for kind in (FULL, SWA, MAMBA)]


def hit(cache: PrefixCache, num_tokens: int) -> None:
    """A request goes on from what there is of it, and is dropped."""
    sequence = Sequence(tokens_of(num_tokens + 1))
    assert cache.acquire(sequence, cache.match(sequence, num_tokens + 1)) is not None
    cache.abandon(sequence)


def test_unless_told_otherwise_what_is_on_the_host_is_written_at_once() -> None:
    cache = cache_of()
    run_request(cache, tokens_of(16), 16)
    assert written(cache) == [0, 0, 0]
    back_up(cache)
    assert written(cache) == [4, 0, 0]


def test_pages_windows_and_states_are_written_under_names_of_their_own() -> None:
    cache = cache_of(has_sidecars=True)
    run_request(cache, tokens_of(16), 16)
    back_up(cache)
    assert written(cache) == [4, 2, 1]  # of its window no more than the last one
    (write,) = writes(cache)
    assert len(set(write.keys)) == 7
    assert write.num_bytes == cache.queued_write_bytes == 4 * 100 + 2 * 10 + 1


def test_what_waits_to_be_written_stays_on_the_host_until_it_is() -> None:
    cache = cache_of(has_sidecars=True)
    run_request(cache, tokens_of(16), 16)
    back_up(cache)
    evict_all(cache, DEVICE, FULL)
    evict_all(cache, HOST, FULL)
    (node,) = [node for node in cache.tree.nodes() if node.end == 4]
    assert [page_ids is not None for page_ids in node.held[HOST]] == [True, True, True]
    complete_all(cache)
    assert cache.queued_write_bytes == 0
    evict_all(cache, HOST, FULL)
    assert cache.tree.num_nodes == 0


@pytest.mark.parametrize(("queue_bytes", "wanted", "dropped"), [(400, 4, 0), (399, 0, 4)])
def test_no_more_waits_than_the_queue_holds_and_what_does_not_is_counted(
    queue_bytes: int, wanted: int, dropped: int
) -> None:
    cache = cache_of(queue_bytes=queue_bytes)
    run_request(cache, tokens_of(16), 16)
    back_up(cache)
    assert written(cache)[FULL] == wanted
    assert cache.counters["storage/dropped_write_pages"] == dropped


def test_what_waits_already_takes_room_in_the_queue_until_it_is_written() -> None:
    cache = cache_of(queue_bytes=400)
    run_request(cache, tokens_of(8), 8)
    back_up(cache)
    run_request(cache, tokens_of(16, 100), 16)
    back_up(cache)
    assert written(cache)[FULL] == 2
    complete_all(cache)
    run_request(cache, tokens_of(16, 200), 16)
    back_up(cache)
    assert written(cache)[FULL] == 4


def test_pages_whose_prefix_was_dropped_are_not_written_until_the_prefix_is() -> None:
    cache = cache_of(queue_bytes=400)
    for tokens in (tokens_of(16, 100), tokens_of(8)):
        run_request(cache, tokens, 8)
        back_up(cache)
    assert cache.counters["storage/dropped_write_pages"] == 2
    complete_all(cache)
    run_request(cache, tokens_of(16), 16)
    back_up(cache)
    assert written(cache)[FULL] == 0
    assert cache.counters["storage/dropped_write_pages"] == 4
    evict_all(cache, DEVICE, FULL)
    evict_all(cache, HOST, FULL)
    run_request(cache, tokens_of(16), 16)
    back_up(cache)
    assert written(cache)[FULL] == 4


@pytest.mark.parametrize("write_hits", [1, 2])
def test_selective_writes_what_was_hit_so_often_after_it_was_made(write_hits: int) -> None:
    cache = cache_of(write="selective", write_hits=write_hits)
    run_request(cache, tokens_of(16), 16)
    back_up(cache)
    for _ in range(write_hits - 1):
        hit(cache, 16)
    assert written(cache) == [0, 0, 0]
    hit(cache, 16)
    assert written(cache) == [4, 0, 0]
    hit(cache, 16)
    assert written(cache) == [4, 0, 0]  # once


def test_selective_is_content_with_one_hit_unless_told_otherwise() -> None:
    cache = cache_of(write="selective")
    run_request(cache, tokens_of(16), 16)
    back_up(cache)
    hit(cache, 16)
    assert written(cache) == [4, 0, 0]


def test_selective_writes_only_the_part_that_was_hit() -> None:
    cache = cache_of(write="selective")
    run_request(cache, tokens_of(16), 16)
    back_up(cache)
    hit(cache, 8)
    assert written(cache) == [2, 0, 0]


def test_selective_waits_for_the_copy_on_the_host() -> None:
    cache = cache_of(write="selective")
    run_request(cache, tokens_of(16), 16)
    hit(cache, 16)
    assert written(cache) == [0, 0, 0]  # its copy is under way
    back_up(cache)
    assert written(cache) == [4, 0, 0]


def test_selective_writes_window_and_state_as_well() -> None:
    cache = cache_of(write="selective", has_sidecars=True)
    run_request(cache, tokens_of(8), 8)
    back_up(cache)
    hit(cache, 8)
    assert written(cache) == [2, 2, 1]


def late_cache(**how: object) -> PrefixCache:
    """What it held is on the host alone."""
    cache = cache_of(write="on_host_eviction", **how)  # type: ignore[arg-type]
    run_request(cache, tokens_of(8), 8)
    back_up(cache)
    evict_all(cache, DEVICE, FULL)
    return cache


def test_late_writes_nothing_before_it_leaves_the_host() -> None:
    cache = late_cache()
    assert written(cache) == [0, 0, 0]
    evict_all(cache, HOST, FULL)
    assert written(cache) == [2, 0, 0]
    (write,) = writes(cache)
    assert write.is_given_away
    assert write.host_locks == []


def test_late_writes_all_of_a_leaf_that_leaves() -> None:
    cache = late_cache(has_sidecars=True)
    evict_all(cache, HOST, FULL)
    assert written(cache) == [2, 2, 1]


def test_late_writes_the_state_alone_where_only_that_leaves() -> None:
    cache = cache_of(write="on_host_eviction", has_sidecars=True)
    for num_tokens in (8, 20):
        run_request(cache, tokens_of(num_tokens), num_tokens)
        back_up(cache)
    evict_all(cache, DEVICE, FULL)
    assert cache.host.evict_one(MAMBA, 1)
    assert written(cache) == [0, 0, 1]
    assert cache.host.evict_one(SWA, 1)
    assert written(cache)[FULL] == 0


def test_late_does_not_write_what_the_device_still_has() -> None:
    cache = cache_of(write="on_host_eviction", has_sidecars=True)
    for num_tokens in (8, 16):
        run_request(cache, tokens_of(num_tokens), num_tokens)
        back_up(cache)
    while cache.device.evict(MAMBA, 1):  # of the lower two pages all, of the upper the state
        pass
    while cache.host.evict_one(MAMBA, 1):
        pass
    assert written(cache) == [2, 2, 2]


def test_what_storage_was_given_is_not_written_late_again() -> None:
    cache = cache_of(write="on_host_eviction")
    sequence = Sequence(tokens_of(8))
    pages = cache.host.allocate(FULL, 2)
    assert pages is not None
    cache.insert_host(cache.tree.root(""), sequence, (pages, NO_PAGES, NO_PAGES))
    evict_all(cache, HOST, FULL)
    assert cache.tree.num_nodes == 0
    assert written(cache) == [0, 0, 0]


def read_to_host(cache: PrefixCache) -> None:
    """Storage had four pages, the last two of them with a window, and the state after them."""
    pages = []
    for kind, count in ((FULL, 4), (SWA, 2), (MAMBA, 1)):
        page_ids = cache.host.allocate(kind, count)
        assert page_ids is not None
        pages.append(page_ids)
    cache.insert_host(cache.tree.root(""), Sequence(tokens_of(16)), tuple(pages))  # type: ignore[arg-type]


def test_an_exclusive_storage_gives_up_what_was_read() -> None:
    cache = cache_of(tiering=Tiering.exclusive, write="on_host_eviction", has_sidecars=True)
    read_to_host(cache)
    (delete,) = cache.outbox
    assert isinstance(delete, StorageDelete)
    assert len(set(delete.keys)) == 4 + 2 + 1
    assert cache.counters["storage/dropped_read_pages"] == 7


def test_an_inclusive_storage_keeps_what_was_read() -> None:
    cache = cache_of(has_sidecars=True)
    read_to_host(cache)
    assert cache.outbox == []


@pytest.mark.parametrize(
    ("tiering", "wanted"), [(Tiering.inclusive, [0, 0, 0]), (Tiering.exclusive, [4, 2, 1])]
)
def test_what_was_read_goes_back_when_it_leaves_only_where_it_was_given_up(
    tiering: Tiering, wanted: list[int]
) -> None:
    cache = cache_of(tiering=tiering, write="on_host_eviction", has_sidecars=True)
    read_to_host(cache)
    evict_all(cache, HOST, FULL)
    assert cache.tree.num_nodes == 0
    assert written(cache) == wanted


def test_both_halves_of_a_split_node_keep_its_uses_and_what_storage_has_of_it() -> None:
    cache = cache_of()
    run_request(cache, tokens_of(16), 16)
    node = node_at(cache, 4)
    node.stored[FULL], node.uses = True, 5
    hit(cache, 8)
    upper = node_at(cache, 2)
    assert (upper.stored[FULL], node.stored[FULL]) == (True, True)
    assert (upper.uses, node.uses) == (6, 5)


def test_late_does_not_write_a_copy_whose_original_stays_on_the_device() -> None:
    kinds = named_kinds(PAGE, page_bytes=PAGE_BYTES)
    how = StorageConfig(write="on_host_eviction")
    world = world_of(kinds, cache=CacheConfig(write_policy="write_back"), storage=how)
    tree = RadixTree(kinds=kinds, demotes=True)
    pools = tuple([PageAllocator(8) for _ in PAGE_BYTES] for _ in range(2))
    cache = PrefixCache(tree, pools, presets(world).writes, how, storage_queue_bytes=1 << 20)  # type: ignore[arg-type]
    run_request(cache, tokens_of(16), 16)
    evict_all(cache, DEVICE, FULL)
    complete_all(cache)
    hit(cache, 16)  # loads it back: both tiers hold it
    complete_all(cache)
    assert cache.host.allocate(FULL, 8) is not None
    assert node_at(cache, 4).held[DEVICE][FULL] is not None
    assert written(cache) == [0, 0, 0]
