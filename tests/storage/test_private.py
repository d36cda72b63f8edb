"""Storage directories: private, without links, and on full or read-only disks."""

import errno
import fcntl
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from hicache.storage.base import StorageError
from hicache.storage.engines import slab
from hicache.storage.engines.file import FileStorage
from hicache.storage.engines.slab import SlabStorage
from hicache.storage.engines.slot_table import SlotTable

KEY = b"\x07" * 17
PAGE = memoryview(bytearray(b"p" * 4096))
HOURS_S = 2 * 3600.0


def opened(kind: type, root: Path) -> SlabStorage | FileStorage:
    storage: SlabStorage | FileStorage = kind(root / "store", namespace="a", capacity_bytes=None)
    return storage


def stored(kind: type, root: Path) -> Path:
    """The directory of a namespace that holds one page."""
    with closing(opened(kind, root)) as storage:
        assert storage.write([KEY], [PAGE]) == [True]
    (directory,) = (root / "store").iterdir()
    return directory


def read_page(storage: SlabStorage | FileStorage) -> bool:
    buffer = memoryview(bytearray(4096))
    (is_hit,) = storage.read([KEY], [buffer])
    assert not is_hit or buffer == PAGE
    return is_hit


@pytest.mark.parametrize("kind", [SlabStorage, FileStorage])
def test_only_the_owner_can_read_what_is_stored(kind: type, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with closing(opened(kind, tmp_path)) as storage:
            storage.write([KEY], [PAGE])
            paths = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
            modes = {path.is_dir(): set() for path in paths}
            for path in paths:
                modes[path.is_dir()].add(path.stat().st_mode & 0o777)
    finally:
        os.umask(old)
    assert modes == {True: {0o700}, False: {0o600}}


@pytest.mark.parametrize("kind", [SlabStorage, FileStorage])
def test_a_link_in_the_place_of_pages_leads_nowhere(kind: type, tmp_path: Path) -> None:
    directory = stored(kind, tmp_path)
    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * 9000)
    (page,) = [*directory.glob("*.slab"), *directory.glob("*/*.page")]
    page.unlink()
    page.symlink_to(victim)
    with closing(opened(kind, tmp_path)) as storage:
        assert not read_page(storage)
        storage.write([KEY], [PAGE])
        storage.delete([KEY])
    assert victim.read_bytes() == b"v" * 9000


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (SlabStorage, "slots.sqlite"),
        (SlabStorage, "slots.sqlite-wal"),
        (SlabStorage, "opening"),
        (SlabStorage, ""),
        (FileStorage, ""),
        (FileStorage, "writing"),
        (FileStorage, "07"),
    ],
)
def test_a_link_in_the_place_of_a_table_or_directory_is_refused(
    kind: type, name: str, tmp_path: Path
) -> None:
    place = stored(kind, tmp_path) / name
    if place.exists():
        place.rename(tmp_path / "victim")
    place.symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError, match=r"symbolic link"):
        opened(kind, tmp_path)


def test_a_draft_is_removed_only_after_its_writer_died(tmp_path: Path) -> None:
    directory = stored(FileStorage, tmp_path)
    draft = directory / "writing" / ("0" * 32)
    with draft.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        ahead = time.time() - HOURS_S  # for a reader whose clock is two hours ahead
        os.utime(draft, (ahead, ahead))
        opened(FileStorage, tmp_path).close()
        assert draft.exists()
    opened(FileStorage, tmp_path).close()
    assert not draft.exists()


def test_a_draft_is_locked_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = stored(FileStorage, tmp_path)
    write = os.pwritev
    seen = []

    def watched(file: int, buffers: list[memoryview], place: int) -> int:
        (draft,) = (directory / "writing").iterdir()
        with draft.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(draft)
        return write(file, buffers, place)

    monkeypatch.setattr(os, "pwritev", watched)
    with closing(opened(FileStorage, tmp_path)) as storage:
        storage.write([b"\x08" * 17], [PAGE])
    assert seen


def test_the_log_of_a_slab_stays_short(tmp_path: Path) -> None:
    with closing(opened(SlabStorage, tmp_path)) as storage:
        for number in range(300):
            storage.write([number.to_bytes(17, "little")], [PAGE])
        (log,) = tmp_path.rglob("*-wal")
        assert log.stat().st_size < 1 << 20


def test_a_slab_takes_pages_again_once_its_log_has_left_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, shrink = SlotTable.reserve, SlotTable.shrink_log
    shrunk = []

    def full_until_shrunk(table: SlotTable, wanted: object) -> object:
        if not shrunk:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return reserve(table, wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotTable, "reserve", full_until_shrunk)
    monkeypatch.setattr(SlotTable, "shrink_log", lambda self: (shrunk.append(1), shrink(self)))
    with closing(opened(SlabStorage, tmp_path)) as storage:
        assert storage.write([KEY], [PAGE]) == [True]
        assert read_page(storage)
    assert shrunk == [1]


def test_a_slab_on_a_read_only_disk_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = stored(SlabStorage, tmp_path)
    before = {path: path.read_bytes() for path in directory.iterdir()}

    def refused(path: Path, flags: int) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(slab, "open_file", refused)
    with closing(opened(SlabStorage, tmp_path)) as storage:
        assert storage.contains([KEY]) == [True]
        assert read_page(storage)
        with pytest.raises(StorageError, match="readonly database"):
            storage.write([b"\x08" * 17], [PAGE])
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
