"""The interface of `hicache.storage.base.Storage`, tested on every engine."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from storage_engines import bounded, durable
from storage_pages import start_writer

from hicache.storage.base import StorageStats
from hicache.storage.contract import (
    PAGE_BYTES,
    RULES,
    a_full_store_is_no_error,
    key,
    keys,
    num_whole,
    payload,
    poisoned,
    read,
    write,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_an_engine_follows_every_rule_of_the_storage_contract(rule, engine, open_engine):
    if rule is not a_full_store_is_no_error or engine.bounded:
        rule(open_engine)


@bounded
@pytest.mark.parametrize("num_bytes", [1, 5, PAGE_BYTES - 16, PAGE_BYTES - 17])
def test_a_read_into_a_longer_buffer_is_a_miss_and_does_not_delete_the_page(num_bytes, storage):
    storage.write([key(1)], [payload(key(1), num_bytes)])
    assert read(storage, keys(1)) == [None]
    buffer = poisoned(num_bytes)
    assert storage.read([key(1)], [buffer]) == [True]
    assert buffer == payload(key(1), num_bytes)
    assert storage.stats().damaged_pages == 0


@bounded
def test_stats_count_stored_pages_and_bytes(storage):
    assert storage.stats() == StorageStats(stored_pages=0, stored_bytes=0, damaged_pages=0)
    write(storage, keys(1, 2, 3))
    write(storage, keys(3, 4))
    storage.delete(keys(2))
    assert storage.stats() == StorageStats(stored_pages=3, stored_bytes=3 * PAGE_BYTES)


@bounded
def test_a_full_store_stays_within_its_capacity_and_keeps_the_youngest_pages(open_engine):
    storage = open_engine(capacity_bytes=10 * PAGE_BYTES)
    for number in range(40):
        assert write(storage, keys(number)) == [True]
        assert storage.stats().stored_bytes <= 10 * PAGE_BYTES
    assert storage.contains(keys(*range(40))) == [False] * 30 + [True] * 10
    assert num_whole(storage, keys(*range(40))) == 10


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


@bounded
def test_threads_read_no_wrong_byte_while_pages_are_evicted(open_engine):
    storage = open_engine(capacity_bytes=12 * PAGE_BYTES)

    def work(start: int) -> int:
        found = 0
        for turn in range(12):
            some = keys(*((start * 5 + turn * 3 + i) % 32 for i in range(4)))
            write(storage, some)
            found += num_whole(storage, some)
        return found

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) > 0


@durable
def test_pages_are_still_stored_when_an_engine_is_opened_again(open_engine):
    write(open_engine(), keys(1, 2))
    assert read(open_engine(), keys(1, 2)) == [payload(key(1)), payload(key(2))]


@pytest.mark.parametrize("engine", ["slab", "file", "redis", "mooncake"], indirect=True)
def test_two_processes_share_one_store(engine, open_engine, root, namespace):
    storage = open_engine()
    one = start_writer(engine.kind, root, 0, 24, namespace=namespace)
    other = start_writer(engine.kind, root, 12, 24, namespace=namespace)
    with one, other:
        assert one.stdout.readline() == other.stdout.readline() == "open\n"
        while one.poll() is None or other.poll() is None:
            num_whole(storage, keys(*range(36)))
    assert (one.returncode, other.returncode) == (0, 0)
    assert num_whole(storage, keys(*range(36))) == 36
