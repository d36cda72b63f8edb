"""A wrapper around a storage engine: the base class of every guard."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache.storage.base import Storage, StorageStats

Result = TypeVar("Result")


class GuardStorage:
    """Passes every call on to the engine that it guards, through `_call`."""

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
