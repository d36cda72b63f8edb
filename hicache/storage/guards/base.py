"""An engine behind another: what every guard passes on."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache.storage.base import Storage, StorageStats

Result = TypeVar("Result")


class GuardStorage:
    """Passes every call on to the engine it guards, through `_call`."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is stored now."""
        return self._call(lambda: self._inner.contains(keys), [False] * len(keys))

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers."""
        return self._call(lambda: self._inner.read(keys, buffers), [False] * len(keys))

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Store pages."""
        return self._call(lambda: self._inner.write(keys, buffers), [False] * len(keys))

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget pages; missing ones are ignored."""
        self._call(lambda: self._inner.delete(keys), None)

    def stats(self) -> StorageStats:
        """What the engine counts."""
        return self._inner.stats()

    def close(self) -> None:
        """Close the engine."""
        self._inner.close()

    def _call(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """What the engine answers; `otherwise` is for a guard that answers in its stead."""
        return call()
