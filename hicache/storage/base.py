"""The interface of every storage engine.

A key has `KEY_BYTES` bytes: the 16-byte digest of a page, which stands for the page and all tokens
before it, and one byte for the kind. The engine's namespace, fixed when it is opened, separates
pages by model, layout, page size and rank. Engines are write-once: a page never changes under its
key.
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
    """A copy of an engine's counters: what it holds now, and how many pages it found damaged."""

    stored_pages: int = 0
    stored_bytes: int = 0
    damaged_pages: int = 0  # found with a wrong digest, and treated as missing


class Storage(Protocol):
    """Pages by key. Every call may block, may come from any thread, and moves a whole batch."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is stored now. A later `read` can still miss."""
        ...

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill `buffers[i]` with the page of `keys[i]`.

        Return False for each page that is missing, damaged or of another length; its buffer is then
        undefined.
        """
        ...

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Store `buffers[i]` under `keys[i]`. After True, every process sees the whole page.

        Return True for a key that exists already, whose page stays; False for a page without room.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove the pages; missing keys are ignored."""
        ...

    def stats(self) -> StorageStats:
        """Return the counters so far."""
        ...

    def close(self) -> None:
        """Release all resources. The caller must not use the engine afterwards."""
        ...
