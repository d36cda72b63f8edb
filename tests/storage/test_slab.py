"""What only the slab promises: slots, sharing of one capacity between sizes, recency."""

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
from storage_pages import PAGE_BYTES, key, keys, payload, poisoned, read, write

from hicache.storage.base import StorageError
from hicache.storage.slab import Eviction, SlabStorage

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


def test_fifo_is_not_refreshed(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 2 * PAGE_BYTES, eviction=Eviction.fifo)) as storage:
        write(storage, keys(1, 2))
        read(storage, keys(1))
        write(storage, keys(1))
        write(storage, keys(3))
        assert storage.contains(keys(1, 2, 3)) == [False, True, True]


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


def test_stand_ins_are_charged_the_size_of_their_component(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, 6 * LARGE, page_bytes={0: SMALL, 2: LARGE})) as storage:
        for number in range(3):
            write_sized(storage, key(number), 16)
            write_sized(storage, key(number, 2), 16)
        assert storage.stats().stored_bytes == 3 * (SMALL + LARGE)


def test_a_page_larger_than_its_component_is_refused(tmp_path: Path) -> None:
    with (
        closing(open_slab(tmp_path, page_bytes={0: SMALL})) as storage,
        pytest.raises(ValueError, match=f"at most {SMALL} bytes, got {LARGE}"),
    ):
        write_sized(storage, key(1), LARGE)


def test_direct_transfers_fill_aligned_and_other_buffers(tmp_path: Path) -> None:
    with closing(open_slab(tmp_path, direct=True)) as storage:
        arena = memoryview(bytearray(2 * PAGE_BYTES + 4096))
        write(storage, keys(1))
        for start in range(4):  # one of these addresses at most is aligned
            buffer = arena[start * 1024 + 1 :][:PAGE_BYTES]
            assert storage.read(keys(1), [buffer]) == [True]
            assert buffer == payload(key(1))


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
    def full(*_: object, **__: object) -> list[bool]:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        monkeypatch.undo()
        raise error

    with closing(open_slab(tmp_path, 2 * PAGE_BYTES)) as storage:
        monkeypatch.setattr(storage._table, "publish", full)
        assert write(storage, keys(1, 2)) == [False, False]
        assert allocated_bytes(tmp_path) == 0
        assert storage.stats().written_bytes == 0
        assert write(storage, keys(3, 4)) == [True, True]


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
    with pytest.raises(StorageError, match=r"cannot open a slab in .*root"):
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
