"""What a cache counts while pages move between its tiers: all of it, step by step."""

from collections import Counter

from hicache.cache.kinds import FULL
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import BackUp, StorageWrite
from hicache.cache.tree.node import DEVICE
from hicache.cache.tree.sequence import Sequence
from hicache.observe import invariants
from tests.cache.small import complete_all, evict_all, make_cache, run_request, tokens_of

WEIGHTS = (1, 10, 100)  # bytes of a page, a window page and a state: a sum tells how many of each


class Ledger:
    """The counters of a cache, as they change."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._before: Counter[str] = Counter()

    def entries(self) -> dict[str, int]:
        """What has been counted since the last look."""
        now = Counter(self._cache.counters)
        new, self._before = now - self._before, now
        return dict(new)


def complete(cache: PrefixCache, sort: type) -> None:
    """All copies of a sort that are under way are done."""
    for work in [each for each in cache.in_flight if isinstance(each, sort)]:
        cache.complete(work)


def three_small_tiers() -> PrefixCache:
    return make_cache(
        device=(8, 8, 4),
        host=(6, 4, 1),
        window_len=8,
        has_states=True,
        page_bytes=WEIGHTS,
        storage_queue_bytes=146,
    )


def test_pages_that_are_published_go_down_the_tiers_as_far_as_there_is_room() -> None:
    cache = three_small_tiers()
    ledger = Ledger(cache)
    run_request(cache, tokens_of(16), 16)  # 4 pages, a window of 2, a state
    assert ledger.entries() == {"transfer/back_up_bytes": 124}
    complete(cache, BackUp)
    assert ledger.entries() == {"storage/queued_write_pages": 7}
    assert cache.queued_write_bytes == 124
    run_request(cache, tokens_of(8, 100), 8)  # 2 pages, 2 of a window; its state finds no room
    assert ledger.entries() == {"transfer/back_up_bytes": 22, "back_up/dropped_mamba_pages": 1}
    complete(cache, BackUp)
    assert ledger.entries() == {"storage/queued_write_pages": 4}
    assert cache.queued_write_bytes == 146  # all that may wait
    run_request(cache, tokens_of(8, 200), 8)  # its pages find no room, nor what belongs to them
    assert ledger.entries() == {"back_up/dropped_full_pages": 2}
    complete(cache, StorageWrite)
    assert cache.queued_write_bytes == 0

    run_request(cache, tokens_of(8, 300), 8)  # the first prompt goes from the device, from its end
    assert ledger.entries() == {
        "evict/device_full_pages": 2,
        "evict/device_swa_pages": 2,
        "evict/device_mamba_pages": 1,
        "evict/host_full_pages": 2,
        "evict/host_swa_pages": 2,
        "evict/host_mamba_pages": 1,
        "transfer/back_up_bytes": 122,
    }
    complete(cache, BackUp)
    assert ledger.entries() == {"storage/queued_write_pages": 5}
    assert cache.queued_write_bytes == 122
    run_request(cache, tokens_of(16, 400), 16)  # while the only state on the host is written
    assert ledger.entries() == {
        "evict/device_full_pages": 4,
        "evict/device_swa_pages": 4,
        "evict/device_mamba_pages": 1,
        "evict/host_full_pages": 4,
        "evict/host_swa_pages": 2,
        "transfer/back_up_bytes": 24,
        "back_up/dropped_mamba_pages": 1,
    }
    complete(cache, BackUp)
    assert ledger.entries() == {"storage/queued_write_pages": 6}
    complete(cache, StorageWrite)
    evict_all(cache, DEVICE, FULL)
    assert ledger.entries() == {
        "evict/device_full_pages": 8,
        "evict/device_swa_pages": 8,
        "evict/device_mamba_pages": 3,
    }

    sequence = Sequence(tokens_of(9, 300))
    acquired = cache.acquire(sequence, cache.match(sequence, 9))
    assert acquired is not None
    assert (acquired.cached_len, acquired.host_len) == (8, 8)
    assert ledger.entries() == {"transfer/load_back_bytes": 122}
    cache.abandon(sequence)
    complete_all(cache)
    invariants.check_drained(cache, None)
