"""What is written to storage, and when, under each setting of `storage.write`."""

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.pages import NO_PAGES
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import BackUp, StorageDelete, StorageWrite
from hicache.cache.tree.node import DEVICE, HOST
from hicache.cache.tree.sequence import Sequence
from hicache.config import StorageConfig, Tiering
from tests.cache.small import PAGE, are_held, make_cache, tokens_of

AT_EVICTION = StorageConfig(write="on_host_eviction")
EXCLUSIVE = StorageConfig(write="on_host_eviction", tiering=Tiering.exclusive)
SELECTIVE = StorageConfig(write="selective")


def cache_of(
    storage: StorageConfig | None = None, queue_bytes: int = 1 << 20, *, is_hybrid: bool = False
) -> PrefixCache:
    """A cache with pools of 40 pages; a page has 100 bytes, a window page 10, a state 1."""
    return make_cache(
        device=(40, 40, 40),
        host=(40, 40, 40),
        window_len=2 * PAGE if is_hybrid else 0,
        has_states=is_hybrid,
        page_bytes=(100, 10, 1),
        storage=storage,
        storage_queue_bytes=queue_bytes,
    )


def serve(cache: PrefixCache, num_tokens: int, first: int = 0) -> None:
    """Publish a prompt and copy it to the host; the storage writes that follow stay queued."""
    cache.serve(num_tokens, first)
    for work in list(cache.in_flight):
        if isinstance(work, BackUp):
            cache.complete(work)


def evict(cache: PrefixCache, *tiers: int) -> None:
    for tier in tiers:
        cache.evict_all(tier, FULL)


def writes(cache: PrefixCache) -> list[StorageWrite]:
    return [work for work in cache.in_flight if isinstance(work, StorageWrite)]


def written(cache: PrefixCache) -> list[int]:
    """Numbers of full pages, window pages and states in the writes that are not completed."""
    pages = [kind for write in writes(cache) for kind, _ in write.pages]
    return [pages.count(kind) for kind in (FULL, SWA, MAMBA)]


def hit(cache: PrefixCache, num_tokens: int) -> None:
    """Let a request reuse a prefix of `num_tokens` tokens, and drop the request."""
    cache.abandon(cache.begin(num_tokens + 1)[0])


def test_a_prompt_on_the_host_is_written_at_once_with_its_last_window_and_state():
    cache = cache_of(is_hybrid=True)
    cache.serve(16)
    assert written(cache) == [0, 0, 0]
    serve(cache, 16)
    assert written(cache) == [4, 2, 1]
    (write,) = writes(cache)
    assert len(set(write.keys)) == 7
    assert write.num_bytes == cache.queued_write_bytes == 4 * 100 + 2 * 10 + 1
    evict(cache, DEVICE, HOST)
    assert are_held(cache.node_at(4), HOST) == [True, True, True]
    cache.complete_all()
    assert cache.queued_write_bytes == 0
    evict(cache, HOST)
    assert cache.tree.num_nodes == 0


@pytest.mark.parametrize(("queue_bytes", "wanted", "dropped"), [(400, 4, 0), (399, 0, 4)])
def test_a_write_that_the_queue_has_no_room_for_is_dropped_and_counted(
    queue_bytes, wanted, dropped
):
    cache = cache_of(queue_bytes=queue_bytes)
    serve(cache, 16)
    assert written(cache)[FULL] == wanted
    assert cache.counters["storage/dropped_write_pages"] == dropped


def test_queued_writes_take_room_in_the_queue_until_they_are_completed():
    cache = cache_of(queue_bytes=400)
    serve(cache, 8)
    serve(cache, 16, 100)
    assert written(cache)[FULL] == 2
    cache.complete_all()
    serve(cache, 16, 200)
    assert written(cache)[FULL] == 4


def test_pages_are_not_written_to_storage_before_a_prefix_whose_write_was_dropped():
    cache = cache_of(queue_bytes=400)
    serve(cache, 16, 100)
    serve(cache, 8)
    assert cache.counters["storage/dropped_write_pages"] == 2
    cache.complete_all()
    serve(cache, 16)
    assert written(cache)[FULL] == 0
    assert cache.counters["storage/dropped_write_pages"] == 4
    evict(cache, DEVICE, HOST)
    serve(cache, 16)
    assert written(cache)[FULL] == 4


@pytest.mark.parametrize("write_hits", [None, 1, 2])
def test_selective_writing_writes_a_prefix_once_when_its_hits_reach_the_set_number(write_hits):
    cache = cache_of(
        SELECTIVE if write_hits is None else StorageConfig(write="selective", write_hits=write_hits)
    )
    serve(cache, 16)
    for _ in range((write_hits or 1) - 1):
        hit(cache, 16)
    assert written(cache) == [0, 0, 0]
    for _ in range(2):
        hit(cache, 16)
        assert written(cache) == [4, 0, 0]


@pytest.mark.parametrize(
    ("num_tokens", "is_hybrid", "wanted"),
    [(16, False, [4, 0, 0]), (8, False, [2, 0, 0]), (16, True, [4, 2, 1])],
)
def test_selective_writing_covers_only_what_was_hit_and_copied_to_the_host(
    num_tokens, wanted, *, is_hybrid
):
    cache = cache_of(SELECTIVE, is_hybrid=is_hybrid)
    cache.serve(16)
    if num_tokens == 16:
        hit(cache, num_tokens)
        assert written(cache) == [0, 0, 0]
    serve(cache, 0)
    if num_tokens == 8:
        hit(cache, num_tokens)
    assert written(cache) == wanted


@pytest.mark.parametrize(("is_hybrid", "wanted"), [(False, [2, 0, 0]), (True, [2, 2, 1])])
def test_writing_at_host_eviction_writes_all_data_of_a_leaf(wanted, *, is_hybrid):
    cache = cache_of(AT_EVICTION, is_hybrid=is_hybrid)
    serve(cache, 8)
    evict(cache, DEVICE)
    assert written(cache) == [0, 0, 0]
    evict(cache, HOST)
    assert written(cache) == wanted
    assert all(write.is_given_away and not write.host_locks for write in writes(cache))


def test_writing_at_host_eviction_writes_a_state_alone_if_only_the_state_leaves():
    cache = cache_of(AT_EVICTION, is_hybrid=True)
    serve(cache, 8)
    serve(cache, 20)
    evict(cache, DEVICE)
    assert cache.host.evict_one(MAMBA, 1)
    assert written(cache) == [0, 0, 1]
    assert cache.host.evict_one(SWA, 1)
    assert written(cache)[FULL] == 0


def test_writing_at_host_eviction_leaves_out_what_the_device_holds():
    cache = cache_of(AT_EVICTION, is_hybrid=True)
    serve(cache, 8)
    serve(cache, 16)
    while cache.device.evict(MAMBA, 1):  # of the lower two pages all, of the upper the state
        pass
    while cache.host.evict_one(MAMBA, 1):
        pass
    assert written(cache) == [2, 2, 2]


def test_writing_at_host_eviction_leaves_out_write_back_copies_of_data_on_the_device():
    pools = {"device": (8, 0, 0), "host": (8, 0, 0)}
    how = {"write_policy": "write_back", "storage": AT_EVICTION, "storage_queue_bytes": 1 << 20}
    cache = make_cache(**pools, **how)
    cache.serve(16)
    evict(cache, DEVICE)
    cache.complete_all()
    hit(cache, 16)  # loads it back: both tiers hold it
    cache.complete_all()
    assert cache.host.allocate(FULL, 8) is not None
    assert cache.node_at(4).held[DEVICE][FULL] is not None
    assert written(cache) == [0, 0, 0]


@pytest.mark.parametrize(
    ("storage", "deleted", "rewritten"),
    [(None, 0, [0, 0, 0]), (AT_EVICTION, 0, [0, 0, 0]), (EXCLUSIVE, 7, [4, 2, 1])],
)
def test_only_exclusive_storage_deletes_pages_read_and_gets_them_back(storage, deleted, rewritten):
    cache = cache_of(storage, is_hybrid=True)
    pages = [cache.host.allocate(kind, count) or NO_PAGES for kind, count in enumerate((4, 2, 1))]
    cache.insert_host(cache.tree.root(""), Sequence(tokens_of(16)), pages)
    deletes = [work for work in cache.outbox if isinstance(work, StorageDelete)]
    assert [len(set(work.keys)) for work in deletes] == [deleted] * (deleted > 0)
    assert cache.counters["storage/dropped_read_pages"] == deleted
    evict(cache, HOST)
    assert cache.tree.num_nodes == 0
    assert written(cache) == rewritten


def test_both_halves_of_a_split_node_keep_its_use_count_and_its_mark_as_stored():
    cache = cache_of()
    cache.serve(16)
    node = cache.node_at(4)
    node.stored[FULL], node.uses = True, 5
    hit(cache, 8)
    upper = cache.node_at(2)
    assert (upper.stored[FULL], node.stored[FULL]) == (True, True)
    assert (upper.uses, node.uses) == (6, 5)
