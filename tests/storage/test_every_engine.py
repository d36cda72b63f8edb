"""The interface of `hicache.storage.base.Storage`, tested on every engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from storage_engines import bounded, durable
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

from hicache.storage.base import StorageStats
from hicache.storage.engines.memory import MemoryStorage


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 300_001])
def test_a_page_is_read_as_it_was_written(num_bytes, storage):
    buffer = poisoned(num_bytes)
    storage.write([key(1)], [payload(key(1), num_bytes)])
    assert storage.read([key(1)], [buffer]) == [True]
    assert buffer == payload(key(1), num_bytes)


def test_each_key_of_a_batch_has_its_own_answer(storage):
    write(storage, keys(1, 3))
    assert read(storage, keys(0, 1, 2, 3)) == [None, payload(key(1)), None, payload(key(3))]
    storage.delete([])
    assert (storage.contains([]), storage.read([], []), storage.write([], [])) == ([], [], [])


def test_contains_answers_a_long_batch(storage):
    write(storage, keys(*range(0, 300, 2)))
    assert storage.contains(keys(*range(300))) == [True, False] * 150


def test_pages_of_two_kinds_are_two_pages(storage):
    storage.write([key(1, 0)], [payload(key(1, 0))])
    assert storage.contains([key(1, 0), key(1, 1)]) == [True, False]


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES - 1, PAGE_BYTES + 1, 2 * PAGE_BYTES])
def test_a_read_with_another_length_is_a_miss_and_keeps_the_page(num_bytes, storage):
    write(storage, keys(1))
    assert storage.read([key(1)], [poisoned(num_bytes)]) == [False]
    assert read(storage, keys(1)) == [payload(key(1))]


@bounded
@pytest.mark.parametrize("num_bytes", [1, 5, PAGE_BYTES - 16, PAGE_BYTES - 17])
def test_a_read_of_a_shorter_page_is_a_miss_and_keeps_the_page(num_bytes, storage):
    storage.write([key(1)], [payload(key(1), num_bytes)])
    assert read(storage, keys(1)) == [None]
    buffer = poisoned(num_bytes)
    assert storage.read([key(1)], [buffer]) == [True]
    assert buffer == payload(key(1), num_bytes)
    assert storage.stats().damaged_pages == 0


def test_a_second_write_of_a_key_changes_nothing(storage):
    assert write(storage, keys(1, 1)) == [True, True]
    assert storage.write(keys(1, 2), [payload(key(2))] * 2) == [True, True]
    assert read(storage, keys(1, 2)) == [payload(key(1)), payload(key(2))]


def test_a_deleted_page_is_missing_until_it_is_written_again(storage):
    write(storage, keys(1, 2))
    storage.delete(keys(1, 7))
    assert read(storage, keys(1, 2)) == [None, payload(key(2))]
    write(storage, keys(1))
    assert read(storage, keys(1)) == [payload(key(1))]


@bounded
def test_stats_count_stored_pages_and_bytes(storage):
    assert storage.stats() == StorageStats(stored_pages=0, stored_bytes=0, damaged_pages=0)
    write(storage, keys(1, 2, 3))
    write(storage, keys(3, 4))
    storage.delete(keys(2))
    assert storage.stats() == StorageStats(stored_pages=3, stored_bytes=3 * PAGE_BYTES)


@bounded
def test_a_full_store_keeps_its_capacity_and_the_youngest_pages(open_engine):
    storage = open_engine(capacity_bytes=10 * PAGE_BYTES)
    for number in range(40):
        assert write(storage, keys(number)) == [True]
        assert storage.stats().stored_bytes <= 10 * PAGE_BYTES
    assert storage.contains(keys(*range(40))) == [False] * 30 + [True] * 10
    assert assert_whole_or_absent(storage, keys(*range(40))) == 10


@bounded
def test_reads_and_repeated_writes_make_a_page_young(open_engine):
    for use in (read, write):
        storage = open_engine(suffix=use.__name__, capacity_bytes=2 * PAGE_BYTES)
        storage.delete(keys(3))
        write(storage, keys(1, 2))
        use(storage, keys(1))
        write(storage, keys(3))
        assert storage.contains(keys(1, 2, 3)) == [True, False, True]


@bounded
def test_a_page_fits_if_it_is_no_larger_than_the_capacity(open_engine):
    assert write(open_engine(capacity_bytes=PAGE_BYTES - 1), keys(1)) == [False]
    storage = open_engine(suffix="2", capacity_bytes=PAGE_BYTES)
    assert write(storage, keys(1)) == [True]
    assert storage.write(keys(2), [payload(key(2), 2 * PAGE_BYTES)]) == [False]
    assert storage.contains(keys(1, 2)) == [True, False]
    assert write(storage, keys(3)) == [True]
    assert storage.contains(keys(1, 3)) == [False, True]


def test_threads_never_read_a_wrong_byte(engine, open_engine):
    storage = open_engine(capacity_bytes=12 * PAGE_BYTES if engine.bounded else None)

    def work(start: int) -> int:
        found = 0
        for turn in range(12):
            some = keys(*((start * 5 + turn * 3 + i) % 32 for i in range(4)))
            write(storage, some)
            found += assert_whole_or_absent(storage, some)
        return found

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) > 0


@durable
def test_pages_outlive_the_engine_and_stay_in_their_namespace(open_engine):
    write(open_engine(), keys(1, 2))
    assert read(open_engine(), keys(1, 2)) == [payload(key(1)), payload(key(2))]
    other = open_engine(suffix="other")
    assert (other.contains(keys(1)), read(other, keys(1))) == ([False], [None])


@pytest.mark.parametrize("engine", ["slab", "file", "redis", "mooncake"], indirect=True)
def test_two_processes_share_one_store(engine, open_engine, root, namespace):
    storage = open_engine()
    one = start_writer(engine.kind, root, 0, 24, namespace=namespace)
    other = start_writer(engine.kind, root, 12, 24, namespace=namespace)
    with one, other:
        assert one.stdout.readline() == other.stdout.readline() == "open\n"
        while one.poll() is None or other.poll() is None:
            assert_whole_or_absent(storage, keys(*range(36)))
    assert (one.returncode, other.returncode) == (0, 0)
    assert assert_whole_or_absent(storage, keys(*range(36))) == 36


def test_the_suite_notices_a_wrong_byte():
    storage = MemoryStorage(capacity_bytes=None)
    storage.write([key(1)], [payload(key(2))])
    with pytest.raises(AssertionError, match="wrong bytes"):
        assert_whole_or_absent(storage, [key(1)])
