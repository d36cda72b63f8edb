"""The kinds of data that a model caches, and the data of each kind that a request needs to resume.

A *kind* is what one sort of layers caches of the tokens: full-attention KV, sliding windows or
Mamba states. Each kind has a number, which is its index in every list by kind. The number also
selects the last byte of a storage key. The tree, copies, prefetches and checks iterate over the
model's `Kinds`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

FULL, SWA, MAMBA = range(3)
Position = TypeVar("Position", int, NDArray[np.int64])
KIND_NAMES = ("full", "swa", "mamba")  # by number; other kinds have higher numbers
# by number: the last byte of a page's key in storage
KEY_TAGS = b"fsm34567"


class Extent(Enum):
    """States which pages of a cached prefix a request needs to resume after the prefix.

    The answer depends on the type of layer. Full attention needs all pages (`path`). A sliding
    window needs the last pages (`window`). Chunked attention needs the pages of the current chunk
    (`chunk`). Mamba layers need one state at the end of the prefix (`point`).
    """

    path = "every page from the root to the boundary"
    window = "the last pages before the boundary; all of them if there are fewer"
    chunk = "the pages since the last multiple of the window's length; none at a multiple"
    point = "the boundary itself"


@dataclass(frozen=True, slots=True)
class Window:
    """The last pages of a cached prefix that a request needs to resume after the prefix.

    For sliding-window attention, `is_chunk` is False: the last `num_pages` pages are needed. For
    chunked attention, `is_chunk` is True: attention restarts every `num_pages` pages. Then the
    pages since the last restart are needed.
    """

    num_pages: int
    is_chunk: bool = False

    def first(self, end: Position) -> Position:
        """Return the first page that a request needs to resume after a prefix of `end` pages.

        The result is negative if the prefix is shorter than the sliding window.
        """
        return end - (end % self.num_pages if self.is_chunk else self.num_pages)


Extents = tuple[tuple[int, Window], ...]  # by number of a kind
_POINT = Window(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of data that a model caches, such as full-attention KV or Mamba states.

    Attributes:
        name: the name in metrics and messages.
        number: the index in lists by kind; unused if `rider_of` is set.
        extent: which part of a prefix must be cached so that a request can resume there.
        window_len: tokens in a sliding window or an attention chunk; 0 for other kinds.
        is_replayed: True if no tier keeps the pages, and a request computes its window again.
        rider_of: the name of another kind whose pages also contain this kind's data. None means
            that this kind has pages of its own.
        page_bytes: bytes of a page or Mamba state slot, summed over all devices of an engine.
    """

    name: str
    number: int = -1
    extent: Extent = Extent.path
    window_len: int = 0
    is_replayed: bool = False
    rider_of: str | None = None
    page_bytes: int = 1


class Kinds:
    """All kinds of data that one model caches, such as full-attention KV and Mamba states.

    Each kind has a number; full-attention KV is number 0, and the other kinds are useless without
    it.

    Attributes:
        page_size: tokens per page.
        size: length of a list with one item per number. Items of unused numbers have no meaning.
        numbers: kinds with a page pool of their own, ascending.
        paged: kinds that are stored in pages, not in state slots.
        kept: kinds of `paged` that the radix tree keeps.
        aux: all `numbers` except full-attention KV.
        windows: (number, pages) of each kept kind with a sliding window or attention chunk.
        replayed: the same for the windows that are not kept but computed again.
        all_windows: the same for both.
        window_lens: tokens of each sliding window or chunk, by number.
        points: the kinds of which a hit needs one state at its end: the number of the Mamba
            states, or nothing.
        extents: (number, pages) of each kind except full-attention KV that the tree keeps. A hit
            needs the data of so many pages before its end.
        lost_with: by number, the kinds that are evicted together from an inner tree node.
        names: by number.
        page_bytes: bytes of a page or state slot, by number.
        units: tokens per page, or 1 for Mamba states, by number.
    """

    def __init__(self, kinds: Iterable[Kind], page_size: int) -> None:
        self.page_size = page_size
        self.all = tuple(kinds)
        own = {kind.number: kind for kind in self.all if kind.rider_of is None}
        of = {extent: [n for n in sorted(own) if own[n].extent is extent] for extent in Extent}
        self.size = max(len(KIND_NAMES), *(number + 1 for number in own))
        self.numbers = tuple(sorted(own))
        self.aux = self.numbers[1:]
        in_windows = sorted(of[Extent.window] + of[Extent.chunk])
        self.paged = (FULL, *in_windows)
        self.points = tuple(of[Extent.point])
        self.window_lens = {number: own[number].window_len for number in in_windows}
        pages = {number: -(-length // page_size) for number, length in self.window_lens.items()}
        windows = [(n, Window(pages[n], own[n].extent is Extent.chunk)) for n in in_windows]
        self.all_windows: Extents = tuple(windows)
        self.replayed: Extents = tuple(each for each in windows if own[each[0]].is_replayed)
        self.windows: Extents = tuple(each for each in windows if each not in self.replayed)
        self.kept = (FULL, *(number for number, _ in self.windows))
        self._chunks = [window.num_pages for _, window in self.windows if window.is_chunk]
        self.extents: Extents = (*self.windows, *((number, _POINT) for number in self.points))
        self.lost_with = [self.numbers, *((number,) for number in range(1, self.size))]
        for number in of[Extent.window]:
            self.lost_with[number] = (number, *self.points)
        self.units = [1 if number in self.points else page_size for number in range(self.size)]
        self.names = [*KIND_NAMES, *([""] * (self.size - len(KIND_NAMES)))]
        self.page_bytes = [0] * self.size
        for number, kind in own.items():
            self.names[number] = kind.name
            self.page_bytes[number] = sum(
                each.page_bytes for each in self.all if kind.name in (each.name, each.rider_of)
            )

    def count(self, kind: int, num_pages: int) -> int:
        return 1 if kind in self.points else num_pages

    def replay_start(self, end: int) -> int:
        """Return the page at which a request with a hit of `end` pages starts to compute.

        That is `end`, unless windows are recomputed instead of cached (`cache.window=replay`): then
        the request computes the last window of the hit again.
        """
        if not self.replayed:
            return end
        return max(min([end, *(window.first(end) for _, window in self.replayed)]), 0)

    def node_end(self, start: int, end: int) -> int:
        """Return the page at which a radix-tree node that starts at page `start` must end.

        The result is `end`, or less if the model has chunked attention: a node must not cross the
        boundary between two chunks.
        """
        if not self._chunks:
            return end
        return min([end, *(start - start % pages + pages for pages in self._chunks)])


def lengths_with(present: Iterable[bool], window: Window, start: int = 0) -> list[int]:
    """Return the prefix lengths after which a request can resume, ascending.

    Lengths are in pages and count from page `start`: length 1 ends with page `start`. `present[i]`
    is True if page `start + i` is cached. A request can resume after a prefix if the last pages
    that the attention `window` spans are cached. Pages before `start` count as cached.
    """
    there = np.fromiter(present, bool)
    lengths = np.arange(1, there.size + 1)
    gaps = np.maximum.accumulate(np.where(there, 0, lengths))  # the last length without its page
    is_whole = (there | window.is_chunk) & (gaps <= window.first(start + lengths) - start)
    found: list[int] = lengths[(gaps == 0) | is_whole].tolist()
    return found
