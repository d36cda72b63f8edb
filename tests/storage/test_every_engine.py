"""What `base.Storage` promises, asked of every engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from storage_engines import Engine, Open, bounded, durable
from storage_pages import (
    PAGE_BYTES,
    assert_whole_or_absent,
    key,
    keys,
    payload,
    poisoned,
    read,
    start_writer,
    write,
)

from hicache.storage.base import Storage, StorageStats
from hicache.storage.engines.memory import MemoryStorage


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, PAGE_BYTES, 300_001])
def test_a_page_comes_back_as_it_was_written(storage: Storage, num_bytes: int) -> None:
    buffer = poisoned(num_bytes)
    storage.write([key(1)], [payload(key(1), num_bytes)])
    assert storage.read([key(1)], [buffer]) == [True]
    assert buffer == payload(key(1), num_bytes)


def test_an_empty_batch_is_answered_with_nothing(storage: Storage) -> None:
    storage.delete([])
    answers = (storage.contains([]), storage.read([], []), storage.write([], []))
    assert answers == ([], [], [])


def test_a_batch_is_answered_key_by_key(storage: Storage) -> None:
    write(storage, keys(1, 3))
    pages = read(storage, keys(0, 1, 2, 3))
    assert pages == [None, payload(key(1)), None, payload(key(3))]


def test_contains_tells_stored_from_missing(storage: Storage) -> None:
    numbers = range(300)
    write(storage, keys(*numbers[::2]))
    assert storage.contains(keys(*numbers)) == [number % 2 == 0 for number in numbers]


def test_keys_of_two_components_are_two_pages(storage: Storage) -> None:
    storage.write([key(1, 0)], [payload(key(1, 0))])
    assert storage.contains([key(1, 0), key(1, 1)]) == [True, False]


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES - 1, PAGE_BYTES + 1, 2 * PAGE_BYTES])
def test_a_buffer_of_another_length_is_a_miss(storage: Storage, num_bytes: int) -> None:
    write(storage, keys(1))
    assert storage.read([key(1)], [poisoned(num_bytes)]) == [False]


def test_a_page_is_still_there_after_it_was_read_with_another_length(storage: Storage) -> None:
    write(storage, keys(1))
    storage.read([key(1)], [poisoned(PAGE_BYTES - 1)])
    assert read(storage, keys(1)) == [payload(key(1))]


def test_a_page_is_written_once(storage: Storage) -> None:
    write(storage, keys(1))
    assert storage.write([key(1)], [payload(key(2))]) == [True]
    assert read(storage, keys(1)) == [payload(key(1))]


def test_the_same_key_twice_in_a_batch_is_stored_once(storage: Storage) -> None:
    assert write(storage, keys(1, 1)) == [True, True]
    assert storage.contains(keys(1)) == [True]


def test_a_deleted_page_is_missing(storage: Storage) -> None:
    write(storage, keys(1, 2))
    storage.delete(keys(1, 7))
    assert read(storage, keys(1, 2)) == [None, payload(key(2))]


def test_a_deleted_page_can_be_written_again(storage: Storage) -> None:
    write(storage, keys(1))
    storage.delete(keys(1))
    write(storage, keys(1))
    assert read(storage, keys(1)) == [payload(key(1))]


@bounded
def test_a_new_store_has_counted_nothing(storage: Storage) -> None:
    assert storage.stats() == StorageStats(
        stored_pages=0,
        stored_bytes=0,
        damaged_pages=0,
    )
    assert StorageStats() == storage.stats()


@bounded
def test_a_page_that_is_stored_already_is_not_damaged_by_another_write(storage: Storage) -> None:
    write(storage, keys(1))
    write(storage, keys(1, 2))
    assert read(storage, keys(1, 2)) == [payload(each) for each in keys(1, 2)]
    assert storage.stats().damaged_pages == 0


@bounded
def test_stored_pages_are_counted(storage: Storage) -> None:
    write(storage, keys(1, 2, 3))
    storage.delete(keys(2))
    stats = storage.stats()
    assert (stats.stored_pages, stats.stored_bytes) == (2, 2 * PAGE_BYTES)


@bounded
def test_an_overfilled_store_keeps_its_capacity(open_engine: Open) -> None:
    storage = open_engine(capacity_bytes=10 * PAGE_BYTES)
    for number in range(100):
        assert write(storage, keys(number)) == [True]
        assert storage.stats().stored_bytes <= 10 * PAGE_BYTES
    assert storage.contains(keys(*range(100))) == [False] * 90 + [True] * 10


@bounded
def test_what_an_overfilled_store_kept_is_the_youngest(open_engine: Open) -> None:
    storage = open_engine(capacity_bytes=10 * PAGE_BYTES)
    for number in range(40):
        write(storage, keys(number))
    assert storage.contains(keys(*range(40))) == [number >= 30 for number in range(40)]
    assert assert_whole_or_absent(storage, keys(*range(40))) == 10


@bounded
def test_a_page_larger_than_the_capacity_is_declined(open_engine: Open) -> None:
    storage = open_engine(capacity_bytes=PAGE_BYTES - 1)
    assert write(storage, keys(1)) == [False]


def test_threads_never_read_a_wrong_byte(engine: Engine, open_engine: Open) -> None:
    storage = open_engine(capacity_bytes=12 * PAGE_BYTES if engine.bounded else None)

    def work(start: int) -> int:
        found = 0
        for turn in range(24):
            some = keys(*((start * 5 + turn * 3 + i) % 32 for i in range(4)))
            write(storage, some)
            found += assert_whole_or_absent(storage, some)
        return found

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) > 0


@durable
def test_pages_are_there_when_the_store_is_opened_again(open_engine: Open) -> None:
    write(open_engine(), keys(1, 2))
    assert read(open_engine(), keys(1, 2)) == [payload(key(1)), payload(key(2))]


@durable
def test_another_namespace_sees_nothing(open_engine: Open) -> None:
    write(open_engine(), keys(1))
    other = open_engine(suffix="other")
    assert (other.contains(keys(1)), read(other, keys(1))) == ([False], [None])


@durable
def test_two_processes_share_one_store(
    engine: Engine, open_engine: Open, root: str, namespace: str
) -> None:
    storage = open_engine()
    one = start_writer(engine.kind, root, 0, 24, namespace=namespace)
    other = start_writer(engine.kind, root, 12, 24, namespace=namespace)
    with one, other:
        while one.poll() is None or other.poll() is None:
            assert_whole_or_absent(storage, keys(*range(36)))
    assert (one.returncode, other.returncode) == (0, 0)
    assert assert_whole_or_absent(storage, keys(*range(36))) == 36


def test_a_wrong_byte_would_be_noticed() -> None:
    storage = MemoryStorage(capacity_bytes=None)
    storage.write([key(1)], [payload(key(2))])
    with pytest.raises(AssertionError, match="wrong bytes"):
        assert_whole_or_absent(storage, [key(1)])
