"""What became of the pages that one engine has held, for whoever asks why one is not there.

Everybody who makes room says here what for; the tree says what went. Nothing here decides anything.
"""

from typing import Final

import numpy as np

from hicache.cache.kinds import FULL, Kinds, named_kinds
from hicache.cache.tree.node import DEVICE, Node
from hicache.cache.tree.page_registry import Chain, PageNumbers, PageRegistry, Stored, place_of


class Pressure:
    """What wanted the room of a page that was evicted; plain numbers, like `Stored`."""

    none: Final = 0
    prefill: Final = 1
    decode: Final = 2
    load_back: Final = 3
    slot: Final = 4  # a request's working states, or a checkpoint
    back_up: Final = 5
    prefetch: Final = 6


# of `PageHistory.marks`
ON_DEVICE, ON_HOST, WAS_HELD, WAS_COPIED, COPY_DROPPED = (np.uint8(1 << bit) for bit in range(5))
IS_HELD = ON_DEVICE | ON_HOST
HAS_COPY = ON_HOST | WAS_HELD | WAS_COPIED
NOBODY, THROWN_AWAY = 0, -1  # of `PageHistory.owners`; requests are one more than their number


class PageHistory:
    """The marks and the last loss of every page of the registry, by kind and page number.

    A node or sequence without page numbers leaves no trace. `owners` are the admitted requests that
    compute a page which they have not published yet.
    """

    def __init__(self, registry: PageRegistry | None = None, kinds: Kinds | None = None) -> None:
        """`kinds`: by default those with names."""
        kinds = kinds or named_kinds(1, window_len=1, has_states=True)
        self._points = kinds.points
        self.registry = PageRegistry({}, 1, kinds.size) if registry is None else registry
        size = self.registry.num_pages
        self.now_ns = 0
        self.marks = [np.zeros(size, np.uint8) for _ in range(kinds.size)]
        self.lost_for = [np.zeros(size, np.uint8) for _ in range(kinds.size)]  # a Pressure
        self.lost_to = [
            np.zeros(size, np.int32) for _ in range(kinds.size)
        ]  # the request that made it
        self.lost_ns = [np.zeros(size, np.int64) for _ in range(kinds.size)]
        self.owners = np.zeros(size, np.int32)
        self._pressure = Pressure.none
        self._request_id = -1

    # -- whoever makes room --------------------------------------------------------------------

    def press(self, pressure: int, chain: Chain | None = None) -> int:
        """From now on room is made for this, by this request if one is named.

        Returns what it was made for before.
        """
        before, self._pressure = self._pressure, pressure
        if chain is not None:
            self._request_id = chain.request_id
        return before

    # -- what the tree holds -------------------------------------------------------------------

    def numbers_of(self, node: Node, kind: int) -> PageNumbers:
        """The numbers of a node's pages; a point's is that of the page before it."""
        return node.numbers[-1:] if kind in self._points else node.numbers

    def put(self, node: Node, tier: int, kind: int) -> None:
        """The node has just been given data."""
        if len(node.numbers):
            place = place_of(self.numbers_of(node, kind))
            self.marks[kind][place] |= ON_DEVICE | WAS_HELD if tier == DEVICE else HAS_COPY
            self.registry.is_seen[place] = True

    def drop(self, node: Node, tier: int, kind: int) -> None:
        """The node has just lost it."""
        if not len(node.numbers):
            return
        place = place_of(self.numbers_of(node, kind))
        self.marks[kind][place] &= ~(ON_DEVICE if tier == DEVICE else ON_HOST)
        if node.held[1 - tier][kind] is None:
            self.lost_for[kind][place] = self._pressure
            self.lost_to[kind][place] = self._request_id
            self.lost_ns[kind][place] = self.now_ns

    def drop_copy(self, node: Node, kind: int) -> None:
        """There is no room on the host for the node's copy."""
        numbers = self.numbers_of(node, kind)
        if len(numbers):
            self.marks[kind][place_of(numbers)] |= COPY_DROPPED

    def store(self, numbers: PageNumbers, kind: int, stored: int) -> None:
        """How far pages are on their way to storage; what is there stays there."""
        if not len(numbers):
            return
        place = place_of(numbers)
        is_there = self.registry.stored[kind][place] == Stored.written
        if is_there.any():
            place = numbers[~is_there]
        self.registry.stored[kind][place] = stored
        if stored == Stored.written:
            self.registry.written_ns[kind][place] = self.now_ns

    def take_out(self, numbers: PageNumbers, kind: int) -> None:
        """An exclusive storage has given pages away."""
        self.registry.stored[kind][numbers] = Stored.never

    def find(self, numbers: PageNumbers, kind: int) -> None:
        """Storage says that it has pages."""
        self.registry.is_seen[numbers] = True
        self.store(numbers, kind, Stored.written)

    # -- what requests compute -----------------------------------------------------------------

    def admit(self, chain: Chain, first: int) -> None:
        """A request begins to compute its pages from `first` on."""
        numbers = chain.numbers[first:]  # what it has found is in the tree, and was seen there
        if len(numbers):
            place = place_of(numbers)
            self.registry.is_seen[place] = True
            self.owners[place] = chain.request_id + 1

    def publish(self, chain: Chain, first: int, end: int) -> None:
        """A request's pages `[first, end)` are in the tree."""
        if first < end:
            self.owners[place_of(chain.numbers[first:end])] = NOBODY

    def abandon(self, chain: Chain, first: int, end: int) -> None:
        """A request gives back pages `[first, end)`, which nobody else has."""
        if first >= end:
            return
        pages = chain.numbers[first:end]
        mine = pages[self.owners[pages] == chain.request_id + 1]
        self.owners[mine] = THROWN_AWAY

    def forget(self, chain: Chain) -> None:
        """A request will not compute what it has not computed yet; nobody has seen that."""
        mine = chain.numbers[self.owners[chain.numbers] == chain.request_id + 1]
        self.owners[mine] = NOBODY
        is_known = (self.marks[FULL][mine] > 0) | (
            self.registry.stored[FULL][mine] == Stored.written
        )
        self.registry.is_seen[mine[~is_known]] = False
