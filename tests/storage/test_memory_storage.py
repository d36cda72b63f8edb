"""The engine in memory: placeholders counted by their nominal size, and a capacity of 0."""

import pytest

from hicache.storage.contract import key
from hicache.storage.engines.memory import MemoryStorage

EMPTY = memoryview(b"")
NOMINAL = {0: 10, 1: 25}


def write(storage: MemoryStorage, *keys: bytes) -> list[bool]:
    return storage.write(keys, [EMPTY] * len(keys))


def test_lookups_do_not_make_a_page_young():
    storage = MemoryStorage(capacity_bytes=20, page_bytes=NOMINAL)
    write(storage, key(1), key(2))
    storage.contains([key(1)])
    write(storage, key(3))
    assert storage.contains([key(1), key(2), key(3)]) == [False, True, True]


def test_a_large_page_evicts_as_many_pages_as_it_needs():
    storage = MemoryStorage(capacity_bytes=40, page_bytes=NOMINAL)
    write(storage, *(key(number) for number in range(4)), key(9, 1))
    stats = storage.stats()
    assert (stats.stored_bytes, stats.stored_pages) == (35, 2)


def test_a_placeholder_is_read_only_with_a_buffer_of_its_own_length():
    storage = MemoryStorage(capacity_bytes=None, page_bytes=NOMINAL)
    write(storage, key(1))
    assert storage.read([key(1), key(2)], [EMPTY, EMPTY]) == [True, False]
    assert storage.read([key(1)], [memoryview(bytearray(10))]) == [False]


@pytest.mark.parametrize(("page_bytes", "size"), [(None, 3), ({0: 10}, 10)])
def test_stored_bytes_count_the_length_of_pages_or_their_nominal_size(page_bytes, size):
    storage = MemoryStorage(capacity_bytes=None, page_bytes=page_bytes)
    storage.write([key(1), key(2), key(1)], [memoryview(b"abc")] * 3)
    assert storage.stats().stored_bytes == 2 * size
    storage.delete([key(1), key(9)])
    assert storage.stats().stored_bytes == size
    storage.close()
    assert (storage.stats().stored_bytes, storage.stats().stored_pages) == (0, 0)


def test_a_page_is_a_copy_and_a_miss_leaves_the_buffer_unchanged():
    storage = MemoryStorage(capacity_bytes=None)
    buffer = bytearray(b"abc")
    storage.write([key(1)], [memoryview(buffer)])
    buffer[:] = b"xyz"
    assert storage.read([key(2)], [memoryview(buffer)]) == [False]
    assert buffer == b"xyz"
    assert storage.read([key(1)], [memoryview(buffer)]) == [True]
    assert buffer == b"abc"


def test_a_capacity_may_be_zero_but_not_negative():
    assert write(MemoryStorage(capacity_bytes=0, page_bytes=NOMINAL), key(1)) == [False]
    assert write(MemoryStorage(capacity_bytes=0), key(1)) == [True]
    with pytest.raises(ValueError, match="-1"):
        MemoryStorage(capacity_bytes=-1)
