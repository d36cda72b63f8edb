"""Storage directories: private, without links, and without drafts of dead writers."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest
from storage_engines import DISKS, before_each, failing, opened

from hicache.storage.base import StorageError
from hicache.storage.contract import keys, payload, read, write
from hicache.storage.digest import namespace_name

KEY = keys(7)
PAGES = [payload(KEY[0])]
DRAFT = "0123456789abcdef" * 2


def stored(kind: str, root: Path) -> Path:
    """Store one page below `root`; return the directory of its namespace."""
    with opened(kind, root) as storage:
        assert write(storage, KEY) == [True]
    return root / namespace_name("test")


@pytest.mark.parametrize("kind", DISKS)
def test_only_the_owner_may_enter_directories_and_read_files(kind, tmp_path):
    old = os.umask(0)
    try:
        stored(kind, tmp_path / "root")
        modes = {
            (path.is_dir(), path.stat().st_mode & 0o777)
            for path in [tmp_path / "root", *(tmp_path / "root").rglob("*")]
        }
    finally:
        os.umask(old)
    assert modes == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize("kind", DISKS)
def test_a_root_that_is_a_link_is_followed(kind, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    stored(kind, tmp_path / "root")
    with opened(kind, tmp_path / "disk") as storage:
        assert read(storage, KEY) == PAGES


@pytest.mark.parametrize("kind", DISKS)
def test_a_link_in_place_of_a_page_is_not_followed(kind, tmp_path):
    directory = stored(kind, tmp_path / "root")
    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * 9000)
    (page,) = [*directory.glob("*.slab"), *directory.glob("*/*.page")]
    page.unlink()
    page.symlink_to(victim)
    with opened(kind, tmp_path / "root") as storage:
        assert read(storage, KEY) == [None]
        assert write(storage, KEY) == [kind == "file"]  # which removes the link
        assert read(storage, KEY) == (PAGES if kind == "file" else [None])
        storage.delete(KEY)
    assert victim.read_bytes() == b"v" * 9000


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[("slab", name) for name in ("slots.sqlite", "slots.sqlite-wal", "opening", "")],
        *[("file", name) for name in ("", "writing", "07")],
    ],
)
def test_a_link_in_place_of_a_table_or_directory_is_refused(kind, name, tmp_path):
    place = stored(kind, tmp_path / "root") / name
    if place.exists():
        place.rename(tmp_path / "victim")
    place.symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError, match=r"symbolic link"):
        opened(kind, tmp_path / "root")


@pytest.mark.parametrize(
    ("name", "age_s", "is_locked", "is_swept"),
    [
        (DRAFT, 3660, False, True),
        (DRAFT, 3540, False, False),
        (DRAFT, 2 * 3600, True, False),  # its writer lives, and its clock is behind
        (f"{'0' * 32}.1.2.{DRAFT}", 3660, False, True),  # of an earlier version
    ],
)
def test_old_drafts_of_dead_writers_are_removed(name, age_s, is_locked, is_swept, tmp_path):
    draft = stored("file", tmp_path) / "writing" / name
    with draft.open("wb") as writer:
        if is_locked:
            fcntl.flock(writer, fcntl.LOCK_EX)
        os.utime(draft, (time.time() - age_s,) * 2)
        with opened("file", tmp_path):
            pass
        assert draft.exists() != is_swept


def test_a_draft_is_locked_while_it_is_written(tmp_path):
    directory = stored("file", tmp_path)
    seen = []

    def try_to_lock(*_: object) -> None:
        (draft,) = (directory / "writing").iterdir()
        with draft.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(draft)

    with before_each("pwritev", try_to_lock), opened("file", tmp_path) as storage:
        write(storage, keys(8))
    assert seen


def test_a_slab_on_a_read_only_disk_is_read(tmp_path):
    directory = stored("slab", tmp_path)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with failing("open", errno.EROFS), opened("slab", tmp_path) as storage:
        assert storage.contains(KEY) == [True]
        assert read(storage, KEY) == PAGES
        with pytest.raises(StorageError, match="readonly database"):
            write(storage, keys(8))
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_foreign_files_are_left_alone(tmp_path):
    root = stored("file", tmp_path)
    name = keys(1)[0].hex()
    foreign = [
        root / each
        for each in (
            "writing/notes.txt",
            "writing/notes.1.2.3",
            f"writing/{'0' * 32}.².3.0",
            "00/notes.page",
            f"00/{name.replace('0', 'A')}.page",
            f"01/{name}.page",
            f"00/{name[:-2]}.page",
            f"00/{name}",
            "notes.txt",
        )
    ]
    for path in foreign:
        path.write_bytes(b"theirs")
        os.utime(path, (1, 1))
    with opened("file", tmp_path, 2 * len(PAGES[0])) as storage:
        assert all(write(storage, keys(number)) == [True] for number in range(6))
        assert storage.stats().stored_pages == 2
    for path in foreign:
        assert (path.read_bytes(), path.stat().st_mtime) == (b"theirs", 1), path
