"""Which nodes may be evicted, and which of them goes next."""

import heapq
from collections.abc import Callable

from hicache.cache.tree.eviction import Priority
from hicache.cache.tree.node import Node


class VictimQueue:
    """The nodes that may be evicted, best victim first; of equal ones, the first that came.

    A heap in which each node has one entry, which stays when the node leaves and is put right when
    it surfaces: so touching a node costs nothing, and leaving for a while next to nothing.
    """

    def __init__(self, priority: Callable[[Node], Priority]) -> None:
        self._priority = priority
        self._heap: list[tuple[Priority, int, Node]] = []  # with each one's number, or an older
        self._entered: set[Node] = set()  # those with an entry
        self._valid: dict[Node, int] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._valid)

    def __contains__(self, node: Node) -> bool:
        return node in self._valid

    def add(self, node: Node) -> None:
        """Enter a node; nothing if it is there. O(log n), or O(1) if it was here before."""
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
        """Forget a node, if it is here. O(1)."""
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
        """All of them, for the checks."""
        return set(self._valid)
