"""Pages in this process's memory: the engine of simulated time, and the simplest one for tests.

The least recently used pages leave first, so that the bytes held never exceed the capacity.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock

from hicache.storage.base import StorageStats


class MemoryStorage:
    """A storage engine in this process's memory that evicts the least recently used pages.

    Reading a page, or writing it again, makes it the most recently used; `contains` does not.
    `page_bytes` maps each kind of page (the last byte of a key) to the size counted for a page.
    With `page_bytes`, simulations can store placeholders of any length in place of pages, even
    empty ones. A read succeeds only if the buffer is as long as the stored bytes.
    """

    def __init__(
        self, *, capacity_bytes: int | None, page_bytes: Mapping[int, int] | None = None
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be at least 0, got {capacity_bytes}")
        self._capacity_bytes = capacity_bytes
        self._page_bytes = None if page_bytes is None else dict(page_bytes)
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = Lock()
        self._stats = StorageStats()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        pages = self._pages
        with self._lock:
            return list(map(pages.__contains__, keys))

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._lock:
            return [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        with self._lock:
            return [self._write(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                payload = self._pages.pop(key, None)
                if payload is not None:
                    self._stats.stored_bytes -= self._size(key, payload)

    def stats(self) -> StorageStats:
        with self._lock:
            return replace(self._stats, stored_pages=len(self._pages))

    def close(self) -> None:
        with self._lock:
            self._pages.clear()
            self._stats.stored_bytes = 0

    def _size(self, key: bytes, payload: bytes | memoryview) -> int:
        if self._page_bytes is None:
            return len(payload)
        return self._page_bytes[key[-1]]

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        payload = self._pages.get(key)
        if payload is None or len(payload) != buffer.nbytes:
            return False
        if payload:  # the buffer of an empty stand-in may be read-only
            buffer[:] = payload
        self._pages.move_to_end(key)
        return True

    def _write(self, key: bytes, buffer: memoryview) -> bool:
        if key in self._pages:
            self._pages.move_to_end(key)
            return True
        payload = bytes(buffer)
        size_bytes = self._size(key, payload)
        if self._capacity_bytes is not None:
            if size_bytes > self._capacity_bytes:
                return False
            while self._stats.stored_bytes + size_bytes > self._capacity_bytes:
                oldest, evicted = self._pages.popitem(last=False)
                self._stats.stored_bytes -= self._size(oldest, evicted)
        self._pages[key] = payload
        self._stats.stored_bytes += size_bytes
        return True
