"""Roots in which others have put things: a miss or a `StorageError`, and nothing of theirs touched.

Everything that is planted here, and everything it points to, is the test's own.
"""

import errno
import fcntl
import os
import re
import resource
import socket
import sqlite3
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
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
PAGE_NAME = f"00/{keys(1)[0].hex()}.page"
PLACES = {
    "slab": ("slots.sqlite", "slots.sqlite-wal", "slots.sqlite-shm", "slots.sqlite-journal",
             "opening", f"pages-{PAGE_BYTES}.slab", "."),
    "file": (PAGE_NAME, "00", "writing", "."),
}  # fmt: skip


def link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def hard_link(place: Path, victim: Path) -> None:
    place.hardlink_to(victim)


def dangling_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim.parent / "to be made")


def link_to_directory(place: Path, victim: Path) -> None:
    place.symlink_to(victim.parent)


def directory(place: Path, victim: Path) -> None:
    place.mkdir()
    (place / "of somebody").write_text("else")


def fifo(place: Path, victim: Path) -> None:
    os.mkfifo(place)


def listener(place: Path, victim: Path) -> None:
    here = Path.cwd()
    os.chdir(place.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(place.name)
    finally:
        os.chdir(here)


THINGS = (link, hard_link, dangling_link, link_to_directory, directory, fifo, listener)
PLANTED = [(kind, place, thing) for kind in KINDS for place in PLACES[kind] for thing in THINGS]


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


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of somebody else, in a directory of theirs, which nobody has changed in the end."""
    path = tmp_path / "theirs" / "victim"
    path.parent.mkdir()
    path.write_bytes(bytes(range(256)) * 100)
    os.utime(path, (1, 1))
    return path


def state_of(place: Path, victim: Path) -> object:
    """What was planted and what it points to, as far as a store could change it."""
    planted = place.lstat()
    theirs = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_nlink)
        for path in sorted(victim.parent.iterdir())
    }
    inside = sorted(place.iterdir()) if stat.S_ISDIR(planted.st_mode) else []
    return planted.st_ino, planted.st_mode, planted.st_mtime_ns, theirs, inside


@pytest.mark.parametrize(
    ("kind", "place", "thing"),
    PLANTED,
    ids=[f"{kind}-{thing.__name__}-{place}" for kind, place, thing in PLANTED],
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_lies_in_the_place_of_a_file_is_left_alone(
    kind: str,
    place: str,
    thing: Callable[[Path, Path], None],
    when: str,
    tmp_path: Path,
    victim: Path,
) -> None:
    if place == "." and thing is directory:
        return  # that is what belongs there
    root = tmp_path / "root"
    path = root / namespace_name("test") / place
    with ExitStack() as stack:
        storage = opened(kind, root)
        stack.callback(lambda: in_time(lambda: suppressed(storage.close)))
        write(storage, keys(0, 1))
        if when == "before":
            stack.close()
        if thing is directory and path.is_dir():
            return
        if os.path.lexists(path):
            path.rename(tmp_path / "moved away")
        thing(path, victim)
        before = state_of(path, victim)
        if when == "meanwhile":
            in_time(lambda: use(storage))
            assert state_of(path, victim) == before
        survive(kind, root)
        assert state_of(path, victim) == before


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize(
    ("kind", "place"), [("slab", f"pages-{PAGE_BYTES}.slab"), ("file", PAGE_NAME)]
)
def test_a_page_whose_place_is_taken_is_missing_and_all_else_goes_on(
    kind: str, place: str, thing: Callable[[Path, Path], None], tmp_path: Path, victim: Path
) -> None:
    with closing(opened(kind, tmp_path / "root")) as storage:
        thing(tmp_path / "root" / namespace_name("test") / place, victim)
        assert write(storage, keys(1)) == [False]
        assert storage.contains(keys(1)) == [False]
        assert read(storage, keys(1)) == [None]
        storage.delete(keys(1))
        # pages that lie elsewhere: in another file
        others = keys(2, 3)
        pages = [payload(other, 100) for other in others]
        assert storage.write(others, pages) == [True, True]
        buffers = [poisoned(100), poisoned(100)]
        assert storage.read(others, buffers) == [True, True]
        assert buffers == pages
        assert storage.stats().stored_pages == 2


def suppressed(call: Callable[[], None]) -> None:
    with suppress(StorageError):
        call()


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


# -- foreign files of any length ---------------------------------------------------------------


def test_a_foreign_file_in_the_place_of_a_page_is_not_read_into_memory(tmp_path: Path) -> None:
    with closing(opened("file", tmp_path)) as storage:
        path = tmp_path / namespace_name("test") / PAGE_NAME
        with path.open("wb") as file:
            file.truncate(2**40)
        buffers = [poisoned()]
        tracemalloc.start()
        try:
            assert storage.read(keys(1), buffers) == [False]
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < PAGE_BYTES
        assert path.stat().st_size == 2**40


def test_a_file_that_is_too_long_for_a_page_is_no_page(tmp_path: Path) -> None:
    storage = FileStorage(
        tmp_path, namespace="test", capacity_bytes=2 * PAGE_BYTES, page_bytes={0: PAGE_BYTES}
    )
    path = tmp_path / namespace_name("test") / PAGE_NAME
    path.write_bytes(bytes(PAGE_BYTES + 17))
    assert write(storage, keys(1)) == [False]
    assert storage.contains(keys(1)) == [False]
    storage.delete(keys(1))
    for number in (2, 3, 4):
        assert write(storage, keys(number)) == [True]
    assert storage.stats().stored_pages == 2
    assert path.read_bytes() == bytes(PAGE_BYTES + 17)


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
    *[("slot_bytes", value) for value in (0, -4096, 2**60, 2**63 - 1, 1.5, "q")],
    *[("slot", value) for value in (-3, 2**40, 2**50, 2**63 - 1, 0.5, "z")],
    *[("state", value) for value in (0, 1, 7, -1, "live")],
    *[("tick", value) for value in (-1, 2**63 - 1, 2.5, "later")],
    *[("owner", value) for value in (1, b"\xff", "somebody")],
    *[("key", value) for value in (None, 5, "text", b"")],
    *[("length", value) for value in (None, -5, 0, 1, PAGE_BYTES - 1, 2**40, 1.5, "x")],
    *[("digest", value) for value in (None, 5, "text", b"", b"\0" * 16)],
]


def altered(root: Path, statement: str, *values: object) -> None:
    path = root / namespace_name("test") / "slots.sqlite"
    with closing(sqlite3.connect(path)) as table, table:
        table.execute(statement, values)


@pytest.mark.parametrize(("column", "value"), NONSENSE)
def test_a_row_that_makes_no_sense_is_a_miss_and_can_be_written_again(
    column: str, value: object, tmp_path: Path
) -> None:
    with closing(opened("slab", tmp_path)) as storage:
        write(storage, keys(0, 1))
    altered(tmp_path, f"UPDATE slots SET {column} = ? WHERE key = ?", value, keys(1)[0])
    with closing(opened("slab", tmp_path)) as storage:
        pages = read(storage, keys(0, 1))
        is_harmless = column == "owner"
        assert pages == [payload(keys(0)[0]), payload(keys(1)[0]) if is_harmless else None]
        assert write(storage, keys(1)) == [True]
        assert read(storage, keys(1)) == [payload(keys(1)[0])]
        assert storage.stats().stored_bytes <= 8 * PAGE_BYTES
        use(storage)
        # none is lost for good: all the room there is can be had
        assert write(storage, keys(*range(100, 108))) == [True] * 8


@pytest.mark.parametrize(("column", "value"), NONSENSE)
def test_a_row_that_ceases_to_make_sense_harms_nobody(
    column: str, value: object, tmp_path: Path
) -> None:
    with closing(opened("slab", tmp_path)) as storage:
        write(storage, keys(0, 1))
        altered(tmp_path, f"UPDATE slots SET {column} = ? WHERE key = ?", value, keys(1)[0])
        use(storage)
    survive("slab", tmp_path)


@pytest.mark.parametrize("owner", [None, "", "nobody", 7, b"\xff\xfe"])
def test_a_slot_that_is_written_by_nobody_is_taken_back(owner: object, tmp_path: Path) -> None:
    with closing(opened("slab", tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(0, 1))
    altered(tmp_path, "UPDATE slots SET state = 1, key = NULL, owner = ?", owner)
    with closing(opened("slab", tmp_path, 2 * PAGE_BYTES)) as storage:
        assert read(storage, keys(0, 1)) == [None, None]
        assert write(storage, keys(2, 3)) == [True, True]


@pytest.mark.parametrize("used", ["much", None, -(2**62), 2**63 - 1, 1e300])
def test_a_wrong_total_is_counted_afresh(used: object, tmp_path: Path) -> None:
    with closing(opened("slab", tmp_path, 2 * PAGE_BYTES)) as storage:
        write(storage, keys(0, 1))
        with suppress(sqlite3.IntegrityError):
            altered(tmp_path, "UPDATE totals SET used_bytes = ?", used)
        use(storage)
    with closing(opened("slab", tmp_path, 2 * PAGE_BYTES)) as storage:
        assert write(storage, keys(105, 106)) == [True, True]
        assert storage.stats().stored_bytes == 2 * PAGE_BYTES


def test_a_table_without_a_total_harms_nobody(tmp_path: Path) -> None:
    with closing(opened("slab", tmp_path)) as storage:
        write(storage, keys(0, 1))
        altered(tmp_path, "DELETE FROM totals")
        use(storage)
    with closing(opened("slab", tmp_path)) as storage:
        assert write(storage, keys(5)) == [True]


@pytest.mark.parametrize("num_slots", [0, 0.5, 1, 1.5])
def test_slots_beyond_the_end_of_their_file_are_forgotten(num_slots: float, tmp_path: Path) -> None:
    with closing(opened("slab", tmp_path)) as storage:
        write(storage, keys(0, 1, 2))
    path = tmp_path / namespace_name("test") / f"pages-{PAGE_BYTES}.slab"
    os.truncate(path, int(num_slots * PAGE_BYTES))
    with closing(opened("slab", tmp_path)) as storage:
        assert assert_whole_or_absent(storage, keys(0, 1, 2)) == int(num_slots)
        assert write(storage, keys(0, 1, 2)) == [True, True, True]
        assert assert_whole_or_absent(storage, keys(0, 1, 2)) == 3


def test_slots_of_a_file_that_is_gone_are_forgotten(tmp_path: Path) -> None:
    with closing(opened("slab", tmp_path)) as storage:
        write(storage, keys(0, 1))
    (tmp_path / namespace_name("test") / f"pages-{PAGE_BYTES}.slab").unlink()
    with closing(opened("slab", tmp_path)) as storage:
        assert storage.stats().stored_pages == 0
        assert read(storage, keys(0, 1)) == [None, None]


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE theirs (x)",
        "CREATE TRIGGER more AFTER UPDATE ON slots BEGIN DELETE FROM totals; END",
        "ALTER TABLE slots ADD COLUMN theirs",
        "DROP INDEX by_age",
        "DROP TABLE totals",
    ],
)
def test_a_table_of_another_shape_is_refused_and_left_as_it_is(
    statement: str, tmp_path: Path
) -> None:
    with closing(opened("slab", tmp_path)) as storage:
        write(storage, keys(0, 1))
    altered(tmp_path, statement)
    path = tmp_path / namespace_name("test") / "slots.sqlite"
    before = path.read_bytes()
    with pytest.raises(StorageError, match="is no index of a slab store"):
        opened("slab", tmp_path)
    assert path.read_bytes() == before


def test_a_database_of_somebody_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / namespace_name("test") / "slots.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as theirs, theirs:
        theirs.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(StorageError, match="is no index of a slab store: it contains 'theirs'"):
        opened("slab", tmp_path)
    assert path.read_bytes() == before


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


# a row as SQLite keeps it: the length of its header, then the type of each column: slot_bytes,
# slot, state, tick, owner, key, length, digest
ROW = re.compile(rb"\x09\x02[\x01\x08\x09][\x01\x08\x09].\x00\x2e\x02\x2c", re.DOTALL)
NULL, REAL, ONE, NO_TEXT, LETTER = 0, 7, 9, 13, 15


@pytest.mark.parametrize("kind_of_slot", [NULL, REAL, ONE, NO_TEXT, LETTER])
def test_rows_that_are_out_of_order_harm_nobody(kind_of_slot: int, tmp_path: Path) -> None:
    # a slot that is suddenly a text lies where no search for a text will find it
    for place in (0, 3, 17):
        root = tmp_path / str(place)
        with closing(opened("slab", root, 64 * PAGE_BYTES)) as storage:
            write(storage, keys(*range(20)))
        path = root / namespace_name("test") / "slots.sqlite"
        content = bytearray(path.read_bytes())
        rows = list(ROW.finditer(content))
        assert len(rows) == 20
        content[rows[place].start() + 2] = kind_of_slot
        path.write_bytes(content)
        survive("slab", root)
        survive("slab", root)


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
            suppressed(storage.close)
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


@pytest.mark.parametrize("kind", ["slab", "file"])
def test_a_store_on_a_full_disk_is_opened_read_and_takes_no_more(kind: str, tmp_path: Path) -> None:
    few, many = keys(1, 2, 3), keys(*range(1, 9))
    with closing(opened(kind, tmp_path)) as storage:
        assert write(storage, few) == [True] * 3
    with full_disk(), closing(opened(kind, tmp_path)) as storage:
        found = storage.contains(many)
        num_whole = assert_whole_or_absent(storage, many)
        written = write(storage, many)
        found_again = storage.contains(many)
    assert found == written == found_again == [True] * 3 + [False] * 5
    assert num_whole == 3
    with closing(opened(kind, tmp_path)) as storage:
        assert write(storage, many) == [True] * 8


def test_a_slab_whose_disk_fills_up_while_it_is_read_is_closed_all_the_same(tmp_path: Path) -> None:
    with closing(opened("slab", tmp_path)) as storage:
        write(storage, keys(1))
    with full_disk():
        storage = opened("slab", tmp_path)
        num_whole = assert_whole_or_absent(storage, keys(1))
        storage.close()
    assert num_whole == 1


def test_a_slab_of_another_namespace_is_refused_on_a_full_disk_too(tmp_path: Path) -> None:
    with closing(opened("slab", tmp_path)):
        pass
    (ours,) = tmp_path.iterdir()
    ours.rename(tmp_path / namespace_name("theirs"))
    with full_disk(), pytest.raises(StorageError, match="namespace 'test', not 'theirs'"):
        SlabStorage(tmp_path, namespace="theirs", capacity_bytes=None)


def test_a_slab_that_is_new_on_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
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
