"""Eviction of Mamba states by the computation that they save."""

from hicache.cache.tree.entry import Entry
from hicache.policies.world import World


class FlopAwareStates:
    """Ranks Mamba states for eviction by their last use and by the FLOPs per byte that they save.

    A state saves the FLOPs of the tokens since the state before it. The bytes include the KV pages
    of these tokens, because a hit needs the pages too. `alpha` weights the saved FLOPs against the
    last use. Other kinds of data keep LRU order.
    """

    def __init__(self, world: World, *, alpha: float = 1.0) -> None:
        # `alpha` x 1,000 uses of the cache are worth the FLOPs per byte of a first page
        self._world = world
        self._page_bytes = world.unit_bytes["host"]["full"]
        self._scale = alpha * 1000 * self._page_bytes / world.flops(0, world.page_size)

    def rank(self, entry: Entry, tier: str, kind: str) -> float | None:
        if kind != "mamba":
            return None
        start = entry.parent.end if entry.parent else 0
        pages = (entry.end - start) // self._world.page_size
        num_bytes = entry.bytes + pages * self._page_bytes
        return entry.used + self._scale * self._world.flops(start, entry.end) / num_bytes
