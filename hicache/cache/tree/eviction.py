"""The queue of the nodes that may be evicted, and its default order."""

import heapq
from collections.abc import Callable, Iterator

from hicache.cache.kinds import FULL
from hicache.cache.tree.node import Node

Priority = tuple[float, ...]
Ranking = Callable[[Node], Priority]


def by_last_use(kind: int) -> Ranking:
    """Return the order in which a kind's data was last used; that of a split window by place."""
    if kind == FULL:
        return lambda node: (node.tick,)
    # of a window of several nodes, the first goes first; a node that ends there has one point
    return lambda node: (node.aux_ticks[kind], node.end)


class VictimQueue:
    """The nodes that may be evicted, best victim first; equal ones in the order of their arrival.

    A heap with one entry per node. The entry stays when the node leaves, and its priority is
    corrected when it comes to the top: touching a node costs nothing.
    """

    def __init__(self, priority: Ranking) -> None:
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

    def __iter__(self) -> Iterator[Node]:
        """All nodes, in the order of their arrival."""
        return iter(self._valid)

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
