"""Access to the files of a store that never follows a link below its root.

Other programs may write to a root too. An entry is foreign unless it is a plain file with exactly
one name: links, FIFOs, directories, devices and hard-linked files are foreign. The store neither
reads nor writes foreign entries, and opening one does not block.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ForeignFileError(OSError):
    """Raised when a link or another foreign object lies where the store keeps a file."""


def is_own(status: os.stat_result) -> bool:
    # `status` must come from `lstat`, which does not follow links
    return stat.S_ISREG(status.st_mode) and status.st_nlink < 2


def own_status(name: str, directory: int) -> os.stat_result | None:
    try:
        status = os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return None
    if not is_own(status):
        raise _foreign(name)
    return status


def open_own(name: str, flags: int, directory: int) -> int:
    """Open the file `name` in the open directory `directory`; return its file descriptor.

    `flags` are those of `os.open`. The function neither follows links nor blocks.

    Raises:
        ForeignFileError: the path is a link, a directory, a device, a FIFO or a file with
            several names.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        file = os.open(name, flags, 0o644, dir_fd=directory)
    except OSError as error:
        # a link, a socket, or a directory or FIFO opened for writing
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _foreign(name) from error
        raise
    if is_own(os.fstat(file)):
        return file
    os.close(file)
    raise _foreign(name)


@contextmanager
def own_directory(path: Path | str, directory: int | None = None) -> Iterator[int]:
    """Open a directory and yield its file descriptor, which is closed after the `with` block.

    A relative `path` starts at the open directory `directory`; None means the current directory.
    The parents of `path` may be links; `path` itself must not be a link.

    Raises:
        ForeignFileError: the path is a link or not a directory.
    """
    file = open_own_directory(path, directory)
    try:
        yield file
    finally:
        os.close(file)


def open_own_directory(path: Path | str, directory: int | None = None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _foreign(path) from error
        raise


def names_in(directory: int) -> list[str]:
    return os.listdir(directory)  # a `Path` cannot list an open directory


def _foreign(path: Path | str) -> ForeignFileError:
    return ForeignFileError(errno.EINVAL, "is not of this store", str(path))
