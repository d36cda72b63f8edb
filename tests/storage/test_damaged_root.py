"""Damaged roots and full disks: a miss or a `StorageError`, never a wrong byte."""

import errno
import fcntl
import os
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from storage_engines import ENGINES
from storage_pages import (
    PAGE_BYTES,
    assert_whole_or_absent,
    keys,
    payload,
    poisoned,
    read,
    start_writer,
    write,
)

from hicache.storage.base import Storage, StorageError
from hicache.storage.digest import namespace_name
from hicache.storage.engines.file import FileStorage
from hicache.storage.engines.slab import SlabStorage
from hicache.storage.guards.deadline import DeadlineThreads

KINDS = ("slab", "file")
HANGS_S = 120.0


def opened(kind: str, root: Path, capacity_bytes: int | None = 8 * PAGE_BYTES) -> Storage:
    return ENGINES[kind].open(str(root), "test", capacity_bytes)


def use(storage: Storage) -> None:
    """Everything that can be asked, and as often as it takes to evict. No other error gets out."""
    asked = keys(*range(12))
    for call in (
        lambda: storage.contains(asked),
        lambda: assert_whole_or_absent(storage, asked),
        lambda: storage.read(asked, [poisoned(PAGE_BYTES // 2) for _ in asked]),
        lambda: storage.read(asked, [poisoned(2 * PAGE_BYTES) for _ in asked]),
        lambda: [write(storage, [page_key]) for page_key in asked],
        lambda: write(storage, asked),
        lambda: assert_whole_or_absent(storage, asked),
        lambda: storage.stats(),
        lambda: storage.delete(asked[:3]),
        lambda: assert_whole_or_absent(storage, asked),
    ):
        with suppress(StorageError):
            call()


def survive(kind: str, root: Path) -> None:
    """Open and use the store, in time."""

    def open_and_use() -> None:
        with suppress(StorageError), closing(opened(kind, root)) as storage:
            use(storage)

    in_time(open_and_use)


def in_time(call: Callable[[], None]) -> None:
    threads = DeadlineThreads(num_threads=1, deadline_s=HANGS_S)
    threads.call(call)
    threads.close()


def test_a_root_that_is_a_link_of_the_users_own_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    for kind in KINDS:
        with closing(opened(kind, tmp_path / "root")) as storage:
            assert write(storage, keys(1)) == [True]
            assert read(storage, keys(1)) == [payload(keys(1)[0])]


def test_foreign_files_beside_our_own_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / namespace_name("test")
    opened("file", tmp_path).close()
    names = [
        "writing/notes.txt",
        "writing/notes.1.2.3",
        f"writing/{'0' * 32}.².3.0",
        "00/notes.page",
        f"00/{keys(1)[0].hex().replace('0', 'A')}.page",
        f"01/{keys(1)[0].hex()}.page",
        f"00/{keys(1)[0].hex()[:-2]}.page",
        f"00/{keys(1)[0].hex()}",
        "notes.txt",
    ]
    for name in names:
        (root / name).write_bytes(b"theirs")
        os.utime(root / name, (1, 1))
    with closing(opened("file", tmp_path, 2 * PAGE_BYTES)) as storage:
        for number in range(6):
            assert write(storage, keys(number)) == [True]
        assert storage.stats().stored_bytes == 2 * PAGE_BYTES
    for name in names:
        assert (root / name).read_bytes() == b"theirs", name
        assert (root / name).stat().st_mtime == 1, name


def test_a_smaller_page_is_kept_when_a_larger_one_is_asked_for(tmp_path: Path) -> None:
    for kind in KINDS:
        with closing(opened(kind, tmp_path)) as storage:
            for num_bytes in (0, 1, 5, PAGE_BYTES - 1, PAGE_BYTES - 16, PAGE_BYTES - 17):
                page = payload(keys(1)[0], num_bytes)
                storage.write(keys(1), [page])
                assert storage.read(keys(1), [poisoned()]) == [False]
                buffer = poisoned(num_bytes)
                assert storage.read(keys(1), [buffer]) == [True], (kind, num_bytes)
                assert buffer == page
                storage.delete(keys(1))
            assert storage.stats().damaged_pages == 0


# -- damaged tables ----------------------------------------------------------------------------

NONSENSE = [
    *[("slot_bytes", value) for value in (-4096, 2**63 - 1, "q")],
    *[("slot", value) for value in (-3, 2**50, 0.5, "z")],
    *[("tick", value) for value in (2**63 - 1, "later")],
    *[("key", value) for value in (None, "text")],
    *[("length", value) for value in (None, -5, 2**40, "x")],
    *[("digest", value) for value in (None, b"")],
]


def altered(root: Path, statement: str, *values: object) -> None:
    path = root / namespace_name("test") / "slots.sqlite"
    with closing(sqlite3.connect(path)) as table, table:
        table.execute(statement, values)


@pytest.mark.parametrize(("column", "value"), NONSENSE)
def test_a_row_that_ceases_to_make_sense_harms_nobody(
    column: str, value: object, tmp_path: Path
) -> None:
    with suppress(StorageError), closing(opened("slab", tmp_path)) as storage:
        write(storage, keys(0, 1))
        altered(tmp_path, f"UPDATE slots SET {column} = ? WHERE key = ?", value, keys(1)[0])
        use(storage)
    survive("slab", tmp_path)


def test_a_slab_that_is_being_opened_for_ever_is_given_up(tmp_path: Path) -> None:
    opened("slab", tmp_path).close()
    held = os.open(tmp_path / namespace_name("test") / "opening", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"for more than 0\.02 s"):
            SlabStorage(tmp_path, namespace="test", capacity_bytes=None, busy_s=0.02)
    finally:
        os.close(held)
    opened("slab", tmp_path).close()


# -- random damage -----------------------------------------------------------------------------


def flip_bits(path: Path, rng: Random, count: int) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(count if content else 0):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, rng: Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def survive_damage(kind: str, base: Path, times: int, seed: int) -> int:
    """Damage a store at random, again and again; how many pages were read right all the same."""
    rng = Random(seed)
    found = 0
    for turn in range(times):
        root = base / str(turn)
        storage = opened(kind, root, 64 * PAGE_BYTES)
        write(storage, keys(*range(40)))
        is_open = rng.random() < 0.3
        if not is_open:
            storage.close()
        files = [path for path in sorted(root.rglob("*")) if path.is_file()]
        for _ in range(rng.choice([1, 1, 3])):
            path = rng.choice([path for path in files if path.suffix != ".slab"] * 2 + files)
            if path.name.endswith("-shm"):
                continue  # it is mapped: SQLite cannot help it
            if rng.random() < 0.8 or is_open:
                flip_bits(path, rng, rng.choice([1, 4, 64]))
            else:
                cut(path, rng)
        if is_open:
            with suppress(StorageError):
                found += assert_whole_or_absent(storage, keys(*range(40)))
            use(storage)
            with suppress(StorageError):
                storage.close()
        for _ in range(2):
            with suppress(StorageError), closing(opened(kind, root, 64 * PAGE_BYTES)) as storage:
                found += assert_whole_or_absent(storage, keys(*range(40)))
                use(storage)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_gives_misses_or_errors(kind: str, tmp_path: Path) -> None:
    in_time(lambda: checked(survive_damage(kind, tmp_path, times=12, seed=1)))


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_much_random_damage_gives_misses_or_errors(kind: str, tmp_path: Path) -> None:
    checked(survive_damage(kind, tmp_path, times=2000, seed=2))


def checked(found: int) -> None:
    assert found > 0


# -- full disks --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "file_kib"), [("slab", 64), ("slab", 8), ("file", 4)])
def test_a_full_disk_refuses_pages_and_keeps_those_it_has(
    kind: str, file_kib: int, tmp_path: Path
) -> None:
    with start_writer(kind, str(tmp_path), 0, 200, file_kib=file_kib) as writer:
        assert writer.stdout is not None
        said = writer.stdout.read().split()
    assert writer.returncode == 0
    stored = [int(word) for word in said if word.isdigit()]
    assert {"refused", "failed"} & set(said)
    with closing(opened(kind, tmp_path, None)) as storage:
        assert assert_whole_or_absent(storage, keys(*range(200))) == len(stored)
        assert all(storage.contains(keys(*stored)))
        assert write(storage, keys(*range(200))) == [True] * 200
        assert assert_whole_or_absent(storage, keys(*range(200))) == 200
    assert list(tmp_path.glob("*/writing/*")) == []


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can be written, and none can be made longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_store_on_a_full_disk_is_opened_read_and_takes_no_more(tmp_path: Path) -> None:
    few, many = keys(1, 2, 3), keys(*range(1, 9))
    with closing(opened("file", tmp_path)) as storage:
        assert write(storage, few) == [True] * 3
    with full_disk(), closing(opened("file", tmp_path)) as storage:
        found = storage.contains(many)
        num_whole = assert_whole_or_absent(storage, many)
        written = write(storage, many)
        found_again = storage.contains(many)
    assert found == written == found_again == [True] * 3 + [False] * 5
    assert num_whole == 3
    with closing(opened("file", tmp_path)) as storage:
        assert write(storage, many) == [True] * 8


def test_a_slab_on_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(StorageError, match=r"cannot open the slab .*: disk I/O error"):
        opened("slab", tmp_path)


@pytest.mark.parametrize("name", ["open", "pwritev", "close", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_page_that_finds_no_room_leaves_no_trace(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FileStorage(tmp_path, namespace="test", capacity_bytes=2 * PAGE_BYTES)
    with monkeypatch.context() as patch:
        fail_while_writing(patch, name, code)
        assert write(storage, keys(1, 2, 3)) == [False, False, False]
    assert list(tmp_path.glob("*/writing/*")) == []
    assert write(storage, keys(4, 5)) == [True, True]
    assert storage.stats().stored_bytes == 2 * PAGE_BYTES


@pytest.mark.parametrize("name", ["open", "pwritev", "close", "rename"])
def test_a_page_that_cannot_be_written_is_an_error_and_leaves_no_trace(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FileStorage(tmp_path, namespace="test", capacity_bytes=2 * PAGE_BYTES)
    with monkeypatch.context() as patch:
        fail_while_writing(patch, name, errno.EIO)
        with pytest.raises(StorageError, match=r"cannot store pages in .*Input/output error"):
            write(storage, keys(1))
    assert list(tmp_path.glob("*/writing/*")) == []
    assert write(storage, keys(4, 5)) == [True, True]
    assert storage.contains(keys(4, 5)) == [True, True]


def fail_while_writing(patch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """`os.NAME` fails, but only for files that are written, and after it has done half its work."""
    real = getattr(os, name)
    drafts: set[int] = set()
    real_open = os.open

    def fail(*arguments: object, **options: object) -> object:
        if name == "open" and not arguments[1] & os.O_CREAT:  # type: ignore[operator]
            return real(*arguments, **options)
        if name == "close" and arguments[0] not in drafts:
            return real(*arguments, **options)
        if name == "pwritev":
            parts: list[memoryview] = arguments[1]  # type: ignore[assignment]
            if arguments[2] == 0:
                return real(arguments[0], [parts[0][: PAGE_BYTES // 2]], 0)
        elif name == "close":
            real(*arguments)
            drafts.discard(arguments[0])  # type: ignore[arg-type]
        raise OSError(code, os.strerror(code))

    def open_draft(path: object, flags: int, *arguments: object, **options: object) -> int:
        file = real_open(path, flags, *arguments, **options)  # type: ignore[arg-type]
        if flags & os.O_CREAT:
            drafts.add(file)
        return file

    if name == "close":
        patch.setattr(os, "open", open_draft)
    patch.setattr(os, name, fail)


def test_a_store_that_cannot_be_made_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", no_space)
    with pytest.raises(StorageError, match=r"cannot store pages in .*No space left"):
        opened("file", tmp_path)
    with pytest.raises(StorageError, match=r"cannot open the slab storage in .*No space left"):
        opened("slab", tmp_path)
