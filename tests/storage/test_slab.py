"""The slab engine: slots, one capacity for all slot sizes, ages, and closing during other calls."""

import errno
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Barrier, Event

import pytest
from storage_engines import before_each

from hicache.storage.base import StorageError
from hicache.storage.contract import PAGE_BYTES, key, keys, payload, poisoned, read, write
from hicache.storage.digest import namespace_name
from hicache.storage.engines.owner import current_owner
from hicache.storage.engines.slab import SlabStorage
from hicache.storage.engines.slot_files import Place

SMALL, LARGE = 4096, 5 * 4096
NO_WRITER = f"{'0' * 32}.1.1"


def open_slab(root: Path, capacity_bytes: int | None = None, **options: int) -> SlabStorage:
    return SlabStorage(root, namespace="test", capacity_bytes=capacity_bytes, **options)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[SlabStorage]:
    with closing(open_slab(tmp_path)) as opened:
        yield opened


@pytest.fixture
def two(tmp_path: Path) -> Iterator[SlabStorage]:
    """A slab with room for two pages."""
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as opened:
        yield opened


def write_sized(storage: SlabStorage, page_key: bytes, num_bytes: int) -> bool:
    return storage.write([page_key], [payload(page_key, num_bytes)])[0]


def allocated_bytes(root: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in root.glob("*/pages-*.slab"))


def open_files(root: Path) -> list[str]:
    """Names of the files below `root` that this process has open."""
    files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    names = [str(path.readlink()) for path in files]
    return [name for name in names if name.startswith(str(root))]


def disk_is_full() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def test_close_ends_the_threads_that_move_pages(tmp_path):
    before = set(threading.enumerate())
    with closing(open_slab(tmp_path, num_threads=3)) as storage:
        write(storage, keys(*range(8)))
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before


def test_a_read_makes_a_page_young_also_for_the_next_opening(two, tmp_path):
    write(two, keys(1, 2))
    read(two, keys(1))
    two.close()
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(3))
        assert storage.contains(keys(1, 2, 3)) == [True, False, True]


def test_a_large_page_evicts_small_ones_and_their_space_is_released(tmp_path):
    with closing(open_slab(tmp_path, 8 * SMALL)) as storage:
        for number in range(8):
            write_sized(storage, key(number), SMALL)
        assert write_sized(storage, key(9), LARGE)
        assert storage.contains(keys(*range(8))) == [number >= 5 for number in range(8)]
        assert allocated_bytes(tmp_path) <= 8 * SMALL


def test_a_smaller_capacity_is_enforced_by_the_next_write(tmp_path):
    with closing(open_slab(tmp_path, 8 * PAGE_BYTES)) as storage:
        write(storage, keys(*range(8)))
    with closing(open_slab(tmp_path, 3 * PAGE_BYTES)) as storage:
        write(storage, keys(9))
        assert storage.stats().stored_bytes == 3 * PAGE_BYTES


def test_a_batch_larger_than_the_capacity_is_stored_in_part(two):
    assert write(two, keys(*range(4))) == [True, True, False, False]


def test_a_large_page_is_moved_in_parts(storage):
    moved: list[tuple[int, int]] = []

    def watch(_: int, parts: tuple[memoryview], offset: int) -> None:
        moved.append((offset, sum(part.nbytes for part in parts)))

    def taken() -> list[tuple[int, int]]:
        copied = moved.copy()
        moved.clear()
        return copied

    part, num_bytes = 256 * 1024, 2 * 256 * 1024 + 5
    parts = [(0, part), (part, part), (2 * part, 5)]
    buffer = poisoned(num_bytes)
    with before_each("pwritev", watch), before_each("preadv", watch):
        assert write_sized(storage, key(1), num_bytes)
        assert taken() == parts
        assert storage.read(keys(1), [buffer]) == [True]
        assert taken() == parts
        # a buffer of another length for the same slot: the page is checked
        assert storage.read(keys(1), [poisoned(num_bytes + 1)]) == [False]
        assert taken() == parts
        # a slot larger than the buffer: the page is not read
        assert storage.read(keys(1), [poisoned(part)]) == [False]
        assert taken() == []
        assert write_sized(storage, key(2), part)
        assert [length for _, length in taken()] == [part]
    assert buffer == payload(key(1), num_bytes)
    assert storage.stats().damaged_pages == 0


def test_two_threads_move_the_pages_of_a_call(storage):
    both, threads = Barrier(2), set()

    def meet(*_: object) -> None:
        threads.add(threading.get_ident())
        both.wait(60)

    with before_each("pwritev", meet):
        assert write(storage, keys(1, 2, 3, 4)) == [True] * 4
    assert len(threads) == 2
    assert storage._threads._max_workers == 2


def test_the_order_of_use_is_written_to_the_table_after_reads_of_1024_pages(storage):
    some = keys(*range(1025))
    assert all(storage.write(some, [memoryview(b"x")] * 1025))
    told: list[list[bytes]] = []
    storage._table.touch = lambda keys: told.append(list(keys))
    buffers = [memoryview(bytearray(1)) for _ in some]
    assert all(storage.read(some[:1024], buffers[:1024]))
    storage.read(some[:1], buffers[:1])
    assert told == []
    storage.read(some[1024:], buffers[1024:])
    assert told == [[*some[1:1024], some[0], some[1024]]]
    storage.read(some[:1], buffers[:1])
    assert len(told) == 1  # the keys that were told are not told again


@pytest.mark.parametrize(
    ("num_bytes", "slot_bytes"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)]
)
def test_a_slot_is_as_large_as_its_page_and_aligned(num_bytes, slot_bytes, storage, tmp_path):
    assert write_sized(storage, key(1), num_bytes)
    assert storage.read(keys(1), [poisoned(num_bytes)]) == [True]
    assert storage.stats().stored_bytes == slot_bytes
    assert (tmp_path / namespace_name("test") / f"pages-{slot_bytes}.slab").exists()


def test_a_freed_slot_is_reused_before_the_file_grows(storage, tmp_path):
    write(storage, keys(*range(6)))
    storage.delete(keys(1, 3))
    write(storage, keys(10, 11))
    (path,) = tmp_path.glob("*/pages-*.slab")
    assert path.stat().st_size == 6 * PAGE_BYTES
    write(storage, keys(12))
    assert path.stat().st_size == 7 * PAGE_BYTES
    assert read(storage, keys(10, 11, 12)) == [payload(key(n)) for n in (10, 11, 12)]


def test_the_work_of_a_call_does_not_grow_with_the_stored_pages(tmp_path):
    steps: list[int] = []  # one entry for 20 instructions of SQLite's machine
    page, taken = memoryview(b"x"), []
    with closing(open_slab(tmp_path, 800 * SMALL)) as storage:
        storage._table._db.set_progress_handler(lambda: steps.append(1) or 0, 20)
        for first, last in ((0, 10), (10, 800)):
            storage.write(keys(*range(first, last)), [page] * (last - first))
            for call in (
                lambda: storage.contains(keys(1, 2, 3)),
                lambda: storage.read(keys(1), [memoryview(bytearray(1))]),
                lambda: storage.delete(keys(1)),
                lambda: storage.write(keys(1), [page]),
                lambda: storage.write(keys(first + 5000), [page]),  # noqa: B023
            ):
                steps.clear()
                call()
                taken.append(len(steps))
    for few, many in zip(taken[:5], taken[5:], strict=True):
        assert many <= 2 * few + 10, taken


def test_space_of_deleted_pages_is_released(storage, tmp_path):
    write(storage, keys(1, 2, 3))
    assert allocated_bytes(tmp_path) == 3 * PAGE_BYTES
    with closing(open_slab(tmp_path)) as other:  # which has not opened the file of pages yet
        other.delete(keys(1, 3, 9))
        assert allocated_bytes(tmp_path) == PAGE_BYTES
        assert read(other, keys(2)) == [payload(key(2))]


def test_a_full_slab_reuses_the_slots_of_dead_writers(two):
    write(two, keys(1, 2))
    for owner, results in ((current_owner(), [False, False]), (NO_WRITER, [True, True])):
        two._table._db.execute("UPDATE slots SET state = 1, key = NULL, owner = ?", (owner,))
        assert write(two, keys(3, 4)) == results
    assert two.contains(keys(3, 4)) == [True, True]
    assert two.stats().stored_bytes == 2 * PAGE_BYTES


def test_opening_a_slab_frees_the_slots_of_dead_writers(two, tmp_path):
    write(two, keys(1, 2))
    two._table._db.execute(
        "UPDATE slots SET state = 1, key = NULL, owner = ? WHERE key = ?", (NO_WRITER, *keys(2))
    )
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        assert allocated_bytes(tmp_path) == PAGE_BYTES
        write(storage, keys(3))
        assert storage.contains(keys(1, 3)) == [True, True]
        # writes do not wait for the disk, because readers check digests
        assert storage._table._db.execute("PRAGMA synchronous").fetchone() == (1,)


def test_a_slot_that_the_table_cannot_find_is_an_error(storage):
    write(storage, keys(1))
    with pytest.raises(sqlite3.DatabaseError, match=r"slot=7.* cannot be updated"):
        storage._table.free(Place(PAGE_BYTES, 7))
    assert storage.stats().stored_bytes == PAGE_BYTES


def test_a_key_twice_in_a_batch_takes_one_slot(two, tmp_path):
    assert write(two, keys(1, 1)) == [True, True]
    assert allocated_bytes(tmp_path) == PAGE_BYTES
    write(two, keys(2))
    assert two.contains(keys(1, 2)) == [True, True]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_failed_or_interrupted_write_loses_no_slot(error, two):
    def fail(*_: object) -> None:
        raise error

    with before_each("pwritev", fail), suppress(KeyboardInterrupt):
        assert write(two, keys(1, 2)) == [False, False]
    assert write(two, keys(3, 4)) == [True, True]


def test_a_slab_whose_table_cannot_grow_declines_pages(storage):
    storage._table._db.execute("PRAGMA max_page_count = 1")  # SQLite raises it to what it has
    results = [write(storage, keys(number))[0] for number in range(100)]
    storage._table._db.execute("PRAGMA max_page_count = 1000000")
    assert not all(results)
    assert storage.contains(keys(*range(100))) == results


def test_pages_whose_keys_do_not_fit_on_the_disk_are_refused_and_freed(two, tmp_path):
    publish = two._table.publish

    def publish_unless_full(*arguments: object, **options: object) -> list[bool]:
        if allocated_bytes(tmp_path):
            raise disk_is_full()
        return publish(*arguments, **options)

    two._table.publish = publish_unless_full
    assert write(two, keys(1, 2)) == [False, False]
    assert (allocated_bytes(tmp_path), two.stats().stored_pages) == (0, 0)
    two._table.publish = publish
    assert write(two, keys(3, 4)) == [True, True]


def test_a_write_on_a_full_disk_succeeds_after_the_log_is_shortened(storage):
    table = storage._table
    reserve, shrink, shrunk = table.reserve, table.shrink_log, []

    def reserve_after_shrinking(wanted: object) -> object:
        if not shrunk:
            raise disk_is_full()
        return reserve(wanted)

    table.reserve = reserve_after_shrinking
    table.shrink_log = lambda: (shrunk.append(1), shrink())
    assert write(storage, keys(1)) == [True]
    assert read(storage, keys(1)) == [payload(key(1))]
    assert shrunk == [1]


def test_the_log_of_the_table_stays_below_512_kib(storage, tmp_path):
    for number in range(120):
        storage.write(keys(number), [memoryview(b"x")])
    (log,) = tmp_path.rglob("*-wal")
    assert log.stat().st_size < 1 << 19


def test_the_space_of_a_slot_that_is_overwritten_is_not_released(two):
    write(two, keys(1, 2))
    freed: list[object] = []
    two._files.free_space = freed.append
    assert write(two, keys(3)) == [True]
    assert freed == []
    assert write_sized(two, key(4), SMALL)  # a slot of another size
    assert len(freed) == 1
    assert two.contains(keys(1, 2, 3, 4)) == [False, False, True, True]


def test_a_slot_reused_during_a_read_is_a_miss_and_no_damage(tmp_path):
    with closing(open_slab(tmp_path, PAGE_BYTES)) as storage:
        write(storage, keys(1))
        with before_each("preadv", lambda *_: write(storage, keys(2))):
            assert storage.read(keys(1), [poisoned()]) == [False]
        assert storage.stats().damaged_pages == 0
        assert storage.contains(keys(2)) == [True]


def test_files_of_a_closed_slab_stay_open_until_its_last_call_ends(storage, tmp_path):
    write(storage, keys(1))
    started, may_end = Event(), Event()

    def wait(*_: object) -> None:
        started.set()
        assert may_end.wait(60)

    with before_each("pwritev", wait), ThreadPoolExecutor(1) as thread:
        call = thread.submit(write, storage, keys(2))
        assert started.wait(60)
        storage.close()  # as a caller that abandons its call
        assert any("pages-" in name for name in open_files(tmp_path))
        with pytest.raises(StorageError, match="is closed"):
            storage.contains(keys(1))
        may_end.set()
        assert call.result(60) == [True]
    assert open_files(tmp_path) == []
    with closing(open_slab(tmp_path)) as storage:
        assert storage.contains(keys(1, 2)) == [True, True]
        storage.close()


def test_calls_concurrent_with_close_give_results_or_errors(tmp_path):
    for number in range(10):
        storage = open_slab(tmp_path, 8 * PAGE_BYTES)
        started = Event()

        def call_until_closed(first: int, storage=storage, started=started) -> None:
            while True:
                write(storage, keys(*range(first, first + 4)))
                read(storage, keys(*range(4)))
                started.set()

        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(call_until_closed, 10 * each + number) for each in range(3)]
            assert started.wait(60)
            storage.close()
            for call in calls:
                with pytest.raises(StorageError, match="is closed"):
                    call.result(60)


def test_a_page_without_bytes_is_whole_for_a_reader_that_wants_more(storage):
    assert write_sized(storage, key(1), 0)
    assert storage.read(keys(1), [poisoned(10)]) == [False]
    assert storage.contains(keys(1)) == [True]
    assert storage.stats().damaged_pages == 0
