"""Directories and files that only their owner can read, and that are never links.

Pages hold what users wrote, and a storage directory may be writable for others, who could put a
link to any file in it.
"""

import errno
import os
from pathlib import Path


def make_directory(path: Path) -> None:
    """Create a directory, and its parents, that only this user can enter, unless it exists.

    Raises:
        OSError: the directory is a symbolic link, or cannot be created.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    refuse_link(path)


def refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link", str(path))


def open_file(path: Path, flags: int) -> int:
    """Open a file, created for this user alone, and return its descriptor.

    Raises:
        OSError: the file is a symbolic link, or cannot be opened.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
