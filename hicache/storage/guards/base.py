"""The base class of the wrappers around a storage engine."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache.storage.base import Storage, StorageStats

Result = TypeVar("Result")


class GuardStorage:
    """Base class of wrappers that pass all calls on to the storage engine inside.

    `contains`, `read`, `write` and `delete` pass through `_call`, which subclasses override.
    """

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._call(lambda: self._inner.contains(keys), [False] * len(keys))

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self._call(lambda: self._inner.read(keys, buffers), [False] * len(keys))

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self._call(lambda: self._inner.write(keys, buffers), [False] * len(keys))

    def delete(self, keys: Sequence[bytes]) -> None:
        self._call(lambda: self._inner.delete(keys), None)

    def stats(self) -> StorageStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()

    def _call(self, call: Callable[[], Result], otherwise: Result) -> Result:
        return call()
