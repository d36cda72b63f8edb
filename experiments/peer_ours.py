"""Our cache, driven one request at a time as the peer's is; every copy is done at once."""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.peer_sides import Hits, Pools, Residency
from hicache.cache.pages import PageAllocator
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import CopyState, StorageDelete, StorageWrite
from hicache.cache.tree.eviction import Lru
from hicache.cache.tree.match import MatchResult
from hicache.cache.tree.node import FULL, MAMBA, SWA
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.config import PrefetchConfig


class _Running(NamedTuple):
    sequence: Sequence
    prompt_len: int
    total_len: int


class OurSide:
    """`PrefixCache` and `Prefetcher`, with what the scheduler does around them."""

    def __init__(self, pools: Pools, config: PrefetchConfig) -> None:
        page = self._page = pools.page_size
        self._tree = RadixTree(
            page_size=page,
            policy=Lru(),
            window_len=pools.window_len,
            has_states=pools.num_states > 0,
            split_refreshes=True,
            leaving_refreshes=True,
        )
        ratio = pools.host_ratio
        has_host = int(pools.host_tokens > 0)  # the peer's host pools have a page more than asked
        # the peer's requests hold a state more than ours: two to capture into, in turn
        num_states = pools.num_states and pools.num_states - pools.num_running
        sizes = (
            (pools.device_tokens // page, pools.swa_tokens // page, num_states),
            (
                pools.host_tokens // page + has_host,
                int(pools.swa_tokens * ratio) // page + has_host,
                int(pools.num_states * ratio) + has_host,
            ),
        )
        device, host = ([PageAllocator(count) for count in tier] for tier in sizes)
        self.cache = PrefixCache(
            self._tree,
            (device, host),
            page_bytes=(1, 1, 1),
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
        start = end = new = 0
        if self._prefetcher is not None:
            prefetch = self._prefetcher.prefetch_from_storage(
                number, sequence, match, prompt_len, 0
            )
            if prefetch is not None:
                start = prefetch.start_page * self._page
                self._carry_out(self._prefetcher)
                end = start + prefetch.num_pages * self._page
                new = prefetch.published_pages * self._page
        match = cache.match(sequence, prompt_len)
        lock = cache.tree.lock(match.best_node)
        acquired = cache.acquire(sequence, match, storage_start=start, storage_end=end)
        cache.tree.release(lock)
        assert acquired is not None
        self._settle()
        assert cache.extend(sequence, prompt_len), "the device pool is too small for what runs"
        if self._prefetcher is not None:
            self._prefetcher.forget(number, used_pages=0)
        self._publish_prompt(sequence, match, prompt_len)
        self._settle()
        self._running[number] = _Running(sequence, prompt_len, len(tokens) - 1)
        on_device = min(match.device_prefix_len, acquired.cached_len)
        brought = acquired.cached_len - on_device
        # as the peer counts it: pages read for the sake of their state or window alone, which the
        # host had already, are the host's
        from_storage = min(new, brought)
        return Hits(on_device, brought - from_storage, from_storage)

    def _publish_prompt(self, sequence: Sequence, match: MatchResult, prompt_len: int) -> None:
        # as the peer's scheduler does: where the prompt left a longer match whose window or state
        # was gone, that point is published first, and the rest with the answer
        cache, page = self.cache, self._page
        is_hybrid = self._tree.has_swa or self._tree.has_states
        end = prompt_len
        if is_hybrid and match.branch_len is not None:
            end = match.branch_len
        if self._tree.has_states:
            # it keeps one state of a prompt, and nothing behind it
            if prompt_len - sequence.tree_pages * page < page:
                return
            spare = cache.take_state_slot()
            assert spare is not None, "the device pool is too small for the states of what runs"
            self._keep_state(sequence, end // page)
            sequence.boundary_slot = spare
        cache.leave_window(sequence, end - 1)
        cache.publish(sequence, end // page)
        cache.leave_window(sequence, prompt_len - 1)

    def _keep_state(self, sequence: Sequence, num_pages: int) -> None:
        assert sequence.boundary_slot is not None
        sequence.states[num_pages] = sequence.boundary_slot
        sequence.boundary_slot = None

    def finish(self, number: int) -> None:
        """Its answer is complete."""
        running = self._running.pop(number)
        cache, sequence, total_len = self.cache, running.sequence, running.total_len
        assert cache.extend(sequence, total_len), "the device pool is too small for what runs"
        cache.leave_window(sequence, total_len - 1)
        num_pages = total_len // self._page
        if self._tree.has_states:
            if num_pages > running.prompt_len // self._page:
                self._keep_state(sequence, num_pages)
            else:  # no state at a later page
                num_pages = sequence.tree_pages
        cache.finish(sequence, num_pages)
        self._settle()

    def residency(self) -> Residency:
        """What is held now."""
        device, host = self._tree.residency.resident
        page = self._page
        return Residency(
            device[FULL] * page,
            host[FULL] * page,
            device[SWA] * page,
            host[SWA] * page,
            device[MAMBA],
            host[MAMBA],
        )

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
            found = (self._there(prefetch, kind) for kind in (FULL, SWA, MAMBA))
            prefetch.restorable = prefetch.find_restorable(*found)
            prefetcher.on_queried(prefetch)
        prefetcher.outbox.clear()
        for prefetch in prefetcher.reads:
            prefetch.completed_pages = prefetch.num_pages
            prefetch.sidecars_read = prefetch.sidecars_found = prefetch.is_read = True
            prefetcher.on_read(prefetch)
        prefetcher.reads.clear()

    def _there(self, prefetch: Prefetch, kind: int) -> list[bool]:
        keys = prefetch.keys(kind, 0, prefetch.num_pages)
        return [key in self._stored for key in keys]
