"""Built-in eviction policies. They rank the full KV of leaves; windows and states keep LRU.

A leaf's rank should only grow while it waits: `rank` is called again when the leaf is about to be
evicted, and an earlier fall has no effect. The number of calls depends on how many steps are taken
at once, so a policy that draws random numbers should draw once per entry.
"""

from collections.abc import Callable
from hashlib import blake2b

from hicache.cache.tree.entry import Entry
from hicache.policies.world import World

Rank = tuple[float, ...] | None


class Lru:
    """The node used longest ago first; the default order of every kind."""


class Lfu:
    """The node used least often first; ties by last use."""

    def rank(self, entry: Entry, tier: str, kind: str) -> Rank:
        return (entry.uses, entry.used) if kind == "full" else None


class Slru:
    """Nodes used once before nodes used again; within each segment, by last use."""

    def rank(self, entry: Entry, tier: str, kind: str) -> Rank:
        return (float(entry.uses >= 2), entry.used) if kind == "full" else None


class Fifo:
    """The oldest node first."""

    def rank(self, entry: Entry, tier: str, kind: str) -> Rank:
        return (entry.created,) if kind == "full" else None


class Random:
    """Random order: the baseline for other policies.

    An entry's number depends on its creation and place, so a new entry gets another one.
    """

    def __init__(self, world: World) -> None:
        self._seed = world.seed

    def rank(self, entry: Entry, tier: str, kind: str) -> Rank:
        if kind != "full":
            return None
        name = f"{self._seed}/{entry.created}/{entry.start}".encode()
        return (float(int.from_bytes(blake2b(name, digest_size=6).digest(), "little")),)


EVICTIONS: dict[str, Callable[..., object]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "random": Random,
}
