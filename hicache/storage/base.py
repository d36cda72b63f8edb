"""What every storage engine promises.

A key is `KEY_BYTES` long: the 16-byte digest of a page (which already stands for every token
before it) and one byte for the kind. What else tells two pages apart (model, layout, page
size, rank) is the engine's namespace, fixed when it is opened. Engines are write-once: a page
never changes under its key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

DIGEST_BYTES = 16
KEY_BYTES = DIGEST_BYTES + 1


class StorageError(RuntimeError):
    """The engine cannot be reached or opened. A missing or damaged page is a miss, not an error."""


@dataclass(slots=True, kw_only=True)
class StorageStats:
    """What an engine holds, and has found damaged; what `stats` hands out is a copy."""

    stored_pages: int = 0
    stored_bytes: int = 0
    damaged_pages: int = 0  # found with a wrong digest, and treated as missing


class Storage(Protocol):
    """Pages by key. Every call may block, may come from any thread, and moves whole batches."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is stored now. Existing is not a promise that it can be read."""
        ...

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill `buffers[i]` with the page of `keys[i]`.

        False where it is missing, damaged or of another length; that buffer is then undefined.
        """
        ...

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Store pages. A page is visible to all, whole, once its write returns True.

        An existing key is kept as it is, and counts as True. False where there was no room.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget pages; missing ones are ignored."""
        ...

    def stats(self) -> StorageStats:
        """Counts so far."""
        ...

    def close(self) -> None:
        """Give everything back. The engine must not be used afterwards."""
        ...
