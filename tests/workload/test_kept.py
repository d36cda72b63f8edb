import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.workload import kept as room
from hicache.workload.kept import FILES_KEPT, kept


class Maker:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.num_calls += 1
        return {"ids": np.arange(1000, dtype=np.int32), "none": np.empty(0)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(room, "os_cache", lambda name: tmp_path / name)
    return tmp_path / "hicache" / "made"


def test_what_was_made_once_is_read(folder: Path) -> None:
    make = Maker()
    first, second = kept(make, b"one"), kept(make, b"one")
    assert make.num_calls == 1
    assert {name: (a.dtype, a.tolist()) for name, a in first.items()} == {
        name: (a.dtype, a.tolist()) for name, a in second.items()
    }


def test_what_is_made_of_something_else_is_another_thing(folder: Path) -> None:
    make = Maker()
    for parts in ([b"one"], [b"other"], [b"o", b"ne"], [b"one", b""]):
        kept(make, *parts)
    assert make.num_calls == 4


@pytest.mark.parametrize("place", [0, 15, 16, 400, -1])
def test_a_damaged_file_is_made_again(folder: Path, place: int) -> None:
    make = Maker()
    kept(make, b"one")
    (file,) = folder.iterdir()
    damaged = bytearray(file.read_bytes())
    damaged[place] ^= 1
    file.write_bytes(damaged)
    assert kept(make, b"one")["ids"].tolist() == list(range(1000))
    assert kept(make, b"one")["ids"].tolist() == list(range(1000))
    assert make.num_calls == 2


@pytest.mark.parametrize("length", [0, 8, 16, 500])
def test_a_file_that_was_cut_is_made_again(folder: Path, length: int) -> None:
    make = Maker()
    kept(make, b"one")
    (file,) = folder.iterdir()
    os.truncate(file, length)
    assert kept(make, b"one")["ids"].tolist() == list(range(1000))
    assert make.num_calls == 2


def test_a_folder_that_cannot_be_written_is_done_without(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.touch()
    make = Maker()
    assert kept(make, b"one")["ids"].tolist() == list(range(1000))
    assert kept(make, b"one")["ids"].tolist() == list(range(1000))
    assert make.num_calls == 2


def test_a_write_that_fails_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(Maker(), b"one")
    (file,) = folder.iterdir()
    before = file.read_bytes()[:-1]
    file.write_bytes(before)

    def fails(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    assert kept(Maker(), b"one")["ids"].tolist() == list(range(1000))
    assert file.read_bytes() == before


def test_a_full_disk_keeps_no_part_of_a_file(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # a longer file finds no room
    try:
        made = kept(Maker(), b"one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert made["ids"].tolist() == list(range(1000))
    assert list(folder.iterdir()) == []


def test_a_pipe_in_the_place_of_a_file_is_replaced(folder: Path) -> None:
    kept(Maker(), b"one")
    (file,) = folder.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert kept(Maker(), b"one")["ids"].tolist() == list(range(1000))
    assert file.is_file()


def test_two_writers_leave_a_whole_file(folder: Path) -> None:
    code = (
        "import numpy as np\n"
        "from hicache.workload.kept import kept\n"
        "for number in range(20):\n"
        "    ids = kept(lambda: {'ids': np.arange(200_000)}, b'both')['ids']\n"
        "    assert (ids == np.arange(200_000)).all()\n"
        "    from pathlib import Path\n"
        "    for file in Path(FOLDER).glob('*.kept'): file.unlink(missing_ok=True)\n"
    ).replace("FOLDER", repr(str(folder)))
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    make = Maker()
    kept(make, b"both"), kept(make, b"both")
    assert make.num_calls == 1
    assert len(list(folder.iterdir())) == 1


def test_what_was_not_used_for_longest_is_forgotten(folder: Path) -> None:
    make = Maker()
    for number in range(FILES_KEPT):
        kept(make, bytes([number]))
        for file in folder.iterdir():
            times = (file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**9)
            os.utime(file, ns=times)
    kept(make, bytes([0]))  # used again
    kept(make, b"new")
    assert len(list(folder.iterdir())) == FILES_KEPT
    assert make.num_calls == FILES_KEPT + 1
    kept(make, bytes([0])), kept(make, b"new")
    assert make.num_calls == FILES_KEPT + 1
    kept(make, bytes([1]))
    assert make.num_calls == FILES_KEPT + 2
