"""Eviction policies, and the queue of the nodes that may be evicted.

A policy is any object with `priority(node)`: the smallest goes first. It may look at `tick` (last
touch), `created` (its number), `hit_count`, `num_pages` and `start`. A leaf's priority should only
grow while it waits: it is asked for again when the leaf is about to go, and one that fell is not
noticed before. How often it is asked depends on how many steps are taken at once, so what is drawn
should belong to the node.
"""

import heapq
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


class VictimQueue:
    """The nodes that may be evicted, best victim first; equal ones in the order of their arrival.

    A heap with one entry per node. The entry stays when the node leaves, and its priority is
    corrected when it comes to the top: touching a node costs nothing.
    """

    def __init__(self, priority: Callable[[Node], Priority]) -> None:
        self._priority = priority
        self._heap: list[
            tuple[Priority, int, Node]
        ] = []  # with the number of each, or an older one
        self._entered: set[Node] = set()  # those with an entry
        self._valid: dict[Node, int] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._valid)

    def __contains__(self, node: Node) -> bool:
        return node in self._valid

    def add(self, node: Node) -> None:
        """Add a node; no effect if it is in the queue. O(log n), or O(1) if its entry is left."""
        valid, entered = self._valid, self._entered
        if node in valid:
            return
        valid[node] = number = self._next_number
        self._next_number = number + 1
        if node in entered:
            return
        entered.add(node)
        heapq.heappush(self._heap, (self._priority(node), number, node))
        if len(entered) > 64 + 4 * len(valid):
            self._heap = [entry for entry in self._heap if entry[2] in valid]
            self._entered = set(valid)
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Remove a node, if it is in the queue. O(1)."""
        self._valid.pop(node, None)

    def best(self) -> Node | None:
        """The node to evict first; it stays. Amortised O(log n)."""
        heap, valid = self._heap, self._valid
        anew: set[int] = set()  # ranked in this call: a policy of a user's may draw each time
        while heap:
            ranked, number, node = heap[0]
            current = valid.get(node)
            if current is None:
                heapq.heappop(heap)
                self._entered.discard(node)
                continue
            priority = self._priority(node)
            if current == number and (priority == ranked or current in anew):
                return node
            anew.add(current)
            heapq.heapreplace(heap, (priority, current, node))
        return None

    def nodes(self) -> set[Node]:
        """Return all nodes in the queue, for the checks."""
        return set(self._valid)
