"""Pages and slots of the device: how many can be counted on, and how room is made."""

from collections import Counter

from hicache.cache.pages import PageIds, Pools
from hicache.cache.tiers.back_ups import BackUps
from hicache.cache.tree.actions import FreePages, free_evicted
from hicache.cache.tree.arrivals import Arrivals
from hicache.cache.tree.node import DEVICE, FULL, Node
from hicache.cache.tree.radix_tree import RadixTree


class DeviceAllocator:
    """Hands out device pages (mamba: slots), evicting what the tree can spare."""

    def __init__(
        self,
        tree: RadixTree,
        pools: Pools,
        counters: Counter[str],
        arrivals: Arrivals,
        write_back: BackUps | None,
    ) -> None:
        """`write_back`: copies what is about to be lost; none: it has a copy, or goes.

        `arrivals`: is told of what leaves the host with it.
        """
        self._tree = tree
        self._pools = pools
        self._counters = counters
        self._arrivals = arrivals
        self._write_back = write_back

    def evictable(self, kind: int) -> int:
        """Pages (mamba: slots) that eviction could free."""
        residency = self._tree.residency
        return residency.resident[DEVICE][kind] - residency.protected[DEVICE][kind]

    def allocate(self, kind: int, count: int, *, spare: int = 0) -> PageIds | None:
        """This many, or none of them; makes room if there is too little.

        `spare`: evict until so many more are free, if there is enough to evict.
        """
        pool = self._pools[DEVICE][kind]
        if pool.num_free < count + spare:
            if pool.num_free + self.evictable(kind) < count:
                return None  # evicting everything would not do
            self.evict(kind, count + spare - pool.num_free)
        return pool.allocate(count)

    def free(self, kind: int, page_ids: PageIds) -> None:
        """Give back what was allocated and has not become the tree's."""
        self._pools[DEVICE][kind].free(page_ids)

    def evict(self, kind: int, count: int) -> bool:
        """Drop at least this many, or all that may go; whether they were enough."""
        pool = self._pools[DEVICE][kind]
        wanted = pool.num_free + count
        stuck: list[Node] = []
        while pool.num_free < wanted and self._evict_one(kind, wanted - pool.num_free, stuck):
            pass
        for node in stuck:
            self._tree.residency.reconsider(node, kind)
        return pool.num_free >= wanted

    def _evict_one(self, kind: int, missing: int, stuck: list[Node]) -> bool:
        """Drop the data of the next victim that may go; those before it are passed over.

        False if there is none.
        """
        residency = self._tree.residency
        while (victim := residency.device_victim(kind)) is not None:
            if kind == FULL:
                self._tree.trim(victim, missing)
            if self._write_back is not None:
                self._write_back.save_victim(victim, kind)
                if not residency.may_leave_device(victim):
                    stuck.append(victim)
                    residency.pass_over(victim, kind)
                    continue
            actions: list[FreePages] = []
            self._tree.evict_device(victim, kind, actions)
            free_evicted(actions, self._pools, self._counters, self._arrivals)
            return True
        return False
