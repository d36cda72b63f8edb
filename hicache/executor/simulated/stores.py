"""Storage of a simulated run: it holds keys, and no pages."""

from collections.abc import Sequence
from typing import Protocol

from hicache.cache.tree.keys import Key, key_bytes
from hicache.storage.base import Storage


class KeyStore(Protocol):
    """What is stored, by key."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is stored now."""
        ...

    def read(self, keys: Sequence[Key]) -> int:
        """How many lead that could be read."""
        ...

    def write(self, keys: Sequence[Key]) -> int:
        """Store keys; how many found no room."""
        ...

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget keys; missing ones are ignored."""
        ...


class EndlessStore:
    """Memory without a bound, in which nothing can go wrong."""

    def __init__(self) -> None:
        self._stored: set[Key] = set()

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is stored now."""
        return list(map(self._stored.__contains__, keys))

    def read(self, keys: Sequence[Key]) -> int:
        """How many lead that are stored."""
        flags = self.contains(keys)
        return flags.index(False) if False in flags else len(flags)

    def write(self, keys: Sequence[Key]) -> int:
        """Store them all."""
        self._stored.update(keys)
        return 0

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget keys."""
        self._stored.difference_update(keys)


class StandIns:
    """An engine whose pages are stand-ins: each is its own key, so that damage shows."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is stored now."""
        return self._storage.contains(key_bytes(keys))

    def read(self, keys: Sequence[Key]) -> int:
        """How many lead that came, and came undamaged."""
        wanted = key_bytes(keys)
        buffers = [bytearray(key) for key in wanted]
        flags = self._storage.read(wanted, [memoryview(buffer) for buffer in buffers])
        for index, (key, buffer, flag) in enumerate(zip(wanted, buffers, flags, strict=True)):
            if not flag or buffer != key:
                return index
        return len(wanted)

    def write(self, keys: Sequence[Key]) -> int:
        """Store stand-ins; how many found no room."""
        pages = key_bytes(keys)
        return self._storage.write(pages, [memoryview(page) for page in pages]).count(False)

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget keys."""
        self._storage.delete(key_bytes(keys))
