"""What only the memory engine promises: recency, and stand-ins with nominal sizes."""

import pytest

from hicache.storage.engines.memory import MemoryStorage

EMPTY = memoryview(b"")


def key(number: int, kind: int = 0) -> bytes:
    return number.to_bytes(16, "little") + bytes([kind])


def write(storage: MemoryStorage, *keys: bytes) -> list[bool]:
    return storage.write(keys, [EMPTY] * len(keys))


def test_reads_refresh_a_page() -> None:
    storage = MemoryStorage(capacity_bytes=20, page_bytes={0: 10})
    write(storage, key(1), key(2))
    storage.read([key(1)], [EMPTY])
    write(storage, key(3))
    assert storage.contains([key(1), key(2), key(3)]) == [True, False, True]


def test_existing_writes_refresh_a_page() -> None:
    storage = MemoryStorage(capacity_bytes=20, page_bytes={0: 10})
    write(storage, key(1), key(2), key(1), key(3))
    assert storage.contains([key(1), key(2), key(3)]) == [True, False, True]


def test_contains_does_not_refresh_a_page() -> None:
    storage = MemoryStorage(capacity_bytes=20, page_bytes={0: 10})
    write(storage, key(1), key(2))
    storage.contains([key(1)])
    write(storage, key(3))
    assert storage.contains([key(1), key(2), key(3)]) == [False, True, True]


def test_stand_ins_are_charged_the_size_of_their_component() -> None:
    storage = MemoryStorage(capacity_bytes=None, page_bytes={0: 10, 2: 300})
    write(storage, key(1), key(1, 2))
    assert storage.stats().stored_bytes == 310


def test_one_large_page_evicts_as_many_as_it_needs() -> None:
    storage = MemoryStorage(capacity_bytes=40, page_bytes={0: 10, 1: 25})
    write(storage, *(key(number) for number in range(4)))
    write(storage, key(9, 1))
    stats = storage.stats()
    assert (stats.stored_bytes, stats.stored_pages) == (35, 2)


def test_a_page_larger_than_the_capacity_is_declined_and_evicts_nothing() -> None:
    storage = MemoryStorage(capacity_bytes=20, page_bytes={0: 10, 1: 25})
    write(storage, key(1), key(2))
    assert write(storage, key(3, 1)) == [False]
    assert storage.stats().stored_pages == 2


def test_a_stand_in_is_read_wherever_its_key_is_stored() -> None:
    storage = MemoryStorage(capacity_bytes=None, page_bytes={0: 10})
    write(storage, key(1))
    assert storage.read([key(1), key(2)], [EMPTY, EMPTY]) == [True, False]


def test_a_stand_in_is_never_taken_for_a_page() -> None:
    storage = MemoryStorage(capacity_bytes=None, page_bytes={0: 10})
    write(storage, key(1))
    assert storage.read([key(1)], [memoryview(bytearray(10))]) == [False]


def test_a_negative_capacity_is_refused_with_its_value() -> None:
    with pytest.raises(ValueError, match="-1"):
        MemoryStorage(capacity_bytes=-1)


def test_bytes_are_those_of_the_pages_or_nominal() -> None:
    for page_bytes, size in ((None, 3), ({0: 10}, 10)):
        storage = MemoryStorage(capacity_bytes=None, page_bytes=page_bytes)
        page = memoryview(b"abc")
        storage.write([key(1), key(2), key(1)], [page] * 3)
        storage.read([key(1), key(3)], [memoryview(bytearray(3))] * 2)
        assert storage.stats().stored_bytes == 2 * size
        storage.delete([key(1), key(9)])
        assert storage.stats().stored_bytes == size
        storage.close()
        assert (storage.stats().stored_bytes, storage.stats().stored_pages) == (0, 0)


def test_a_page_is_kept_apart_from_the_buffer_it_came_from() -> None:
    storage = MemoryStorage(capacity_bytes=None)
    buffer = bytearray(b"abc")
    storage.write([key(1)], [memoryview(buffer)])
    buffer[:] = b"xyz"
    back = bytearray(3)
    assert storage.read([key(1)], [memoryview(back)]) == [True]
    assert back == b"abc"


def test_a_page_as_large_as_the_capacity_fits_and_none_does_where_there_is_none() -> None:
    storage = MemoryStorage(capacity_bytes=10, page_bytes={0: 10})
    assert write(storage, key(1), key(2)) == [True, True]
    assert storage.contains([key(1), key(2)]) == [False, True]
    assert write(MemoryStorage(capacity_bytes=0, page_bytes={0: 10}), key(1)) == [False]
    assert write(MemoryStorage(capacity_bytes=0), key(1)) == [True]


def test_a_miss_leaves_the_buffer_as_it_is() -> None:
    storage = MemoryStorage(capacity_bytes=None)
    storage.write([key(1)], [memoryview(b"abc")])
    buffer = bytearray(b"wxyz")
    assert storage.read([key(1)], [memoryview(buffer)]) == [False]
    assert buffer == b"wxyz"
