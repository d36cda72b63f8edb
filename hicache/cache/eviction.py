"""In which order leaves leave a tier.

A policy is any object with `priority(node)`: the smallest goes first. It may look at `tick` (last
touch), `created` (its number), `hit_count`, `num_pages` and `start`. A leaf's priority should only
grow while it waits: it is asked for again when the leaf is about to go, and one that fell is not
noticed before. How often it is asked depends on how many steps are taken at once, so what is drawn
should belong to the node.
"""

import heapq
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from typing import Protocol

from hicache.cache.node import Node

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


class VictimQueue:
    """The nodes that may be evicted, best victim first.

    A heap whose stale entries are skipped, and whose outdated ones are ranked anew, when they
    surface: so touching a node costs nothing.
    """

    def __init__(self, priority: Callable[[Node], Priority]) -> None:
        self._priority = priority
        self._heap: list[tuple[Priority, int, Node]] = []
        self._valid: dict[Node, int] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._valid)

    def __contains__(self, node: Node) -> bool:
        return node in self._valid

    def add(self, node: Node) -> None:
        """Enter a node; nothing if it is there. O(log n)."""
        if node in self._valid:
            return
        number = next(self._numbers)
        self._valid[node] = number
        heapq.heappush(self._heap, (self._priority(node), number, node))
        if len(self._heap) > 64 + 4 * len(self._valid):
            self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Forget a node, if it is here. O(1)."""
        self._valid.pop(node, None)

    def best(self) -> Node | None:
        """The node to evict first; it stays. Amortised O(log n)."""
        heap, valid = self._heap, self._valid
        anew: set[int] = set()  # ranked in this call: a policy of a user's may draw each time
        while heap:
            ranked, number, node = heap[0]
            if valid.get(node) != number:
                heapq.heappop(heap)
                continue
            priority = self._priority(node)
            if priority == ranked or number in anew:
                return node
            anew.add(number)
            heapq.heapreplace(heap, (priority, number, node))
        return None

    def nodes(self) -> set[Node]:
        """All of them, for the checks."""
        return set(self._valid)
