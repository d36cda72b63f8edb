"""The queue of evictable nodes."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from hicache.cache.tree.node import Node

Priority = tuple[Any, ...]  # values that Python can compare
Ranking = Callable[[Node], Priority]


class VictimQueue(dict[Node, int]):
    """The radix-tree nodes that may be evicted, each with its number in the order of addition.

    `best` returns the node with the smallest `priority`; nodes of equal priority keep the order in
    which they were added. `pop(node, None)` removes a node.
    """

    def __init__(self, priority: Ranking) -> None:
        super().__init__()
        self.priority = priority
        # (priority, number, node), possibly outdated
        self._heap: list[tuple[Priority, int, Node]] = []
        self._unranked: list[Node] = []  # they enter the heap when `best` is called
        self._entered: set[Node] = set()  # nodes that are unranked or have a heap entry
        self._numbers = count()

    def add(self, node: Node) -> None:
        # a heap with one entry per node, which stays after `pop`; `best` corrects outdated
        # priorities at the top, so that touching a node costs nothing. O(1)
        if node in self:
            return
        self[node] = next(self._numbers)
        entered = self._entered
        if node in entered:
            return
        entered.add(node)
        self._unranked.append(node)
        if len(entered) > 64 + 4 * len(self):
            self._unranked = [each for each in self._unranked if each in self]
            self._heap = [entry for entry in self._heap if entry[2] in self]
            self._entered = set(self)
            heapq.heapify(self._heap)

    def best(self) -> Node | None:
        """Return the node to evict first, or None if the queue is empty.

        The node stays in the queue.
        """
        heap = self._heap
        for node in self._unranked:
            if node in self:
                heapq.heappush(heap, (self.priority(node), self[node], node))
            else:
                self._entered.discard(node)
        self._unranked.clear()
        anew: set[int] = set()  # ranked in this call; a user's policy may change its ranks
        while heap:
            ranked, number, node = heap[0]
            current = self.get(node)
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
