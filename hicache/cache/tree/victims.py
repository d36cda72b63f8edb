"""Which nodes may be evicted, and which of them goes next."""

import heapq
from collections.abc import Callable
from itertools import count

from hicache.cache.tree.eviction import Priority
from hicache.cache.tree.node import Node


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
