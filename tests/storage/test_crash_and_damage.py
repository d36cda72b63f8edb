"""Writers that are killed, and bytes that go wrong on the disk: pages are whole or absent."""

import os
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from storage_engines import ENGINES
from storage_pages import (
    PAGE_BYTES,
    assert_whole_or_absent,
    keys,
    payload,
    read,
    start_writer,
    write,
)

from hicache.storage.base import StorageError
from hicache.storage.engines.file import FileStorage
from hicache.storage.engines.slab import SlabStorage

KINDS = ("slab", "file")
RUN_PAGES = 4000  # more than any writer gets to write before it is killed


def writer_at(
    kind: str, root: Path, first: int, capacity_kib: int | None
) -> "subprocess.Popen[str]":
    return start_writer(kind, str(root), first, RUN_PAGES, capacity_kib=capacity_kib)


def kill_writers(
    kind: str, root: Path, times: int, rng: Random, capacity_kib: int | None = None
) -> Iterator[list[int]]:
    """After each kill, what that writer said it had stored. Writers start 40 pages apart."""
    for turn in range(times):
        with writer_at(kind, root, turn * 40, capacity_kib) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(1 + rng.randrange(60))]
            writer.kill()
            lines += writer.stdout.readlines()
        yield [int(line) for line in lines[1:]]


def survive_kills(kind: str, root: Path, times: int, seed: int) -> None:
    acknowledged: set[int] = set()
    for stored in kill_writers(kind, root, times, Random(seed)):
        acknowledged.update(stored)
        with closing(ENGINES[kind].open(str(root), "test", None)) as storage:
            assert_whole_or_absent(storage, keys(*range(times * 40 + RUN_PAGES)))
            assert all(storage.contains(keys(*acknowledged)))


def survive_kills_when_full(kind: str, root: Path, times: int, seed: int) -> None:
    capacity_pages = 16
    kills = kill_writers(kind, root, times, Random(seed), capacity_pages * PAGE_BYTES // 1024)
    for _ in kills:
        with closing(ENGINES[kind].open(str(root), "test", capacity_pages * PAGE_BYTES)) as storage:
            assert_whole_or_absent(storage, keys(*range(times * 40 + RUN_PAGES)))
            # no slot stays with the dead
            assert all(write(storage, keys(*range(10**6, 10**6 + capacity_pages))))
            storage.delete(keys(*range(10**6, 10**6 + capacity_pages)))


@pytest.mark.parametrize("kind", KINDS)
def test_killed_writers_leave_pages_whole_or_absent(kind: str, tmp_path: Path) -> None:
    survive_kills(kind, tmp_path, times=3, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_writers_killed_while_evicting_leave_pages_whole_or_absent(
    kind: str, tmp_path: Path
) -> None:
    survive_kills_when_full(kind, tmp_path, times=3, seed=2)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_kills_leave_pages_whole_or_absent(kind: str, tmp_path: Path) -> None:
    survive_kills(kind, tmp_path / "roomy", times=100, seed=3)
    survive_kills_when_full(kind, tmp_path / "full", times=100, seed=4)


def slab_bytes(root: Path) -> Path:
    (path,) = root.glob("*/pages-*.slab")
    return path


def only_page_file(root: Path) -> Path:
    (path,) = root.glob("*/*/*.page")
    return path


DAMAGED = {"slab": slab_bytes, "file": only_page_file}


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[PAGE_BYTES // 3] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: PAGE_BYTES // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_byte, cut_short, empty])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_page_is_a_miss_and_can_be_written_again(
    kind: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    with closing(ENGINES[kind].open(str(tmp_path), "test", None)) as storage:
        write(storage, keys(1))
        damage(DAMAGED[kind](tmp_path))
        assert read(storage, keys(1)) == [None]
        assert storage.stats().damaged_pages == 1
        write(storage, keys(1))
        assert read(storage, keys(1)) == [payload(keys(1)[0])]


def test_a_page_in_the_file_of_another_key_is_a_miss(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path, namespace="test", capacity_bytes=None)
    write(storage, keys(1))
    path = only_page_file(tmp_path)
    path.rename(path.parent / (keys(2)[0].hex() + ".page"))
    assert read(storage, keys(2)) == [None]


def test_a_slot_table_that_points_to_the_wrong_slot_gives_a_miss(tmp_path: Path) -> None:
    with closing(SlabStorage(tmp_path, namespace="test", capacity_bytes=None)) as storage:
        write(storage, keys(1, 2))
        (path,) = tmp_path.glob("*/slots.sqlite")
        with closing(sqlite3.connect(path)) as table, table:
            table.execute("UPDATE slots SET key = x'00' WHERE key = ?", keys(1))
            table.execute("UPDATE slots SET key = ? WHERE key = ?", (*keys(1), *keys(2)))
        assert read(storage, keys(1)) == [None]


def test_a_slab_whose_table_is_not_one_is_refused(tmp_path: Path) -> None:
    SlabStorage(tmp_path, namespace="test", capacity_bytes=None).close()
    (path,) = tmp_path.glob("*/slots.sqlite")
    path.write_bytes(b"not a table" * 1000)
    with pytest.raises(StorageError, match=r"cannot open the slab storage in .*not a database"):
        SlabStorage(tmp_path, namespace="test", capacity_bytes=None)


DRAFT = "0123456789abcdef" * 2


# an earlier version put the process before a dot
@pytest.mark.parametrize("name", [DRAFT, f"{'0' * 32}.1.2.{DRAFT}"])
@pytest.mark.parametrize(("age_s", "is_swept"), [(3660, True), (3540, False)])
def test_drafts_are_swept_when_no_writer_can_need_them(
    age_s: float, name: str, *, is_swept: bool, tmp_path: Path
) -> None:
    FileStorage(tmp_path, namespace="test", capacity_bytes=None).close()
    (writing,) = tmp_path.glob("*/writing")
    draft = writing / name
    draft.touch()
    then = time.time() - age_s
    os.utime(draft, (then, then))
    FileStorage(tmp_path, namespace="test", capacity_bytes=None).close()
    assert draft.exists() != is_swept


def test_pages_written_and_published_apart_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the digest is what makes a reader safe: without it the damage below is served
    monkeypatch.setattr("hicache.storage.engines.file.page_digest", lambda *_: b"\0" * 16)
    storage = FileStorage(tmp_path, namespace="test", capacity_bytes=None)
    write(storage, keys(1))
    flip_byte(only_page_file(tmp_path))
    with pytest.raises(AssertionError, match="wrong bytes"):
        assert_whole_or_absent(storage, keys(1))
