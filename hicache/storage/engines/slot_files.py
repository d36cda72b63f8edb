"""The bytes of a slab: sparse files of slots, one for each slot size."""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from hicache.storage.engines.slot_table import Place

ALIGN_BYTES = 4096  # what O_DIRECT and holes in files ask for: slot sizes are multiples of it

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2  # linux/falloc.h

_Move = Callable[[int, Sequence[memoryview], int], int]


class SlotFiles:
    """The sparse files, one for each slot size, opened when they are first needed."""

    def __init__(self, root: Path, *, direct: bool) -> None:
        self._root = root
        self._direct = direct
        self._lock = Lock()
        self._files: dict[int, tuple[int, int | None]] = {}

    def read(self, place: Place, start: int, buffer: memoryview) -> bool:
        """Fill the buffer from byte `start` of the slot; False where that cannot be read."""
        try:
            buffered, direct = self._open(place.slot_bytes)
            return _transfer(os.preadv, buffered, direct, buffer, place.offset + start)
        except OSError:
            return False

    def write(self, place: Place, start: int, buffer: memoryview) -> bool:
        """Store the buffer from byte `start` of the slot; False without space or with a fault."""
        try:
            buffered, direct = self._open(place.slot_bytes)
            return _transfer(os.pwritev, buffered, direct, buffer, place.offset + start)
        except OSError:
            return False

    def free_space(self, place: Place) -> None:
        """Make the slot a hole. Where the file system cannot, its space waits to be used again."""
        with self._lock:
            known = place.slot_bytes in self._files
        if known or self._path(place.slot_bytes).exists():
            _punch_hole(self._open(place.slot_bytes)[0], place.offset, place.slot_bytes)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for pair in self._files.values():
                for file in pair:
                    if file is not None:
                        os.close(file)
            self._files.clear()

    def _path(self, slot_bytes: int) -> Path:
        return self._root / f"pages-{slot_bytes}.slab"

    def _open(self, slot_bytes: int) -> tuple[int, int | None]:
        pair = self._files.get(slot_bytes)
        if pair is not None:
            return pair
        with self._lock:
            pair = self._files.get(slot_bytes)
            if pair is None:
                path = self._path(slot_bytes)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                buffered = os.open(path, flags, 0o644)
                direct = None
                if self._direct:
                    try:
                        direct = os.open(path, flags | os.O_DIRECT)
                    except OSError:
                        direct = None  # not on this file system
                pair = self._files[slot_bytes] = (buffered, direct)
            return pair


def _transfer(
    move: _Move, buffered: int, direct: int | None, buffer: memoryview, offset: int
) -> bool:
    """Move the whole buffer, directly if possible; False where the file ends early."""
    rest = buffer
    while True:
        if direct is None:
            moved = move(buffered, (rest,), offset)
        else:
            try:
                moved = move(direct, (rest,), offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                direct = None  # the address or the length is not aligned
                continue
        if moved == rest.nbytes:
            return True
        if moved == 0:
            return False
        rest, offset = rest[moved:], offset + moved


def _punch_hole(file: int, offset: int, num_bytes: int) -> None:
    """Give a range of the file back to the file system, if that can take it."""
    libc = ctypes.CDLL(None)
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    libc.fallocate(file, mode, ctypes.c_int64(offset), ctypes.c_int64(num_bytes))
