"""Damaged files of a store: a miss or a `StorageError`, never a wrong byte, and never a hang."""

import errno
import fcntl
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest
from storage_engines import DISKS, failing, opened

from hicache.storage.base import Storage, StorageError
from hicache.storage.contract import PAGE_BYTES, keys, num_whole, payload, poisoned, read, write
from hicache.storage.digest import namespace_name
from hicache.storage.engines.slab import SlabStorage
from hicache.storage.guards.deadline import DeadlineThreads

HANGS_S = 120.0


def use(storage: Storage) -> None:
    """Call every method, often enough to evict; ignore `StorageError`."""
    some = keys(*range(12))
    for call in (
        lambda: storage.contains(some),
        lambda: num_whole(storage, some),
        lambda: storage.read(some, [poisoned(PAGE_BYTES // 2) for _ in some]),
        lambda: storage.read(some, [poisoned(2 * PAGE_BYTES) for _ in some]),
        lambda: [write(storage, [page_key]) for page_key in some],
        lambda: write(storage, some),
        lambda: num_whole(storage, some),
        lambda: storage.stats(),
        lambda: storage.delete(some[:3]),
        lambda: num_whole(storage, some),
    ):
        with suppress(StorageError):
            call()


def in_time(call: Callable[[], None]) -> None:
    threads = DeadlineThreads(num_threads=1, deadline_s=HANGS_S)
    threads.call(call)
    threads.close()


def change_table(root: Path, statement: str, *values: object) -> None:
    path = root / namespace_name("test") / "slots.sqlite"
    with closing(sqlite3.connect(path)) as table, table:
        table.execute(statement, values)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:5] + bytes([content[5] ^ 1]) + content[6:],
        lambda content: content[: PAGE_BYTES // 2],
        lambda content: b"",
    ],
    ids=["flipped bit", "cut", "empty"],
)
@pytest.mark.parametrize("kind", DISKS)
def test_a_damaged_page_is_a_miss_and_can_be_written_again(kind, damage, tmp_path):
    with opened(kind, tmp_path) as storage:
        write(storage, keys(1))
        (path,) = [*tmp_path.glob("*/pages-*.slab"), *tmp_path.glob("*/*/*.page")]
        path.write_bytes(damage(path.read_bytes()))
        assert read(storage, keys(1)) == [None]
        assert storage.stats().damaged_pages == 1
        write(storage, keys(1))
        assert read(storage, keys(1)) == [payload(keys(1)[0])]


@pytest.mark.parametrize("kind", DISKS)
def test_a_page_on_a_bad_sector_is_a_miss_and_can_be_written_again(kind, tmp_path):
    with opened(kind, tmp_path) as storage:
        write(storage, keys(1))
        with failing("preadv", errno.EIO):
            assert read(storage, keys(1)) == [None]
        assert storage.contains(keys(1)) == [kind == "file"]  # a slab frees the slot
        assert storage.stats().damaged_pages == (kind == "slab")
        write(storage, keys(1))
        assert read(storage, keys(1)) == [payload(keys(1)[0])]


def test_a_page_in_the_file_of_another_key_is_a_miss(tmp_path):
    with opened("file", tmp_path) as storage:
        write(storage, keys(1))
        (path,) = tmp_path.glob("*/*/*.page")
        path.rename(path.with_stem(keys(2)[0].hex()))
        assert read(storage, keys(2)) == [None]


def test_a_table_that_names_the_slot_of_another_page_gives_a_miss(tmp_path):
    with opened("slab", tmp_path) as storage:
        write(storage, keys(1, 2))
        change_table(tmp_path, "UPDATE slots SET key = x'00' WHERE key = ?", *keys(1))
        change_table(tmp_path, "UPDATE slots SET key = ? WHERE key = ?", *keys(1), *keys(2))
        assert read(storage, keys(1)) == [None]


def test_a_table_with_a_wrong_length_gives_a_miss(tmp_path):
    with opened("slab", tmp_path) as storage:
        write(storage, keys(1))
        change_table(tmp_path, "UPDATE slots SET length = length - 1")
        assert read(storage, keys(1)) == [None]
        assert storage.stats().damaged_pages == 1
        assert write(storage, keys(1)) == [True]
        assert read(storage, keys(1)) == [payload(keys(1)[0])]


def test_a_slab_whose_table_is_not_a_database_is_refused(tmp_path):
    with opened("slab", tmp_path):
        pass
    (path,) = tmp_path.glob("*/slots.sqlite")
    path.write_bytes(b"not a table" * 1000)
    with pytest.raises(StorageError, match=r"cannot open the slab storage in .*not a database"):
        opened("slab", tmp_path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *[("slot_bytes", value) for value in (-4096, 2**63 - 1, "q")],
        *[("slot", value) for value in (-3, 2**50, 0.5, "z")],
        *[("tick", value) for value in (2**63 - 1, "later")],
        *[("key", value) for value in (None, "text")],
        *[("length", value) for value in (None, -5, 2**40, "x")],
        *[("digest", value) for value in (None, b"")],
    ],
)
def test_a_table_with_invalid_values_gives_misses_or_errors(column, value, tmp_path):
    def use_damaged() -> None:
        with suppress(StorageError), opened("slab", tmp_path, 8 * PAGE_BYTES) as storage:
            write(storage, keys(0, 1))
            change_table(tmp_path, f"UPDATE slots SET {column} = ? WHERE key = ?", value, *keys(1))
            use(storage)
        with suppress(StorageError), opened("slab", tmp_path, 8 * PAGE_BYTES) as storage:
            use(storage)

    in_time(use_damaged)


def test_a_slab_that_another_process_is_opening_for_too_long_is_an_error(tmp_path):
    with opened("slab", tmp_path):
        pass
    with (tmp_path / namespace_name("test") / "opening").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"for more than 0\.02 s"):
            SlabStorage(tmp_path, namespace="test", capacity_bytes=None, busy_s=0.02)
    with opened("slab", tmp_path):
        pass


def damage(path: Path, rng: Random, *, may_cut: bool) -> None:
    content = bytearray(path.read_bytes())
    if may_cut and rng.random() < 0.2:
        os.truncate(path, rng.randrange(len(content) + 1))
        return
    for _ in range(rng.choice([1, 4, 64]) if content else 0):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def survive_damage(kind: str, base: Path, times: int, rng: Random) -> None:
    """Damage stores at random, some of them while they are open, and use them."""
    found, some = 0, keys(*range(40))
    for turn in range(times):
        root = base / str(turn)
        with opened(kind, root, 64 * PAGE_BYTES) as storage:
            write(storage, some)
            is_open = rng.random() < 0.3
            if not is_open:
                storage.close()
            files = [path for path in sorted(root.rglob("*")) if path.is_file()]
            for _ in range(rng.choice([1, 1, 3])):
                path = rng.choice([path for path in files if path.suffix != ".slab"] * 2 + files)
                if not path.name.endswith("-shm"):  # SQLite maps this file
                    damage(path, rng, may_cut=not is_open)
            if is_open:
                with suppress(StorageError):
                    found += num_whole(storage, some)
                use(storage)
        for _ in range(2):
            with suppress(StorageError), opened(kind, root, 64 * PAGE_BYTES) as storage:
                found += num_whole(storage, some)
                use(storage)
    assert found > 0


@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("times", [6, pytest.param(2000, marks=pytest.mark.soak)])
def test_random_damage_gives_misses_or_errors(times, kind, tmp_path):
    in_time(lambda: survive_damage(kind, tmp_path, times, Random(1)))
