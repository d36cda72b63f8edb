"""What only the slab promises: slots, sharing of one capacity between sizes, recency."""

import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier, Event, current_thread

import pytest
from storage_pages import PAGE_BYTES, key, keys, payload, poisoned, read, write

from hicache.storage.base import StorageError
from hicache.storage.digest import namespace_name
from hicache.storage.engines.owner import current_owner
from hicache.storage.engines.slab import SlabStorage
from hicache.storage.engines.slot_files import Place

SMALL, LARGE = 4096, 5 * 4096


def open_slab(root: Path, capacity_bytes: int | None = None, **options: object) -> SlabStorage:
    return SlabStorage(root, namespace="test", capacity_bytes=capacity_bytes, **options)  # type: ignore[arg-type]


def write_sized(storage: SlabStorage, page_key: bytes, num_bytes: int) -> bool:
    return storage.write([page_key], [payload(page_key, num_bytes)])[0]


def allocated_bytes(root: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in root.glob("*/pages-*.slab"))


def open_files(root: Path) -> list[str]:
    """Names of the files below `root` that this process has open."""
    files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    names = [str(path.readlink()) for path in files]
    return [name for name in names if name.startswith(str(root))]


def test_the_threads_that_move_pages_end_when_it_is_closed(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with closing(open_slab(tmp_path, num_threads=3)) as storage:
        write(storage, keys(*range(8)))
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before


def test_reads_refresh_a_page(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(1, 2))
        read(storage, keys(1))
        write(storage, keys(3))
        assert storage.contains(keys(1, 2, 3)) == [True, False, True]


def test_existing_writes_refresh_a_page(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(1, 2))
        write(storage, keys(1))
        write(storage, keys(3))
        assert storage.contains(keys(1, 2, 3)) == [True, False, True]


def test_what_was_read_stays_young_when_the_slab_is_opened_again(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(1, 2))
        read(storage, keys(1))
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(3))
        assert storage.contains(keys(1, 2, 3)) == [True, False, True]


def test_a_large_page_evicts_as_many_small_ones_as_it_needs(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 8 * SMALL)) as storage:
        for number in range(8):
            write_sized(storage, key(number), SMALL)
        assert write_sized(storage, key(9), LARGE)
        assert storage.contains(keys(*range(8))) == [number >= 5 for number in range(8)]


def test_space_of_evicted_pages_goes_back_to_the_file_system(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 8 * SMALL)) as storage:
        for number in range(8):
            write_sized(storage, key(number), SMALL)
        write_sized(storage, key(9), LARGE)
        assert allocated_bytes(tmp_path) <= 8 * SMALL


def test_a_smaller_capacity_is_kept_after_the_next_write(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 8 * PAGE_BYTES)) as storage:
        write(storage, keys(*range(8)))
    with closing(open_slab(tmp_path, 3 * PAGE_BYTES)) as storage:
        write(storage, keys(9))
        assert storage.stats().stored_bytes == 3 * PAGE_BYTES


def test_a_batch_larger_than_the_capacity_stores_what_fits(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 3 * PAGE_BYTES)) as storage:
        results = write(storage, keys(*range(5)))
        assert results == [True, True, True, False, False]


def test_a_page_larger_than_the_capacity_evicts_nothing(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 2 * SMALL)) as storage:
        assert [write_sized(storage, key(number), SMALL) for number in (1, 2)] == [True, True]
        assert not write_sized(storage, key(3), LARGE)
        assert storage.contains(keys(1, 2, 3)) == [True, True, False]


def test_a_large_page_is_moved_in_parts_that_fit_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[int, int]] = []

    def watched(move: Callable[..., int]) -> Callable[..., int]:
        def call(file: int, parts: Sequence[memoryview], offset: int) -> int:
            moved.append((offset, sum(part.nbytes for part in parts)))
            return move(file, parts, offset)

        return call

    monkeypatch.setattr(os, "pwritev", watched(os.pwritev))
    monkeypatch.setattr(os, "preadv", watched(os.preadv))
    part, num_bytes = 256 * 1024, 2 * 256 * 1024 + 5
    with closing(open_slab(tmp_path)) as storage:
        assert write_sized(storage, key(1), num_bytes)
        buffer = poisoned(num_bytes)
        assert storage.read(keys(1), [buffer]) == [True]
        assert buffer == payload(key(1), num_bytes)
        assert moved == 2 * [(0, part), (part, part), (2 * part, 5)]
        moved.clear()
        # of another length, in a slot no larger: is it whole?
        assert storage.read(keys(1), [poisoned(num_bytes + 1)]) == [False]
        assert moved == [(0, part), (part, part), (2 * part, 5)]
        moved.clear()
        # larger than what was asked for: nobody reads that
        assert storage.read(keys(1), [poisoned(part)]) == [False]
        assert moved == []
        assert write_sized(storage, key(2), part)
        assert [length for _, length in moved] == [part]
        assert storage.stats().damaged_pages == 0


def test_a_length_that_the_table_has_wrong_is_found(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path)) as storage:
        write(storage, keys(1))
        storage._table._db.execute("UPDATE slots SET length = length - 1")
        assert read(storage, keys(1)) == [None]
        assert storage.stats().damaged_pages == 1
        assert write(storage, keys(1)) == [True]
        assert read(storage, keys(1)) == [payload(key(1))]


@pytest.mark.parametrize("most", [1000, 4096, PAGE_BYTES - 1])
def test_transfers_that_come_in_pieces_are_put_together(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    with closing(open_slab(tmp_path)) as storage:
        monkeypatch.setattr(
            os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:most]], at)
        )
        monkeypatch.setattr(
            os, "pwritev", lambda file, parts, at: pwritev(file, [parts[0][:most]], at)
        )
        assert write(storage, keys(1, 2)) == [True, True]
        assert read(storage, keys(1, 2)) == [payload(key(1)), payload(key(2))]


def test_a_bad_sector_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with closing(open_slab(tmp_path)) as storage:
        write(storage, keys(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            assert read(storage, keys(1)) == [None]
        assert write(storage, keys(1)) == [True]
        assert read(storage, keys(1)) == [payload(key(1))]


def test_the_pages_of_a_call_are_moved_by_two_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_slab(tmp_path)) as storage:
        both = Barrier(2)
        threads: list[str] = []
        move = storage._files.write

        def together(*arguments: object) -> bool:
            threads.append(current_thread().name)
            both.wait(60)
            return move(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(storage._files, "write", together)
        assert write(storage, keys(1, 2, 3, 4)) == [True] * 4
        assert len(set(threads)) == 2
        assert storage._threads._max_workers == 2


def test_reads_are_told_to_the_table_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_slab(tmp_path)) as storage:
        some = keys(*range(1025))
        page = memoryview(b"x")
        assert all(storage.write(some, [page] * 1025))
        told: list[list[bytes]] = []
        monkeypatch.setattr(storage._table, "touch", lambda keys: told.append(list(keys)))
        buffers = [memoryview(bytearray(1)) for _ in some]
        assert all(storage.read(some[:1024], buffers[:1024]))
        storage.read(some[:1], buffers[:1])
        assert told == []
        storage.read(some[1024:], buffers[1024:])
        # in the order of their last use
        assert told == [[*some[1:1024], some[0], some[1024]]]


def test_a_page_takes_as_much_as_its_slot(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path)) as storage:
        write_sized(storage, key(1), 100)
        buffers = [poisoned(100), poisoned(500)]
        assert storage.read(keys(1, 2), buffers) == [True, False]
        assert storage.stats().stored_bytes == 4096


@pytest.mark.parametrize(
    ("num_bytes", "slot_bytes"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)]
)
def test_a_slot_is_as_large_as_its_page_and_aligned(
    num_bytes: int, slot_bytes: int, tmp_path: Path
) -> None:
    with closing(open_slab(tmp_path)) as storage:
        assert write_sized(storage, key(1), num_bytes)
        assert storage.stats().stored_bytes == slot_bytes
        assert (tmp_path / namespace_name("test") / f"pages-{slot_bytes}.slab").exists()


def test_a_freed_slot_is_used_again_before_the_file_grows(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path)) as storage:
        write(storage, keys(*range(6)))
        storage.delete(keys(1, 3))
        write(storage, keys(10, 11))
        (path,) = tmp_path.glob("*/pages-*.slab")
        assert path.stat().st_size == 6 * PAGE_BYTES
        write(storage, keys(12))
        assert path.stat().st_size == 7 * PAGE_BYTES
        assert read(storage, keys(10, 11, 12)) == [payload(key(n)) for n in (10, 11, 12)]


def test_the_work_of_a_call_does_not_grow_with_the_pages_there_are(tmp_path: Path) -> None:
    steps: list[int] = []  # one entry for 20 instructions of SQLite's machine
    page = memoryview(b"x")
    with closing(open_slab(tmp_path, 1500 * SMALL)) as storage:
        storage._table._db.set_progress_handler(lambda: steps.append(1) or 0, 20)
        taken = {}
        for first, last in ((0, 10), (10, 1500)):
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
                taken.setdefault(last, []).append(len(steps))
    for few, many in zip(taken[10], taken[1500], strict=True):
        assert many <= 2 * few + 10, taken


def test_space_of_deleted_pages_goes_back_to_the_file_system(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path)) as storage:
        write(storage, keys(1, 2, 3))
        assert allocated_bytes(tmp_path) == 3 * PAGE_BYTES
    with closing(open_slab(tmp_path)) as storage:  # which has not opened the file yet
        storage.delete(keys(1, 3, 9))
        assert allocated_bytes(tmp_path) == PAGE_BYTES
        assert read(storage, keys(2)) == [payload(key(2))]


def test_slots_of_a_writer_that_died_meanwhile_are_had_when_all_else_is_taken(
    tmp_path: Path,
) -> None:
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(1, 2))
        owners = {"dead": f"{'0' * 32}.1.1", "living": current_owner()}
        for who, results in (("living", [False, False]), ("dead", [True, True])):
            storage._table._db.execute(
                "UPDATE slots SET state = 1, key = NULL, owner = ?", (owners[who],)
            )
            assert write(storage, keys(3, 4)) == results
        assert storage.contains(keys(3, 4)) == [True, True]
        assert storage.stats().stored_bytes == 2 * PAGE_BYTES


def test_slots_of_a_writer_that_died_are_free_when_the_slab_is_opened(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(1, 2))
        storage._table._db.execute(
            "UPDATE slots SET state = 1, key = NULL, owner = ? WHERE key = ?",
            (f"{'0' * 32}.1.1", keys(2)[0]),
        )
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        assert allocated_bytes(tmp_path) == PAGE_BYTES
        write(storage, keys(3))
        assert storage.contains(keys(1, 3)) == [True, True]
        # a page is trusted after its digest only: nobody need wait for the disk
        assert storage._table._db.execute("PRAGMA synchronous").fetchone() == (1,)


def test_a_slot_that_the_table_cannot_find_is_an_error_and_no_endless_eviction(
    tmp_path: Path,
) -> None:
    with closing(open_slab(tmp_path)) as storage:
        write(storage, keys(1))
        with pytest.raises(sqlite3.DatabaseError, match=r"slot=7.* cannot be updated"):
            storage._table.free(Place(PAGE_BYTES, 7))
        assert storage.stats().stored_bytes == PAGE_BYTES


def test_a_page_that_is_written_twice_at_once_takes_one_slot(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        assert write(storage, keys(1, 1)) == [True, True]
        assert allocated_bytes(tmp_path) == PAGE_BYTES
        write(storage, keys(2))
        assert storage.contains(keys(1, 2)) == [True, True]


def test_a_full_disk_declines_pages_and_loses_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", no_space)
            assert write(storage, keys(1, 2)) == [False, False]
        assert write(storage, keys(3, 4)) == [True, True]


def test_a_slot_table_that_cannot_grow_declines_pages(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path)) as storage:
        storage._table._db.execute("PRAGMA max_page_count = 1")  # SQLite raises it to what it has
        results = [write(storage, keys(number))[0] for number in range(200)]
        storage._table._db.execute("PRAGMA max_page_count = 1000000")
        assert not all(results)
        assert storage.contains(keys(*range(200))) == results


def test_pages_that_fill_the_disk_before_the_table_knows_them_give_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        publish = storage._table.publish

        def full(*arguments: object, **options: object) -> list[bool]:
            if allocated_bytes(tmp_path):
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            return publish(*arguments, **options)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(storage._table, "publish", full)
            assert write(storage, keys(1, 2)) == [False, False]
        assert allocated_bytes(tmp_path) == 0
        assert storage.stats().stored_pages == 0
        assert write(storage, keys(3, 4)) == [True, True]


def test_a_slot_that_is_overwritten_at_once_is_not_given_back_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(1, 2))
        freed: list[object] = []
        monkeypatch.setattr(storage._files, "free_space", freed.append)
        assert write(storage, keys(3)) == [True]
        assert freed == []
        assert write_sized(storage, key(4), SMALL)
        assert len(freed) == 1  # of another size
        assert storage.contains([*keys(1, 2, 3), key(4)]) == [False, False, True, True]


def test_an_interrupted_write_loses_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", interrupt)
            with pytest.raises(KeyboardInterrupt):
                write(storage, keys(1, 2))
        assert write(storage, keys(3, 4)) == [True, True]


def test_a_slot_used_again_while_it_is_read_is_a_miss_but_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_slab(tmp_path, PAGE_BYTES)) as storage:
        write(storage, keys(1))
        preadv = os.preadv

        def after_another_write(*arguments: object) -> int:
            monkeypatch.setattr(os, "preadv", preadv)
            write(storage, keys(2))
            return preadv(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", after_another_write)
        assert storage.read(keys(1), [poisoned()]) == [False]
        assert storage.stats().damaged_pages == 0
        assert storage.contains(keys(2)) == [True]


def test_a_root_that_cannot_be_written_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file, not a directory")
    with pytest.raises(StorageError, match=r"cannot open the slab storage in .*root"):
        open_slab(tmp_path / "root")


def test_a_slab_is_closed_by_the_last_call_that_moves_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_slab(tmp_path)
    write(storage, keys(1))
    begun, may_go_on = Event(), Event()
    move = storage._files.write

    def slow_write(*arguments: object) -> bool:
        begun.set()
        assert may_go_on.wait(60)
        return move(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(storage._files, "write", slow_write)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(write, storage, keys(2))
        assert begun.wait(60)
        storage.close()  # as somebody does who has given the call up
        assert any("pages-" in name for name in open_files(tmp_path))
        with pytest.raises(StorageError, match="is closed"):
            storage.contains(keys(1))
        may_go_on.set()
        assert call.result(60) == [True]
    assert open_files(tmp_path) == []
    with closing(open_slab(tmp_path)) as storage:
        assert storage.contains(keys(1, 2)) == [True, True]
        storage.close()
        storage.close()


def test_closing_beside_calls_gives_them_results_or_errors_and_no_more(tmp_path: Path) -> None:
    for number in range(40):
        storage = open_slab(tmp_path, 8 * PAGE_BYTES)
        begun = Event()

        def hammer(first: int, storage: SlabStorage = storage, begun: Event = begun) -> None:
            while True:
                write(storage, keys(*range(first, first + 4)))
                read(storage, keys(*range(4)))
                begun.set()

        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(hammer, 10 * each + number) for each in range(3)]
            assert begun.wait(60)
            storage.close()
            for call in calls:
                with pytest.raises(StorageError, match="is closed"):
                    call.result(60)
