"""What is opened is a plain file of our own, or there is an error that says so."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.storage.own_files import (
    ForeignFileError,
    is_own,
    names_in,
    open_own,
    open_own_directory,
    own_directory,
    own_status,
)

FOREIGN = ("link", "dangling", "hard", "fifo", "directory", "socket")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    """An open directory with one file of ours and one of everything else."""
    root = tmp_path / "d"
    root.mkdir()
    (root / "own").write_bytes(b"ours")
    (tmp_path / "theirs").write_bytes(b"theirs")
    (root / "link").symlink_to(tmp_path / "theirs")
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "hard").hardlink_to(tmp_path / "theirs")
    os.mkfifo(root / "fifo")
    (root / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as listener, own_directory(root) as opened:
        listener.bind(f"/proc/self/fd/{opened}/socket")  # the names of sockets are short
        yield opened


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT])
@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_ours_is_not_opened(name: str, flags: int, directory: int) -> None:
    before = num_open()
    with pytest.raises(ForeignFileError, match=f"is not of this store: '{name}'") as raised:
        open_own(name, flags, directory)
    assert raised.value.errno == errno.EINVAL
    assert num_open() == before
    with pytest.raises(ForeignFileError, match=f"is not of this store: '{name}'"):
        own_status(name, directory)


def test_our_own_files_are_opened_and_have_a_status(directory: int) -> None:
    file = open_own("own", os.O_RDONLY, directory)
    assert os.read(file, 9) == b"ours"
    assert not os.get_inheritable(file)
    os.close(file)
    status = own_status("own", directory)
    assert status is not None
    assert status.st_size == 4


def test_a_file_that_has_just_lost_its_name_was_ours(directory: int) -> None:
    file = open_own("own", os.O_RDONLY, directory)
    os.unlink("own", dir_fd=directory)
    assert is_own(os.fstat(file))
    os.close(file)


def test_a_file_is_made_where_there_is_none(directory: int) -> None:
    assert own_status("new", directory) is None
    with pytest.raises(FileNotFoundError):
        open_own("new", os.O_RDONLY, directory)
    mask = os.umask(0)
    try:
        os.close(open_own("new", os.O_RDWR | os.O_CREAT, directory))
    finally:
        os.umask(mask)
    status = own_status("new", directory)
    assert status is not None
    assert status.st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["own", "link", "fifo", "here"])
def test_a_directory_is_not_opened_through_a_link(name: str, directory: int) -> None:
    os.symlink("directory", "here", dir_fd=directory)
    with pytest.raises(ForeignFileError, match=f"is not of this store: '{name}'"):
        open_own_directory(name, directory)
    with pytest.raises(FileNotFoundError):
        open_own_directory("nowhere", directory)


def test_a_directory_is_closed_after_its_use_and_may_lie_behind_links(
    tmp_path: Path, directory: int
) -> None:
    (tmp_path / "way").symlink_to(tmp_path)
    before = num_open()
    with own_directory(tmp_path / "way" / "d") as again, own_directory("directory", again) as inner:
        assert sorted(names_in(again)) == sorted(["own", *FOREIGN])
        assert names_in(inner) == []
    assert num_open() == before
