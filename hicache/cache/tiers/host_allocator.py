"""Pages and slots of the host, and how room is made there."""

from collections import Counter

from hicache.cache.pages import PageIds, Pools
from hicache.cache.tiers.storage_writes import StorageWriter
from hicache.cache.tree.actions import FreePages, free_evicted
from hicache.cache.tree.arrivals import Arrivals
from hicache.cache.tree.node import FULL, HOST
from hicache.cache.tree.radix_tree import RadixTree


class HostAllocator:
    """Hands out host pages (mamba: slots), evicting what the tree can spare."""

    def __init__(
        self,
        tree: RadixTree,
        pools: Pools,
        counters: Counter[str],
        arrivals: Arrivals,
        writer: StorageWriter | None,
        *,
        evicts_whole: bool = False,
    ) -> None:
        """`arrivals`, `writer`: are told of what leaves; no writer without storage.

        `evicts_whole`: `make_room` evicts for all pages, and not for those that are missing.
        """
        self._tree = tree
        self._pools = pools
        self._counters = counters
        self._arrivals = arrivals
        self._writer = writer
        self._evicts_whole = evicts_whole

    def allocate(self, kind: int, count: int, *, evict: bool = True) -> PageIds | None:
        """This many, or none of them; `evict`: make room if there is too little."""
        pool = self._pools[HOST][kind]
        if evict:
            while pool.num_free < count:
                if not self.evict_one(kind, count - pool.num_free):
                    return None
        return pool.allocate(count)

    def free(self, kind: int, page_ids: PageIds) -> None:
        """Give back what was allocated and has not become the tree's."""
        self._pools[HOST][kind].free(page_ids)

    def make_room(self, kind: int, count: int) -> None:
        """Evict until so many pages are free, or as far as eviction is possible."""
        pool = self._pools[HOST][kind]
        if pool.num_free >= count:
            return
        wanted = count + pool.num_free * self._evicts_whole
        while pool.num_free < wanted and self.evict_one(kind, wanted - pool.num_free):
            pass

    def evict_one(self, kind: int, missing: int) -> bool:
        """Drop the next victim's data, as much as is missing; False if there is none."""
        victim = self._tree.residency.host_victim(kind)
        if victim is None:
            return False
        if kind == FULL:
            self._tree.trim(victim, missing)
        if self._writer is not None:
            self._writer.on_leaving(victim, kind)
        actions: list[FreePages] = []
        self._tree.evict_host(victim, kind, actions)
        free_evicted(actions, self._pools, self._counters, self._arrivals)
        return True
