"""The file engine: ages by modification time, and one capacity for several processes."""

import errno
import os
from pathlib import Path

import pytest
from storage_engines import before_each, failing

from hicache.storage.base import StorageError
from hicache.storage.contract import key, keys, payload, poisoned
from hicache.storage.engines.file import FileStorage

PAGE = 64  # bytes: small, because these tests do not depend on it


def open_store(root: Path, capacity_pages: int | None = None) -> FileStorage:
    capacity_bytes = None if capacity_pages is None else capacity_pages * PAGE
    return FileStorage(root, namespace="test", capacity_bytes=capacity_bytes)


def put(storage: FileStorage, *numbers: int) -> list[bool]:
    return storage.write(keys(*numbers), [payload(key(number), PAGE) for number in numbers])


def get(storage: FileStorage, *numbers: int) -> list[bool]:
    return storage.read(keys(*numbers), [poisoned(PAGE) for _ in numbers])


def path_of(root: Path, number: int) -> Path:
    (path,) = root.glob(f"*/*/{key(number).hex()}.page")
    return path


def set_age(root: Path, number: int, second: int) -> None:
    os.utime(path_of(root, number), (second, second))


def test_a_page_lies_in_the_directory_of_the_first_byte_of_its_key(tmp_path):
    every = [bytes([first]) + key(1)[1:] for first in (0, 9, 10, 255)]
    assert all(open_store(tmp_path).write(every, [payload(each, PAGE) for each in every]))
    (namespace,) = tmp_path.iterdir()
    assert {str(path.relative_to(namespace)) for path in namespace.glob("*/*")} == {
        f"{each.hex()[:2]}/{each.hex()}.page" for each in every
    }


def test_the_file_modified_longest_ago_is_evicted_first(tmp_path):
    put(open_store(tmp_path), 1, 2, 3)
    for number, second in ((1, 200), (2, 100), (3, 300)):
        set_age(tmp_path, number, second)
    storage = open_store(tmp_path, 3)
    assert put(storage, 4) == [True]
    assert storage.contains(keys(1, 2, 3, 4)) == [True, False, True, True]
    assert put(storage, 5) == [True]
    assert storage.contains(keys(1, 2, 3, 4, 5)) == [False, False, True, True, True]


@pytest.mark.parametrize("use", [get, put])
def test_a_read_or_write_makes_a_page_young_for_all_processes(use, tmp_path):
    put(open_store(tmp_path), 1, 2)
    set_age(tmp_path, 1, 100)
    set_age(tmp_path, 2, 200)
    storage, other = open_store(tmp_path, 2), open_store(tmp_path, 2)
    assert use(storage, 1) == [True]
    assert path_of(tmp_path, 1).stat().st_mtime > 200
    other.stats()  # scans the directory
    put(other, 3)
    assert other.contains(keys(1, 2, 3)) == [True, False, True]
    put(storage, 4)
    assert storage.contains(keys(1)) == [True]


@pytest.mark.parametrize("use", [get, put])
def test_without_a_capacity_reads_and_writes_keep_the_modification_time(use, tmp_path):
    storage = open_store(tmp_path)
    put(storage, 1)
    set_age(tmp_path, 1, 100)
    assert use(storage, 1) == [True]
    assert path_of(tmp_path, 1).stat().st_mtime == 100


def test_pages_of_one_modification_time_are_evicted_in_the_order_of_use(tmp_path):
    storage = open_store(tmp_path, 3)
    put(storage, 3, 1, 2)
    get(storage, 3)
    for number in (1, 2, 3):
        set_age(tmp_path, number, 100)
    storage.stats()
    put(storage, 4)
    assert storage.contains(keys(1, 2, 3, 4)) == [False, True, True, True]


def test_the_directory_is_scanned_after_writes_of_a_twentieth_of_the_capacity(tmp_path):
    storage = open_store(tmp_path, 40)
    scan, scans, num_scans = storage._scan, [], []
    storage._scan = lambda: scans.append(1) or scan()
    for number in range(8):
        put(storage, number)
        num_scans.append(len(scans))
    assert num_scans == [0, 0, 0, 1, 1, 1, 2, 2]


def test_two_processes_exceed_the_capacity_by_a_twentieth_each(tmp_path):
    one, other = open_store(tmp_path, 40), open_store(tmp_path, 40)
    for turn in range(45):
        put(one, 1000 + turn)
        put(other, 2000 + turn)
    assert 40 <= len(list(tmp_path.glob("*/*/*.page"))) <= 40 + 2 * 3


def test_a_cut_page_counts_no_bytes_and_is_removed_when_it_is_read(tmp_path):
    storage = open_store(tmp_path, 2)
    put(storage, 1)
    path_of(tmp_path, 1).write_bytes(b"abc")
    stats = storage.stats()
    assert (stats.stored_pages, stats.stored_bytes) == (1, 0)
    assert get(storage, 1) == [False]
    stats = storage.stats()
    assert (stats.stored_pages, stats.stored_bytes, stats.damaged_pages) == (0, 0, 1)


def test_a_page_without_bytes_is_read(tmp_path):
    storage = open_store(tmp_path)
    storage.write(keys(1), [memoryview(b"")])
    assert storage.read(keys(1), [poisoned(0)]) == [True]
    assert get(storage, 1) == [False]
    assert storage.stats().damaged_pages == 0


def test_deleting_missing_pages_frees_no_capacity(tmp_path):
    storage = open_store(tmp_path, 2)
    put(storage, 1, 2)
    storage.delete(keys(*range(100, 100 + PAGE)))
    put(storage, 3)
    assert storage.contains(keys(1, 2, 3)) == [False, True, True]


def test_a_file_that_may_not_be_read_is_an_error(tmp_path):
    storage = open_store(tmp_path)
    put(storage, 1)
    with failing("preadv", errno.EACCES), pytest.raises(StorageError, match="Permission denied"):
        get(storage, 1)


@pytest.mark.parametrize(("number", "is_written"), [(1, True), (2, False)])
def test_a_page_that_is_being_written_counts_toward_the_capacity(number, is_written, tmp_path):
    storage = open_store(tmp_path, 2 if is_written else 1)
    with before_each("pwritev", lambda *_: put(storage, number)):
        assert put(storage, 1) == [True]
    assert storage._used_bytes == storage.stats().stored_bytes == PAGE
    assert storage.contains(keys(2)) == [False]
    assert put(storage, 3) == [True]


def test_a_page_deleted_by_another_process_is_written_again(tmp_path):
    storage, other = open_store(tmp_path, 4), open_store(tmp_path, 4)
    put(storage, 1)
    other.delete(keys(1))
    assert get(storage, 1) == [False]
    assert put(storage, 1) == [True]
    assert get(other, 1) == [True]


def test_no_call_leaves_a_file_open(tmp_path):
    before = sorted(Path("/proc/self/fd").iterdir())
    storage = open_store(tmp_path, 2)
    put(storage, 1, 2, 3)
    storage.write(keys(9), [poisoned(3 * PAGE)])  # too large
    path_of(tmp_path, 3).unlink()
    (path_of(tmp_path, 2).parent / f"{key(3).hex()}.page").hardlink_to(path_of(tmp_path, 2))
    get(storage, 1, 2, 3, 4)
    put(storage, 3)
    storage.delete(keys(1, 2, 3))
    storage.stats()
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_page_larger_than_the_capacity_is_not_written_and_evicts_nothing(tmp_path):
    storage = open_store(tmp_path, 2)
    put(storage, 1, 2)
    assert storage.write(keys(3), [memoryview(bytes(3 * PAGE))]) == [False]
    assert storage.contains(keys(1, 2, 3)) == [True, True, False]
