"""The bytes of a slab: one sparse file of slots for each slot size."""

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from hicache.storage.engines.private import open_file

ALIGN_BYTES = 4096  # holes in files need this alignment; slot sizes are multiples of it

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2  # linux/falloc.h

_Move = Callable[[int, Sequence[memoryview], int], int]


class Place(NamedTuple):
    slot_bytes: int
    slot: int

    @property
    def offset(self) -> int:
        return self.slot_bytes * self.slot


class SlotFiles:
    """Reads and writes page slots in sparse files below `root`, one file per slot size.

    Each file is opened at its first use. If that fails, reads and writes of its slots return False.
    """

    def __init__(self, root: Path, *, is_read_only: bool = False) -> None:
        self._root = root
        self._flags = os.O_RDONLY if is_read_only else os.O_RDWR | os.O_CREAT
        self._lock = Lock()
        self._files: dict[int, int] = {}

    def read(self, place: Place, start: int, buffer: memoryview) -> bool:
        return self._move(os.preadv, place, start, buffer)

    def write(self, place: Place, start: int, buffer: memoryview) -> bool:
        return self._move(os.pwritev, place, start, buffer)

    def free_space(self, place: Place) -> None:
        with suppress(OSError):  # without support for holes, the space stays until it is reused
            _punch_hole(self._open(place.slot_bytes), place.offset, place.slot_bytes)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files.clear()

    def _move(self, move: _Move, place: Place, start: int, buffer: memoryview) -> bool:
        try:
            file = self._open(place.slot_bytes)
            done = 0
            while done < buffer.nbytes:
                moved = move(file, (buffer[done:],), place.offset + start + done)
                if moved == 0:  # the file ends early
                    return False
                done += moved
        except (OSError, OverflowError):  # or a slot that a damaged table made up
            return False
        return True

    def _open(self, slot_bytes: int) -> int:
        with self._lock:
            if slot_bytes not in self._files:
                path = self._root / f"pages-{slot_bytes}.slab"
                self._files[slot_bytes] = open_file(path, self._flags)
            return self._files[slot_bytes]


def _punch_hole(file: int, offset: int, num_bytes: int) -> None:
    libc = ctypes.CDLL(None)
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    libc.fallocate(file, mode, ctypes.c_int64(offset), ctypes.c_int64(num_bytes))
