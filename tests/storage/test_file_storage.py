"""What only the file engine promises: times of change that tell ages, and a bound kept by many."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from storage_pages import PAGE_BYTES, key, keys, payload, poisoned, read, write

from hicache.storage.base import StorageError
from hicache.storage.engines.file import FileStorage

PAGE = 64  # bytes: what is asked here does not depend on it


def open_files_store(root: Path, capacity_pages: int | None = None) -> FileStorage:
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


def test_pages_lie_in_directories_by_the_first_byte_of_their_keys(tmp_path: Path) -> None:
    every = [bytes([first]) + key(1)[1:] for first in range(256)]
    storage = open_files_store(tmp_path)
    assert all(storage.write(every, [payload(each, PAGE) for each in every]))
    (namespace,) = tmp_path.iterdir()
    wanted = {each.hex()[:2]: [f"{each.hex()}.page"] for each in every}
    found = {each.name: [page.name for page in each.iterdir()] for each in namespace.iterdir()}
    assert found == {**wanted, "writing": []}


def test_the_file_changed_longest_ago_leaves_first(tmp_path: Path) -> None:
    put(open_files_store(tmp_path), 1, 2, 3)
    for number, second in ((1, 200), (2, 100), (3, 300)):
        set_age(tmp_path, number, second)
    storage = open_files_store(tmp_path, 3)
    assert put(storage, 4) == [True]
    assert storage.contains(keys(1, 2, 3, 4)) == [True, False, True, True]
    assert put(storage, 5) == [True]
    assert storage.contains(keys(1, 2, 3, 4, 5)) == [False, False, True, True, True]


@pytest.mark.parametrize("use", [get, put])
def test_what_is_used_stays_young_for_all_processes(
    use: Callable[[FileStorage, int], list[bool]], tmp_path: Path
) -> None:
    put(open_files_store(tmp_path), 1, 2)
    set_age(tmp_path, 1, 100)
    set_age(tmp_path, 2, 200)
    storage, other = open_files_store(tmp_path, 2), open_files_store(tmp_path, 2)
    assert use(storage, 1) == [True]
    assert path_of(tmp_path, 1).stat().st_mtime > 200
    other.stats()  # looks at the directory
    put(other, 3)
    assert other.contains(keys(1, 2, 3)) == [True, False, True]
    put(storage, 4)
    assert storage.contains(keys(1)) == [True]


@pytest.mark.parametrize("use", [get, put])
def test_without_a_capacity_nothing_is_touched(
    use: Callable[[FileStorage, int], list[bool]], tmp_path: Path
) -> None:
    storage = open_files_store(tmp_path)
    put(storage, 1)
    set_age(tmp_path, 1, 100)
    assert use(storage, 1) == [True]
    assert path_of(tmp_path, 1).stat().st_mtime == 100


def test_pages_of_one_moment_leave_in_the_order_of_their_use(tmp_path: Path) -> None:
    storage = open_files_store(tmp_path, 3)
    put(storage, 3, 1, 2)
    get(storage, 3)
    for number in (1, 2, 3):
        set_age(tmp_path, number, 100)
    storage.stats()
    put(storage, 4)
    assert storage.contains(keys(1, 2, 3, 4)) == [False, True, True, True]


def test_the_directory_is_looked_at_after_a_twentieth_of_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_files_store(tmp_path, 40)
    scans = []
    scan = storage._scan
    monkeypatch.setattr(storage, "_scan", lambda: scans.append(1) or scan())
    numbers = iter(range(100))
    looked = []
    for _ in range(8):
        put(storage, next(numbers))
        looked.append(len(scans))
    assert looked == [0, 0, 0, 1, 1, 1, 2, 2]


def test_two_processes_exceed_the_bound_by_a_twentieth_each(tmp_path: Path) -> None:
    one, other = open_files_store(tmp_path, 40), open_files_store(tmp_path, 40)
    for turn in range(60):
        put(one, 1000 + turn)
        put(other, 2000 + turn)
    assert 40 <= len(list(tmp_path.glob("*/*/*.page"))) <= 40 + 2 * 3


def test_a_stump_is_a_page_of_no_bytes_until_it_is_read(tmp_path: Path) -> None:
    storage = open_files_store(tmp_path, 2)
    put(storage, 1)
    path_of(tmp_path, 1).write_bytes(b"abc")
    stats = storage.stats()
    assert (stats.stored_pages, stats.stored_bytes) == (1, 0)
    assert get(storage, 1) == [False]
    stats = storage.stats()
    assert (stats.stored_pages, stats.stored_bytes, stats.damaged_pages) == (0, 0, 1)


def test_forgetting_what_is_not_there_makes_no_room(tmp_path: Path) -> None:
    storage = open_files_store(tmp_path, 2)
    put(storage, 1, 2)
    storage.delete(keys(*range(100, 100 + PAGE)))
    put(storage, 3)
    assert storage.contains(keys(1, 2, 3)) == [False, True, True]


def test_a_page_as_large_as_the_capacity_fits(tmp_path: Path) -> None:
    storage = open_files_store(tmp_path, 1)
    assert put(storage, 1, 2) == [True, True]
    assert storage.contains(keys(1, 2)) == [False, True]


@pytest.mark.parametrize("most", [1, 7, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 15])
def test_transfers_that_come_in_pieces_are_put_together(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = 100 if most < 100 else PAGE_BYTES
    preadv, pwritev = os.preadv, os.pwritev

    def first_of(parts: list[memoryview]) -> list[memoryview]:
        rest, some = most, []
        for part in parts:
            some.append(part[:rest])
            rest -= min(len(part), rest)
        return some

    monkeypatch.setattr(os, "preadv", lambda file, parts, at: preadv(file, first_of(parts), at))
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: pwritev(file, first_of(parts), at))
    storage = open_files_store(tmp_path)
    page = payload(key(1), num_bytes)
    assert storage.write(keys(1), [page]) == [True]
    assert path_of(tmp_path, 1).stat().st_size == num_bytes + 16
    buffer = poisoned(num_bytes)
    assert storage.read(keys(1), [buffer]) == [True]
    assert buffer == page


def test_a_page_on_a_bad_sector_is_a_miss_and_other_faults_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_files_store(tmp_path)
    put(storage, 1)
    for code, message in ((errno.EIO, None), (errno.EACCES, "Permission denied")):

        def fail(*_: object, code: int = code) -> int:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            if message is None:
                assert get(storage, 1) == [False]
            else:
                with pytest.raises(StorageError, match=message):
                    get(storage, 1)
    assert get(storage, 1) == [True]
    assert storage.stats().damaged_pages == 0


def test_pages_that_are_being_written_take_room_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_files_store(tmp_path, 1)
    pwritev = os.pwritev
    meanwhile: list[list[bool]] = []

    def write_another(*arguments: object) -> int:
        monkeypatch.setattr(os, "pwritev", pwritev)
        meanwhile.append(put(storage, 2))
        assert storage.stats().stored_bytes == PAGE
        return pwritev(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", write_another)
    assert put(storage, 1) == [True]
    assert meanwhile == [[False]]
    assert storage.stats().stored_bytes == PAGE
    assert put(storage, 3) == [True]


def test_a_page_that_is_written_twice_at_once_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_files_store(tmp_path, 4)
    pwritev = os.pwritev

    def write_the_same(*arguments: object) -> int:
        monkeypatch.setattr(os, "pwritev", pwritev)
        assert put(storage, 1) == [True]
        return pwritev(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", write_the_same)
    assert put(storage, 1) == [True]
    assert storage._used_bytes == PAGE
    assert storage.stats().stored_bytes == PAGE


def test_a_page_evicted_by_another_process_is_written_again(tmp_path: Path) -> None:
    storage, other = open_files_store(tmp_path, 4), open_files_store(tmp_path, 4)
    put(storage, 1)
    other.delete(keys(1))
    assert get(storage, 1) == [False]
    assert put(storage, 1) == [True]
    assert get(other, 1) == [True]


def test_no_call_leaves_a_file_open(tmp_path: Path) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    storage = open_files_store(tmp_path, 2)
    put(storage, 1, 2, 3)
    read(storage, keys(1, 2, 3))
    write(storage, keys(9))  # too large
    path_of(tmp_path, 3).unlink()
    (path_of(tmp_path, 2).parent / f"{key(3).hex()}.page").hardlink_to(path_of(tmp_path, 2))
    get(storage, 1, 2, 3, 4)
    put(storage, 3)
    storage.delete(keys(1, 2, 3))
    storage.stats()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
