"""In which order leaves leave a tier.

A policy is any object with `priority(node)`: the smallest goes first. It may look at `tick` (last
touch), `created` (its number), `hit_count`, `num_pages` and `start`. A leaf's priority should only
grow while it waits: it is asked for again when the leaf is about to go, and one that fell is not
noticed before. How often it is asked depends on how many steps are taken at once, so what is drawn
should belong to the node.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

from hicache.cache.tree.node import Node

Priority = tuple[float, ...]


class EvictionPolicy(Protocol):
    """Ranks leaves."""

    def priority(self, node: Node) -> Priority:
        """The smallest is evicted first; equal ones in the order they became leaves."""
        ...


class Lru:
    """The one touched longest ago."""

    def priority(self, node: Node) -> Priority:
        """Last touch."""
        return (node.tick,)


class Lfu:
    """The one hit least often; of those, the one touched longest ago."""

    def priority(self, node: Node) -> Priority:
        """Hits, then last touch."""
        return (node.hit_count, node.tick)


class Slru:
    """Those hit once before those hit again; in each segment, the one touched longest ago."""

    def priority(self, node: Node) -> Priority:
        """Segment, then last touch."""
        return (float(node.hit_count >= 2), node.tick)


class Fifo:
    """The oldest."""

    def priority(self, node: Node) -> Priority:
        """Creation."""
        return (node.created,)


class Random:
    """Any of them: what a policy must be better than.

    A node's lot is drawn once, by its number: how often it is asked for must not matter, because
    that depends on how many steps were taken at once.
    """

    def __init__(self, seed: float = 0) -> None:
        self._seed = seed

    def priority(self, node: Node) -> Priority:
        """The same each time; another for a node that came anew, and for each half of a split."""
        drawn = blake2b(f"{self._seed}/{node.created}/{node.start}".encode(), digest_size=6)
        return (float(int.from_bytes(drawn.digest(), "little")),)


POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "random": Random,
}
