"""Digests kept above an engine: what is passed on, and what is forgotten."""

from storage_pages import PAGE_BYTES, keys, payload, poisoned, read, write

from hicache.storage.base import StorageStats
from hicache.storage.checked import CheckedStorage
from hicache.storage.memory import MemoryStorage


class Damaged(MemoryStorage):
    """Memory that has found damaged pages itself."""

    def stats(self) -> StorageStats:
        return StorageStats(damaged_pages=5)


def checked() -> tuple[CheckedStorage, MemoryStorage]:
    inner = MemoryStorage(capacity_bytes=2 * PAGE_BYTES)
    return CheckedStorage(inner), inner


def test_a_page_is_known_by_what_was_written_first() -> None:
    storage, _ = checked()
    assert write(storage, keys(1)) == [True]
    assert storage.write(keys(1), [payload(keys(2)[0])]) == [True]
    assert read(storage, keys(1)) == [payload(keys(1)[0])]


def test_a_page_that_was_deleted_is_not_known_any_more() -> None:
    storage, inner = checked()
    write(storage, keys(1, 2))
    storage.delete(keys(1, 7))
    assert storage.contains(keys(1, 2)) == [False, True]
    write(inner, keys(1))
    assert read(storage, keys(1, 2)) == [None, payload(keys(2)[0])]
    assert storage.stats().damaged_pages == 0


def test_a_page_that_the_engine_has_not_got_is_missing() -> None:
    storage, inner = checked()
    write(storage, keys(1))
    inner.delete(keys(1))
    assert storage.read(keys(1), [payload(keys(1)[0])]) == [False]


def test_wrong_pages_are_counted_beside_those_of_the_engine() -> None:
    inner = Damaged(capacity_bytes=None)
    storage = CheckedStorage(inner)
    write(storage, keys(1, 2))
    inner.delete(keys(1, 2))
    inner.write(keys(1, 2), [payload(keys(3)[0]), payload(keys(2)[0])])
    assert storage.read(keys(1, 2), [poisoned(), poisoned()]) == [False, True]
    assert storage.stats().damaged_pages == 5 + 1


def test_a_closed_store_has_closed_its_engine() -> None:
    storage, inner = checked()
    write(storage, keys(1))
    storage.close()
    assert inner.contains(keys(1)) == [False]
