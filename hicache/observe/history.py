"""The history of every cache page: which tiers held it, and how it was evicted.

A page has a number that stands for all tokens up to the end of the page. Equal numbers therefore
mean equal prefixes. Numbers rise along a prefix. In simulated runs, the cache itself uses these
numbers as the names of pages.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hicache.cache.kinds import FULL, KIND_NAMES, Extents, Kinds
from hicache.cache.tree.events import NO_DEMAND, Data, Demand
from hicache.cache.tree.keys import NUMBER_BYTES, PageNames
from hicache.cache.tree.node import DEVICE, Node
from hicache.cache.tree.sequence import Sequence
from hicache.engine.warm import pages_left
from hicache.request import Request, TokenSpans

PageNumbers = NDArray[np.int32]
Place = slice | PageNumbers  # an index of pages in a table


class Stored:
    """Codes for the progress of a page on its way to storage, such as `under_way` or `written`.

    A page here holds full-attention KV, sliding-window KV or a Mamba state.
    """

    # plain integers, since every access to a table would convert enum members
    never: Final = 0  # no write of it was queued
    dropped: Final = 1  # the write queue was full
    under_way: Final = 2
    written: Final = 3


# bits of `PageHistory.marks`
ON_DEVICE, ON_HOST, WAS_HELD, WAS_COPIED, COPY_DROPPED = (np.uint8(1 << bit) for bit in range(5))
IS_HELD = ON_DEVICE | ON_HOST
HAS_COPY = ON_HOST | WAS_HELD | WAS_COPIED
UNOWNED, THROWN_AWAY = 0, -1  # of `PageHistory.owners`; other values are a request id plus one


class PageRegistry:
    """Records which cache pages exist, and which are in the storage that several engines share.

    Attributes:
        numbers: [num_pages], the numbers of all different pages in the workload: 0, 1, ...
        is_seen: [num_pages], True if an earlier request had the page, or if storage reported it.
        stored: for each kind of page, [num_pages]: a code of `Stored`, which says how far the page
            is on its way to storage. Kinds are full-attention KV, sliding-window KV and Mamba
            states.
        written_ns: [num_pages] for each kind of page, when the write to storage ended.
    """

    def __init__(
        self, pages: Mapping[int, TokenSpans], num_kinds: int = len(KIND_NAMES), overlap: int = 0
    ) -> None:
        self.overlap = overlap  # tokens of the next page that a page's number stands for
        ends = (int((each.starts + each.counts).max(initial=0)) for each in pages.values())
        size = max(ends, default=0)
        self.numbers = np.arange(size, dtype=np.int32)
        self.is_seen = np.zeros(size, bool)
        self.stored = [np.zeros(size, np.uint8) for _ in range(num_kinds)]
        self.written_ns = [np.zeros(size, np.int64) for _ in range(num_kinds)]

    def warm(self, requests: Iterable[Request], names: PageNames, kinds: Kinds) -> None:
        for request in requests:
            numbers = request_pages(request, names.tokens(request), kinds.page_size, self.overlap)
            self.is_seen[numbers] = True
            for kind, at in pages_left(request, kinds, self.overlap):
                self.stored[kind][numbers[at]] = Stored.written


class PageHistory:
    """Records for each cache page of one engine which tiers hold it, and how it was last evicted.

    The cache calls one method for each event, such as an eviction.

    Attributes:
        owners: [num_pages], one plus the id of the request that computes the page now. The value is
            0 if there is no such request, and -1 if the computed page was thrown away.
    """

    def __init__(self, registry: PageRegistry, kinds: Kinds) -> None:
        self.kinds = kinds
        self.registry = registry
        size = len(registry.numbers)
        self.now_ns = 0
        self.marks = [np.zeros(size, np.uint8) for _ in range(kinds.size)]
        self.lost_for = [np.zeros(size, np.uint8) for _ in range(kinds.size)]  # a Purpose
        # the request that needed the room
        self.lost_to = [np.zeros(size, np.int32) for _ in range(kinds.size)]
        self.lost_ns = [np.zeros(size, np.int64) for _ in range(kinds.size)]
        self.owners = np.zeros(size, np.int32)
        self._under_way: dict[object, list[tuple[int, Place]]] = {}  # by write: kinds and pages

    # -- events of the cache -------------------------------------------------------------------

    def at(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def put(self, node: Node, tier: int, kind: int) -> None:
        place = self._place(node, kind)
        self.marks[kind][place] |= ON_DEVICE | WAS_HELD if tier == DEVICE else HAS_COPY
        self.registry.is_seen[place] = True

    def evicted(self, node: Node, tier: int, kind: int, demand: Demand) -> None:
        place = self._place(node, kind)
        self.marks[kind][place] &= ~(ON_DEVICE if tier == DEVICE else ON_HOST)
        if node.held[1 - tier][kind] is None:
            if demand == NO_DEMAND:  # the cache does not keep it, whether there is room or not
                self.marks[kind][place] &= ~WAS_HELD
            self.lost_for[kind][place] = demand.purpose
            self.lost_to[kind][place] = -1 if demand.request_id is None else demand.request_id
            self.lost_ns[kind][place] = self.now_ns

    def not_copied(self, node: Node, kind: int) -> None:
        self.marks[kind][self._place(node, kind)] |= COPY_DROPPED

    def published(self, sequence: Sequence, first: int, end: int) -> None:
        if first < end:
            self.owners[place_of(sequence_pages(sequence, first, end))] = UNOWNED

    def abandoned(self, sequence: Sequence, first: int, end: int) -> None:
        if first < end:
            self.owners[self._own(sequence, first, end)] = THROWN_AWAY

    def found(self, sequence: Sequence, start: int, restorable: Items[int], needs: Extents) -> None:
        # what storage has of a prefix
        numbers = sequence_pages(sequence, 0, start + restorable[-1])
        if self.registry.stored[FULL][numbers[-1]] == Stored.written:
            return  # always the case in a run that filled its storage itself
        ends = start + np.array(restorable)
        self._find(numbers[start:], FULL)
        for kind, window in needs:
            firsts = window.first(ends)
            for back in range(1, window.num_pages + 1):
                pages = (ends - back)[ends - back >= firsts]
                self._find(numbers[np.maximum(pages, start)], kind)

    def write_queued(self, write: object, items: Data) -> None:
        self._under_way[write] = places = list(self._places(items))
        self._store(places, Stored.under_way)

    def write_dropped(self, items: Data) -> None:
        self._store(self._places(items), Stored.dropped)

    def write_ended(self, write: object) -> None:
        self._store(self._under_way.pop(write), Stored.written)

    def taken_out(self, items: Data) -> None:
        for kind, place in self._places(items):
            self.registry.stored[kind][place] = Stored.never

    # -- what requests compute -----------------------------------------------------------------

    def admit(self, request: Request, tokens: bytes, first: int) -> None:
        overlap = self.registry.overlap
        numbers = request_pages(request, tokens, self.kinds.page_size, overlap)[first:]
        if len(numbers):
            place = place_of(numbers)
            self.registry.is_seen[place] = True
            self.owners[place] = request.id + 1

    def forget(self, sequence: Sequence) -> None:
        """Record that the request of this sequence was canceled.

        Pages of the request that never reached the cache are treated as never seen.
        """
        mine = self._own(sequence, 0, None)
        self.owners[mine] = UNOWNED
        is_known = (self.marks[FULL][mine] > 0) | (
            self.registry.stored[FULL][mine] == Stored.written
        )
        self.registry.is_seen[mine[~is_known]] = False

    # -- inside --------------------------------------------------------------------------------

    def _places(self, items: Data) -> Iterator[tuple[int, Place]]:
        return ((kind, self._place(node, kind)) for node, kind in items)

    def _place(self, node: Node, kind: int) -> Place:
        # pages of a node; a point (state) belongs to the page before it
        edge = node.edge[-NUMBER_BYTES:] if kind in self.kinds.points else node.edge
        return place_of(numbers_in(edge))

    def _own(self, sequence: Sequence, first: int, end: int | None) -> PageNumbers:
        pages = sequence_pages(sequence, first, end)
        if sequence.request_id is None:
            return pages[:0]
        own: PageNumbers = pages[self.owners[pages] == sequence.request_id + 1]
        return own

    def _find(self, numbers: PageNumbers, kind: int) -> None:
        self.registry.is_seen[numbers] = True
        self._store([(kind, numbers)], Stored.written)

    def _store(self, places: Iterable[tuple[int, Place]], stored: int) -> None:
        for kind, place in places:
            table = self.registry.stored[kind]
            known = table[place]
            if Stored.written in known.tobytes():  # storage keeps what it has
                place = self.registry.numbers[place][known != Stored.written]
            table[place] = stored
            if stored == Stored.written:
                self.registry.written_ns[kind][place] = self.now_ns


def numbers_in(names: bytes) -> PageNumbers:
    return np.frombuffer(names, np.int32)


def sequence_pages(sequence: Sequence, first: int, end: int | None) -> PageNumbers:
    stop = None if end is None else end * NUMBER_BYTES
    return numbers_in(sequence.tokens[first * NUMBER_BYTES : stop])


def request_pages(request: Request, tokens: bytes, page_size: int, overlap: int = 0) -> PageNumbers:
    # the last token of an answer is never fed back, so it has no KV
    num_pages = max(request.prompt_len + request.output_len - 1 - overlap, 0) // page_size
    return numbers_in(tokens)[:num_pages]


def num_leading(flags: NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(flags.argmin())


def place_of(numbers: PageNumbers) -> Place:
    # a slice is a faster index
    first, last = numbers.item(0), numbers.item(-1)
    return slice(first, last + 1) if last - first == len(numbers) - 1 else numbers
