"""Checksums around a storage engine that has none of its own or is not trusted."""

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

from hicache.storage.base import Storage, StorageStats
from hicache.storage.digest import page_digest
from hicache.storage.guards.base import GuardStorage


class CheckedStorage(GuardStorage):
    """A wrapper around a storage engine that returns only unchanged pages of this process.

    The wrapper keeps a 16-byte digest of each page that it writes. Pages that other processes wrote
    are misses. The digests also detect corruption on the way between the engine and the caller.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._digests: dict[bytes, bytes] = {}
        self._lock = Lock()
        self._damaged_pages = 0

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        results = self._inner.read(keys, buffers)
        return [
            result and self._is_right(key, buffer)
            for key, buffer, result in zip(keys, buffers, results, strict=True)
        ]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            digest = page_digest(b"", key, buffer)
            with self._lock:
                self._digests.setdefault(key, digest)
        return self._inner.write(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._inner.delete(keys)
        with self._lock:
            for key in keys:
                self._digests.pop(key, None)

    def stats(self) -> StorageStats:
        stats = self._inner.stats()
        return replace(stats, damaged_pages=stats.damaged_pages + self._damaged_pages)

    def _is_right(self, key: bytes, buffer: memoryview) -> bool:
        with self._lock:
            digest = self._digests.get(key)
        if digest is None:
            return False
        if page_digest(b"", key, buffer) == digest:
            return True
        with self._lock:
            self._damaged_pages += 1
        return False
