"""The bytes of a slab: sparse files of slots, one for each slot size."""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from hicache.storage.engines.own_files import open_own, open_own_directory, own_status

ALIGN_BYTES = 4096  # what O_DIRECT and holes in files ask for: slot sizes are multiples of it

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2  # linux/falloc.h

_Move = Callable[[int, Sequence[memoryview], int], int]


class Place(NamedTuple):
    """A slot: number `slot` in the file of slots of `slot_bytes`."""

    slot_bytes: int
    slot: int

    @property
    def offset(self) -> int:
        """First byte in that file."""
        return self.slot_bytes * self.slot


class SlotFiles:
    """The sparse files below `root`, one for each slot size, opened when they are first needed.

    Where something lies that is no file of ours, slots can neither be read nor written.

    Raises:
        OSError: `root` is no directory of ours.
    """

    def __init__(self, root: Path, *, direct: bool) -> None:
        self._directory = open_own_directory(root)
        self._direct = direct
        self._lock = Lock()
        self._files: dict[int, tuple[int, int | None]] = {}

    def read(self, place: Place, start: int, buffer: memoryview) -> bool:
        """Fill the buffer from byte `start` of the slot; False where that cannot be read."""
        return self._move(os.preadv, place, start, buffer)

    def write(self, place: Place, start: int, buffer: memoryview) -> bool:
        """Store the buffer from byte `start` of the slot; False without space or with a fault."""
        return self._move(os.pwritev, place, start, buffer)

    def free_space(self, place: Place) -> None:
        """Make the slot a hole. Where the file system cannot, its space waits to be used again."""
        with suppress(OSError):
            if self.num_slots(place.slot_bytes):
                _punch_hole(self._open(place.slot_bytes)[0], place.offset, place.slot_bytes)

    def num_slots(self, slot_bytes: int) -> int:
        """How many slots a file has now, the last perhaps in part; 0 if there is no such file.

        Raises:
            OSError: It cannot be told.
        """
        status = own_status(_name(slot_bytes), self._directory)
        return 0 if status is None else -(-status.st_size // slot_bytes)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for pair in self._files.values():
                for file in pair:
                    if file is not None:
                        os.close(file)
            self._files.clear()
            os.close(self._directory)

    def _move(self, move: _Move, place: Place, start: int, buffer: memoryview) -> bool:
        try:
            buffered, direct = self._open(place.slot_bytes)
            return _transfer(move, buffered, direct, buffer, place.offset + start)
        except OSError:
            return False

    def _open(self, slot_bytes: int) -> tuple[int, int | None]:
        pair = self._files.get(slot_bytes)
        if pair is not None:
            return pair
        with self._lock:
            pair = self._files.get(slot_bytes)
            if pair is None:
                name = _name(slot_bytes)
                buffered = open_own(name, os.O_RDWR | os.O_CREAT, self._directory)
                direct = None
                if self._direct:
                    try:
                        direct = open_own(name, os.O_RDWR | os.O_DIRECT, self._directory)
                    except OSError:
                        direct = None  # not on this file system
                pair = self._files[slot_bytes] = (buffered, direct)
            return pair


def _name(slot_bytes: int) -> str:
    return f"pages-{slot_bytes}.slab"


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
