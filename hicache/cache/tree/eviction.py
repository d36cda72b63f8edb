"""The queue of evictable nodes."""

import heapq
from collections.abc import Callable, Iterator

from hicache.cache.tree.node import Node

Priority = tuple[float, ...]
Ranking = Callable[[Node], Priority]


class VictimQueue:
    """The radix-tree nodes that may be evicted, in the order of eviction.

    The node with the smallest `priority` comes first. Nodes of equal priority keep the order in
    which they were added.
    """

    def __init__(self, priority: Ranking) -> None:
        self.priority = priority
        self._heap: list[
            tuple[Priority, int, Node]
        ] = []  # (priority, number, node), possibly outdated
        self._entered: set[Node] = set()  # nodes with a heap entry
        self._valid: dict[Node, int] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._valid)

    def __contains__(self, node: Node) -> bool:
        return node in self._valid

    def __iter__(self) -> Iterator[Node]:
        return iter(self._valid)

    def add(self, node: Node) -> None:
        # a heap with one entry per node, which stays after `discard`; `best` corrects outdated
        # priorities at the top, so that touching a node costs nothing. O(log n), or O(1) with an
        # old entry
        valid, entered = self._valid, self._entered
        if node in valid:
            return
        valid[node] = number = self._next_number
        self._next_number = number + 1
        if node in entered:
            return
        entered.add(node)
        heapq.heappush(self._heap, (self.priority(node), number, node))
        if len(entered) > 64 + 4 * len(valid):
            self._heap = [entry for entry in self._heap if entry[2] in valid]
            self._entered = set(valid)
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._valid.pop(node, None)

    def best(self) -> Node | None:
        """Return the node to evict first, or None if the queue is empty.

        The node stays in the queue.
        """
        heap, valid = self._heap, self._valid
        anew: set[int] = set()  # ranked in this call; a user's policy may change its ranks
        while heap:
            ranked, number, node = heap[0]
            current = valid.get(node)
            if current is None:
                heapq.heappop(heap)
                self._entered.discard(node)
                continue
            priority = self.priority(node)
            if current == number and (priority == ranked or current in anew):
                return node
            anew.add(current)
            heapq.heapreplace(heap, (priority, current, node))
        return None
