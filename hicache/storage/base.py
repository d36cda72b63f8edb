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
    """Raised when a storage engine cannot be opened or reached.

    A missing or damaged page raises no error: it is a cache miss.
    """


@dataclass(slots=True, kw_only=True)
class StorageStats:
    """A snapshot of the counters of one storage engine.

    `stored_pages` and `stored_bytes` are what the engine holds now. `damaged_pages` counts the
    pages whose checksum was found to be wrong.
    """

    stored_pages: int = 0
    stored_bytes: int = 0
    damaged_pages: int = 0  # found with a wrong digest, and treated as missing


class Storage(Protocol):
    """Interface of a storage engine, which stores KV-cache pages as bytes under keys.

    A key is a 16-byte digest of a page and of all tokens before the page, followed by one byte.
    That byte is the kind of page, such as full-attention KV or Mamba state. Each call handles a
    batch of pages. Calls may block, and may come from any thread.
    """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return one flag per key: True if the storage engine now holds a page under the key.

        A later `read` can still miss, because the page may be evicted in the meantime.
        """

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Copy the stored page of each `keys[i]` into `buffers[i]`; return one flag per page.

        The flag is False if the page is missing, is damaged, or has another length than its buffer.
        The contents of the buffer are then undefined.
        """

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Store the bytes of each `buffers[i]` under `keys[i]`; return one flag per page.

        True means that every process can now read the whole page. If the key is stored already, its
        page stays unchanged and the flag is True. False means that there is no room for the page.
        """

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the pages stored under `keys`, and ignore keys that are not stored."""

    def stats(self) -> StorageStats:
        """Return the current counters of the storage engine."""

    def close(self) -> None:
        """Release all resources of the storage engine.

        The caller must not use the engine afterwards.
        """
