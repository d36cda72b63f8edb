"""Pages in this process's memory that leave it as from a Mooncake store.

`storage=mooncake_rdma` simulates a Mooncake store with this engine; `storage=mooncake` uses a real
one.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from math import ceil
from random import Random
from zlib import crc32

from hicache.storage.engines.memory import MemoryStorage

NUM_SHARDS = 1024  # of the master's table
FULL_SHARE = 0.95  # share of the memory above which pages are evicted
EVICTED_SHARE = 0.05  # share of the pages that one pass evicts


class MooncakeMaster(MemoryStorage):
    """A storage engine in this process's memory that evicts pages as Mooncake's master does.

    The numbers are the defaults of Mooncake's master at 738b3753 (April 2026). Keys are hashed to
    1,024 shards. When more than 95 % of the memory is used, a pass visits all shards, from a random
    one on, and evicts 5 % of the pages: from each shard those that were asked for, read or written
    least recently. A shard of a small store has few pages, so that also recent pages leave. The
    protection of pages in the first seconds after a read is left out.
    """

    def __init__(
        self, *, capacity_bytes: int | None, page_bytes: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(capacity_bytes=capacity_bytes, page_bytes=page_bytes)
        self._calls = count()
        self._used: dict[bytes, int] = {}  # number of the last call that used a page
        self._shards: list[set[bytes]] = [set() for _ in range(NUM_SHARDS)]
        self._random = Random(0)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._use(keys, super().contains(keys))

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self._use(keys, super().read(keys, buffers))

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        call = next(self._calls)
        with self._lock:
            return [self._put(key, buffer, call) for key, buffer in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        super().delete(keys)
        with self._lock:
            self._forget(keys)

    def _put(self, key: bytes, buffer: memoryview, call: int) -> bool:
        if key in self._pages:
            return True
        capacity = self._capacity_bytes
        size_bytes = self._size(key, buffer)
        if capacity is not None and self._stats.stored_bytes + size_bytes > capacity:
            self._evict()
            return False
        self._pages[key] = bytes(buffer)
        self._stats.stored_bytes += size_bytes
        self._used[key] = call
        self._shards[crc32(key) % NUM_SHARDS].add(key)
        if capacity is not None and self._stats.stored_bytes > FULL_SHARE * capacity:
            self._evict()
        return True

    def _use(self, keys: Sequence[bytes], flags: list[bool]) -> list[bool]:
        with self._lock:
            call = next(self._calls)
            found = (key for key, flag in zip(keys, flags, strict=True) if flag)
            self._used.update((key, call) for key in found if key in self._pages)
        return flags

    def _evict(self) -> None:
        seen = evicted = 0
        first = self._random.randrange(NUM_SHARDS)
        for number in range(NUM_SHARDS):
            shard = self._shards[(first + number) % NUM_SHARDS]
            seen += len(shard)
            wanted = min(ceil(seen * EVICTED_SHARE) - evicted, len(shard))
            if wanted <= 0:
                continue
            last = sorted(self._used[key] for key in shard)[wanted - 1]
            leaving = [key for key in shard if self._used[key] <= last]
            evicted += len(leaving)
            for key in leaving:
                self._stats.stored_bytes -= self._size(key, self._pages.pop(key))
            self._forget(leaving)

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._used.pop(key, None)
            self._shards[crc32(key) % NUM_SHARDS].discard(key)
