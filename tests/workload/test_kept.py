"""Results kept on disk: read again, made anew if damaged, and forgotten in the order of use."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.workload import kept as module
from hicache.workload.kept import FILES_KEPT, kept


class Maker:
    """A function that returns new arrays and counts its calls."""

    num_calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.num_calls += 1
        return {"ids": np.arange(1000, dtype=np.int32), "none": np.empty(0)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "hicache" / "made"


def check(make: Maker, num_calls: int, *parts: bytes) -> None:
    """Check the result for `parts`, and that `make` has been called `num_calls` times so far."""
    found = kept(make, *parts)
    assert {name: (a.dtype, a.tolist()) for name, a in found.items()} == {
        "ids": (np.int32, list(range(1000))),
        "none": (float, []),
    }
    assert make.num_calls == num_calls


@pytest.fixture
def file(folder: Path) -> Path:
    """The path of the file that keeps the result for the part `one`."""
    check(Maker(), 1, b"one")
    (file,) = folder.iterdir()
    return file


def test_a_result_for_the_same_parts_is_read_and_not_made_again(folder):
    make = Maker()
    for num_calls, parts in enumerate(([b"one"], [b"other"], [b"o", b"ne"], [b"one", b""]), 1):
        check(make, num_calls, *parts)
        check(make, num_calls, *parts)


@pytest.mark.parametrize("place", [0, 15, 16, 400, -1])
def test_a_damaged_file_of_a_kept_result_is_made_again(file, place):
    damaged = bytearray(file.read_bytes())
    damaged[place] ^= 1
    file.write_bytes(damaged)
    make = Maker()
    check(make, 1, b"one")
    check(make, 1, b"one")


@pytest.mark.parametrize("length", [0, 8, 16, 500])
def test_a_file_of_a_kept_result_that_was_cut_off_is_made_again(file, length):
    os.truncate(file, length)
    check(Maker(), 1, b"one")


def test_a_pipe_in_place_of_a_file_is_replaced(file):
    file.unlink()
    os.mkfifo(file)
    check(Maker(), 1, b"one")
    assert file.is_file()


def test_without_a_writable_folder_everything_is_made_again(folder):
    folder.parent.mkdir(parents=True)
    folder.touch()
    make = Maker()
    check(make, 1, b"one")
    check(make, 2, b"one")


def test_a_failed_write_leaves_the_old_file(file, monkeypatch):
    before = file.read_bytes()[:-1]
    file.write_bytes(before)

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    check(Maker(), 1, b"one")
    assert file.read_bytes() == before


def test_a_full_disk_leaves_no_part_of_a_file(folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        check(Maker(), 1, b"one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(folder.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
import numpy as np
from hicache.workload.kept import kept
for number in range(10):
    ids = kept(lambda: {"ids": np.arange(200_000)}, b"both")["ids"]
    assert (ids == np.arange(200_000)).all()
    for file in Path(sys.argv[1]).glob("*.kept"):
        file.unlink(missing_ok=True)
"""


def test_two_writers_leave_a_whole_file(folder):
    command = [sys.executable, "-c", WRITER, str(folder)]
    writers = [subprocess.Popen(command) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    make = Maker()
    kept(make, b"both"), kept(make, b"both")
    assert make.num_calls == 1
    assert len(list(folder.iterdir())) == 1


def test_the_file_unused_for_longest_is_deleted(folder):
    make = Maker()
    for number in range(FILES_KEPT):
        check(make, number + 1, bytes([number]))
        for file in folder.iterdir():
            times = (file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9)
            os.utime(file, ns=times)
    check(make, FILES_KEPT, bytes([0]))
    check(make, FILES_KEPT + 1, b"new")
    assert len(list(folder.iterdir())) == FILES_KEPT
    check(make, FILES_KEPT + 1, bytes([0]))
    check(make, FILES_KEPT + 1, b"new")
    check(make, FILES_KEPT + 2, bytes([1]))
