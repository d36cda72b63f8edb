"""What leaves memory as from a Mooncake store, and when."""

from hashlib import sha256

from hicache.storage.engines.mooncake_master import MooncakeMaster

EMPTY = memoryview(b"")
NUM_PAGES = 10_000


def key(number: int) -> bytes:
    return sha256(number.to_bytes(4)).digest()[:16] + b"\0"


def filled(*, asked: range = range(0)) -> MooncakeMaster:
    # 9,500 pages fill the memory as far as it may be; `asked` of them are used again
    storage = MooncakeMaster(capacity_bytes=10 * NUM_PAGES, page_bytes={0: 10})
    for first in range(0, 9_500, 500):
        storage.write([key(first + more) for more in range(500)], [EMPTY] * 500)
    storage.contains([key(number) for number in asked])
    return storage


def held(storage: MooncakeMaster) -> list[int]:
    flags = storage.contains([key(number) for number in range(NUM_PAGES)])
    return [number for number, flag in enumerate(flags) if flag]


def test_a_pass_evicts_five_percent_when_95_percent_are_used() -> None:
    storage = filled()
    assert len(held(storage)) == storage.stats().stored_pages == 9_500
    storage.write([key(9_999)], [EMPTY])
    kept = held(storage)
    assert 9_501 * 0.94 < len(kept) < 9_501 * 0.951
    assert storage.stats().stored_bytes == 10 * len(kept)


def test_pages_of_all_ages_leave_but_mostly_old_ones() -> None:
    storage = filled()
    storage.write([key(9_999)], [EMPTY])
    lost = sorted(set(range(9_500)) - set(held(storage)))
    assert sum(number < 2_000 for number in lost) > 0.6 * len(lost)
    assert lost[-1] > 4_000  # an LRU list would have lost the first 500


def test_asking_for_pages_keeps_them() -> None:
    storage = filled(asked=range(1_000))
    storage.write([key(9_999)], [EMPTY])
    assert set(range(1_000)) <= set(held(storage))


def test_a_store_that_is_never_full_keeps_all_and_equal_calls_lose_the_same() -> None:
    endless = MooncakeMaster(capacity_bytes=None, page_bytes={0: 10})
    endless.write([key(number) for number in range(NUM_PAGES)], [EMPTY] * NUM_PAGES)
    assert len(held(endless)) == NUM_PAGES
    one, other = filled(), filled()
    for storage in (one, other):
        storage.write([key(number) for number in range(9_500, NUM_PAGES)], [EMPTY] * 500)
    assert held(one) == held(other)


def test_deleted_pages_make_room() -> None:
    storage = filled()
    storage.delete([key(0), key(0), key(1)])
    assert storage.stats().stored_bytes == 10 * 9_498
    storage.write([key(9_999)], [EMPTY])
    assert len(held(storage)) == 9_499
