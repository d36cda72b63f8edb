"""Our cache, driven one request at a time as the peer's is; every copy is done at once."""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.peer_sides import Hits, Pools, Residency
from hicache.cache.eviction import Lru
from hicache.cache.keys import COMPONENT_TAGS
from hicache.cache.node import DEVICE, FULL, HOST
from hicache.cache.pages import PageAllocator
from hicache.cache.prefetch import Prefetch
from hicache.cache.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.sequence import Sequence
from hicache.cache.transfer import CopyState, StorageDelete, StorageWrite
from hicache.cache.tree import RadixTree
from hicache.config import PrefetchConfig


class _Running(NamedTuple):
    sequence: Sequence
    prompt_len: int
    total_len: int


class OurSide:
    """`PrefixCache` and `Prefetcher`, with what the scheduler does around them."""

    def __init__(self, pools: Pools, config: PrefetchConfig) -> None:
        page = self._page = pools.page_size
        self._tree = RadixTree(page_size=page, policy=Lru(), split_refreshes=True)
        allocators = tuple(
            [PageAllocator(tokens // page), PageAllocator(0), PageAllocator(0)]
            for tokens in (pools.device_tokens, pools.host_tokens)
        )
        self.cache = PrefixCache(
            self._tree,
            (allocators[0], allocators[1]),
            page_bytes=(1, 0, 0),
            storage_queue_bytes=1 << 60 if pools.has_storage else None,
        )
        self._prefetcher = None
        if pools.has_storage:
            self._prefetcher = Prefetcher(self.cache, config, pools.host_tokens)
        self._stored: set[bytes] = set()
        self._running: dict[int, _Running] = {}

    def admit(self, number: int, tokens: NDArray[np.int32], prompt_len: int) -> Hits:
        """A request comes, is admitted at once and prefilled."""
        cache = self.cache
        sequence = Sequence(tokens.astype("<i4").tobytes())
        match = cache.match(sequence, prompt_len)
        start = end = 0
        if self._prefetcher is not None:
            prefetch = self._prefetcher.prefetch_from_storage(
                number, sequence, match, prompt_len, 0
            )
            if prefetch is not None:
                start = prefetch.start_page * self._page
                self._carry_out(self._prefetcher)
                end = start + prefetch.num_pages * self._page
        match = cache.match(sequence, prompt_len)
        lock = cache.tree.lock(match.best_node)
        acquired = cache.acquire(sequence, match, storage_start=start, storage_end=end)
        cache.tree.release(lock)
        assert acquired is not None
        self._settle()
        assert cache.extend(sequence, prompt_len), "the device pool is too small for what runs"
        if self._prefetcher is not None:
            self._prefetcher.forget(number, used_pages=0)
        cache.publish(sequence, prompt_len // self._page)
        self._settle()
        self._running[number] = _Running(sequence, prompt_len, len(tokens) - 1)
        return Hits(acquired.device_len, acquired.host_len, acquired.storage_len)

    def finish(self, number: int) -> None:
        """Its answer is complete."""
        running = self._running.pop(number)
        assert self.cache.extend(running.sequence, running.total_len)
        self.cache.finish(running.sequence, running.total_len // self._page)
        self._settle()

    def residency(self) -> Residency:
        """What is held now."""
        resident = self._tree.residency.resident
        return Residency(resident[DEVICE][FULL] * self._page, resident[HOST][FULL] * self._page)

    def close(self) -> None:
        """Nothing runs beside."""

    def _settle(self) -> None:
        # a back-up that is done asks for a write to storage
        outbox = deque(self.cache.outbox)
        self.cache.outbox.clear()
        while outbox:
            work = outbox.popleft()
            if isinstance(work, CopyState | StorageDelete):
                continue
            if isinstance(work, StorageWrite):
                self._stored.update(work.keys)
            self.cache.complete(work)
            outbox.extend(self.cache.outbox)
            self.cache.outbox.clear()

    def _carry_out(self, prefetcher: Prefetcher) -> None:
        for prefetch in prefetcher.outbox:
            prefetch.restorable = prefetch.find_restorable(self._there(prefetch), [], [])
            prefetcher.on_queried(prefetch)
        prefetcher.outbox.clear()
        for prefetch in prefetcher.reads:
            prefetch.completed_pages = prefetch.num_pages
            prefetch.sidecars_read = prefetch.is_read = True
            prefetcher.on_read(prefetch)
        prefetcher.reads.clear()

    def _there(self, prefetch: Prefetch) -> list[bool]:
        keys = prefetch.keys(FULL, 0, prefetch.num_pages)
        assert all(key.endswith(COMPONENT_TAGS[FULL]) for key in keys[:1])
        return [key in self._stored for key in keys]
