"""What became of the pages that one engine has held, for whoever asks why one is not there.

Everybody who makes room says here what for; the tree says what went. Nothing here decides anything.
"""

from enum import IntEnum

import numpy as np

from hicache.cache.tree.census import Census, Chain, PageNumbers, Stored, grown
from hicache.cache.tree.node import DEVICE, FULL, Node


class Pressure(IntEnum):
    """What wanted the room of a page that was evicted."""

    none = 0
    prefill = 1
    decode = 2
    load_back = 3
    slot = 4  # a request's working states, or a checkpoint
    back_up = 5
    prefetch = 6


# of `Fates.marks`
ON_DEVICE, ON_HOST, WAS_HELD, WAS_COPIED, COPY_DROPPED = (np.uint8(1 << bit) for bit in range(5))
IS_HELD = ON_DEVICE | ON_HOST
HAS_COPY = ON_HOST | WAS_HELD | WAS_COPIED
NOBODY, THROWN_AWAY = 0, -1  # of `Fates.owners`; requests are one more than their number


class Fates:
    """The marks and the last loss of every page of the census, by component and page number.

    A node or sequence without page numbers leaves no trace. `owners` are the admitted requests that
    compute a page which they have not published yet.
    """

    def __init__(self, census: Census | None = None) -> None:
        self.census = Census() if census is None else census
        self.now_ns = 0
        self.marks = np.zeros((3, 0), np.uint8)
        self.lost_for = np.zeros((3, 0), np.uint8)  # a Pressure
        self.lost_to = np.zeros((3, 0), np.int32)  # the request that made it
        self.lost_ns = np.zeros((3, 0), np.int64)
        self.owners = np.zeros(0, np.int32)
        self._pressure = Pressure.none
        self._request_id = -1

    def reserve(self) -> None:
        """Have a place for every page of the census."""
        size = len(self.census.is_seen)
        if size == len(self.owners):
            return
        self.marks, self.owners = grown(self.marks, size), grown(self.owners, size)
        self.lost_for, self.lost_to = grown(self.lost_for, size), grown(self.lost_to, size)
        self.lost_ns = grown(self.lost_ns, size)

    # -- whoever makes room --------------------------------------------------------------------

    def press(self, pressure: Pressure, chain: Chain | None = None) -> Pressure:
        """From now on room is made for this, by this request if one is named.

        Returns what it was made for before.
        """
        before, self._pressure = self._pressure, pressure
        if chain is not None:
            self._request_id = chain.request_id
        return before

    # -- what the tree holds -------------------------------------------------------------------

    def put(self, node: Node, tier: int, kind: int) -> None:
        """The node has just been given data."""
        numbers = node.numbers_of(kind)
        if not len(numbers):
            return
        self.marks[kind][numbers] |= ON_DEVICE | WAS_HELD if tier == DEVICE else HAS_COPY
        self.census.is_seen[numbers] = True

    def drop(self, node: Node, tier: int, kind: int) -> None:
        """The node has just lost it."""
        numbers = node.numbers_of(kind)
        if not len(numbers):
            return
        self.marks[kind][numbers] &= ~(ON_DEVICE if tier == DEVICE else ON_HOST)
        if node.held[1 - tier][kind] is None:
            self.lost_for[kind][numbers] = self._pressure
            self.lost_to[kind][numbers] = self._request_id
            self.lost_ns[kind][numbers] = self.now_ns

    def drop_copy(self, node: Node, kind: int) -> None:
        """There is no room on the host for the node's copy."""
        numbers = node.numbers_of(kind)
        if len(numbers):
            self.marks[kind][numbers] |= COPY_DROPPED

    def store(self, numbers: PageNumbers, kind: int, stored: Stored) -> None:
        """How far pages are on their way to storage; what is there stays there."""
        census = self.census
        missing = numbers[census.stored[kind][numbers] != Stored.written]
        census.stored[kind][missing] = stored
        census.stored_ns[kind][missing] = self.now_ns

    def take_out(self, numbers: PageNumbers, kind: int) -> None:
        """An exclusive storage has given pages away."""
        self.census.stored[kind][numbers] = Stored.never

    def find(self, numbers: PageNumbers, kind: int) -> None:
        """Storage says that it has pages."""
        self.census.is_seen[numbers] = True
        self.store(numbers, kind, Stored.written)

    # -- what requests compute -----------------------------------------------------------------

    def admit(self, chain: Chain, first: int) -> None:
        """A request begins to compute its pages from `first` on."""
        self.census.is_seen[chain.numbers] = True
        self.owners[chain.numbers[first:]] = chain.request_id + 1

    def publish(self, chain: Chain, first: int, end: int) -> None:
        """A request's pages `[first, end)` are in the tree."""
        self.owners[chain.numbers[first:end]] = NOBODY

    def abandon(self, chain: Chain, first: int, end: int) -> None:
        """A request gives back pages `[first, end)`, which nobody else has."""
        pages = chain.numbers[first:end]
        mine = pages[self.owners[pages] == chain.request_id + 1]
        self.owners[mine] = THROWN_AWAY

    def forget(self, chain: Chain) -> None:
        """A request will not compute what it has not computed yet; nobody has seen that."""
        mine = chain.numbers[self.owners[chain.numbers] == chain.request_id + 1]
        self.owners[mine] = NOBODY
        is_known = (self.marks[FULL][mine] > 0) | (self.census.stored[FULL][mine] == Stored.written)
        self.census.is_seen[mine[~is_known]] = False
