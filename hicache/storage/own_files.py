"""Files that are a store's own: below its root nothing is reached through a link.

Others may write to a root too. What lies there under a name of ours and is no plain file with that
one name (a link, a FIFO, a directory, a device, a file that has a name elsewhere as well) is
foreign: it is neither read nor written, and opening it does not block.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ForeignFileError(OSError):
    """Something else lies where a file or a directory of ours belongs."""


def is_own(status: os.stat_result) -> bool:
    """Whether this (`lstat`, not `stat`) is a plain file with no second name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink < 2


def own_status(name: str, directory: int) -> os.stat_result | None:
    """The status of a file; none if there is nothing.

    Raises:
        ForeignFileError: there is something else.
    """
    try:
        status = os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return None
    if not is_own(status):
        raise _foreign(name)
    return status


def open_own(name: str, flags: int, directory: int) -> int:
    """Open a file in an open directory; `O_CREAT` makes it.

    Raises:
        ForeignFileError: there is something else.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        file = os.open(name, flags, 0o644, dir_fd=directory)
    except OSError as error:
        # a link; a directory or a FIFO that was to be written to; a socket
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _foreign(name) from error
        raise
    if is_own(os.fstat(file)):
        return file
    os.close(file)
    raise _foreign(name)


@contextmanager
def own_directory(path: Path | str, directory: int | None = None) -> Iterator[int]:
    """Open a directory for a while. Links above it are followed, it must be none itself.

    Raises:
        ForeignFileError: it is a link, or no directory at all.
    """
    file = open_own_directory(path, directory)
    try:
        yield file
    finally:
        os.close(file)


def open_own_directory(path: Path | str, directory: int | None = None) -> int:
    """The same, for whoever closes it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _foreign(path) from error
        raise


def names_in(directory: int) -> list[str]:
    """All names in an open directory."""
    return os.listdir(directory)  # paths know nothing of open directories


def _foreign(path: Path | str) -> ForeignFileError:
    return ForeignFileError(errno.EINVAL, "is not of this store", str(path))
