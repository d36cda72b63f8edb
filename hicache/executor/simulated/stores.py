"""Storage of a simulated run: it holds keys, and no pages."""

from collections.abc import Sequence
from typing import Protocol

from hicache.cache.tree.keys import Key, key_bytes
from hicache.storage.base import Storage


class KeyStore(Protocol):
    def contains(self, keys: Sequence[Key]) -> list[bool]: ...

    def read(self, keys: Sequence[Key]) -> int:
        """Read the pages of `keys` in order; return how many come before the first missing page."""

    def write(self, keys: Sequence[Key]) -> int: ...

    def delete(self, keys: Sequence[Key]) -> None: ...


class EndlessStore:
    def __init__(self) -> None:
        self._stored: set[Key] = set()

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        if self._stored.isdisjoint(keys):  # most writes are new
            return [False] * len(keys)
        return list(map(self._stored.__contains__, keys))

    def read(self, keys: Sequence[Key]) -> int:
        flags = self.contains(keys)
        return flags.index(False) if False in flags else len(flags)

    def write(self, keys: Sequence[Key]) -> int:
        self._stored.update(keys)
        return 0

    def delete(self, keys: Sequence[Key]) -> None:
        self._stored.difference_update(keys)


class StandIns:
    """Lets a simulation without page contents use a storage engine.

    Each page consists of its own key. So the simulation still notices damaged pages.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return self._storage.contains(key_bytes(keys))

    def read(self, keys: Sequence[Key]) -> int:
        wanted = key_bytes(keys)
        buffers = [bytearray(key) for key in wanted]
        flags = self._storage.read(wanted, [memoryview(buffer) for buffer in buffers])
        for index, (key, buffer, flag) in enumerate(zip(wanted, buffers, flags, strict=True)):
            if not flag or buffer != key:
                return index
        return len(wanted)

    def write(self, keys: Sequence[Key]) -> int:
        pages = key_bytes(keys)
        return self._storage.write(pages, [memoryview(page) for page in pages]).count(False)

    def delete(self, keys: Sequence[Key]) -> None:
        self._storage.delete(key_bytes(keys))
