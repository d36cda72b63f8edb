"""Eviction by rank: simple policies of the full KV of leaves; windows and states keep LRU order.

`rank` is called when something must be evicted: for each leaf that has become evictable since the
last eviction, and again for the leaf that is about to be evicted. A leaf's rank should only grow
while the leaf waits; an earlier fall has no effect. The number of calls depends on how many steps
are taken at once, so a policy that draws random numbers should draw once per entry.
"""

from hashlib import blake2b

from hicache.cache.tree.entry import Entry
from hicache.policies.world import World

Rank = tuple[float, ...] | None


class Lfu:
    """Evicts the least frequently used radix-tree nodes first.

    Of nodes with equally many uses, the least recently used is evicted first.
    """

    def rank(self, entry: Entry, tier: str, kind: str) -> Rank:
        return (entry.uses, entry.used) if kind == "full" else None


class UsedAgain:
    """Evicts radix-tree nodes that were used once before nodes that were used again.

    Within each of the two groups, the least recently used node is evicted first. SGLang calls this
    slru, and vLLM has it, too; segmented LRU of the literature is `hicache.policies.queues.Slru`.
    """

    def rank(self, entry: Entry, tier: str, kind: str) -> Rank:
        return (float(entry.uses >= 2), entry.used) if kind == "full" else None


class Fifo:
    """Evicts the radix-tree nodes first that were cached first."""

    def rank(self, entry: Entry, tier: str, kind: str) -> Rank:
        return (entry.created,) if kind == "full" else None


class Random:
    """Evicts radix-tree nodes in random order, as a baseline for other policies.

    The order depends only on the seed of the run and on the nodes. A node that is cached anew gets
    a new random number.
    """

    def __init__(self, world: World) -> None:
        self._seed = world.seed

    def rank(self, entry: Entry, tier: str, kind: str) -> Rank:
        if kind != "full":
            return None
        name = f"{self._seed}/{entry.created}/{entry.start}".encode()
        return (float(int.from_bytes(blake2b(name, digest_size=6).digest(), "little")),)
