"""Eviction as in a Mooncake store: which pages are evicted, and when."""

from hashlib import sha256

from hicache.storage.engines.mooncake_master import MooncakeMaster

EMPTY = memoryview(b"")
NUM_PAGES = 10_000


def keys(*numbers: int) -> list[bytes]:
    return [sha256(number.to_bytes(4)).digest()[:16] + b"\0" for number in numbers]


def filled(*, asked: range = range(0)) -> MooncakeMaster:
    """A store filled to its limit of 95 % with 9,500 pages, of which `asked` were looked up."""
    storage = MooncakeMaster(capacity_bytes=10 * NUM_PAGES, page_bytes={0: 10})
    for first in range(0, 9_500, 500):
        storage.write(keys(*range(first, first + 500)), [EMPTY] * 500)
    storage.contains(keys(*asked))
    return storage


def held(storage: MooncakeMaster) -> list[int]:
    flags = storage.contains(keys(*range(NUM_PAGES)))
    return [number for number, flag in enumerate(flags) if flag]


def test_a_full_store_evicts_five_percent_of_its_pages_mostly_old_ones():
    storage, used = filled(), filled(asked=range(1_000))
    assert len(held(storage)) == storage.stats().stored_pages == 9_500
    storage, other = filled(), filled()
    for each in (storage, other, used):
        each.write(keys(9_999), [EMPTY])
    kept = held(storage)
    assert 9_501 * 0.94 < len(kept) < 9_501 * 0.951
    assert storage.stats().stored_bytes == 10 * len(kept)
    lost = sorted(set(range(9_500)) - set(kept))
    assert sum(number < 2_000 for number in lost) > 0.6 * len(lost)
    assert lost[-1] > 4_000  # an LRU list would lose the first 500
    assert held(other) == kept
    assert set(range(1_000)) <= set(held(used))


def test_a_store_without_a_capacity_keeps_all_pages():
    endless = MooncakeMaster(capacity_bytes=None, page_bytes={0: 10})
    endless.write(keys(*range(NUM_PAGES)), [EMPTY] * NUM_PAGES)
    assert len(held(endless)) == NUM_PAGES


def test_deleted_pages_free_capacity():
    storage = filled()
    storage.delete(keys(0, 0, 1))
    assert storage.stats().stored_bytes == 10 * 9_498
    storage.write(keys(9_999), [EMPTY])
    assert len(held(storage)) == 9_499
