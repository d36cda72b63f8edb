"""The kinds of data that a model caches, and the data of each kind that a request needs to resume.

A *kind* is what one sort of layers caches of the tokens: full-attention KV, sliding windows or
Mamba states. Each kind has a number, which is its index in every list by kind. The number also
selects the last byte of a storage key. The tree, copies, prefetches and checks iterate over the
model's `Kinds`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hicache.models import PLAIN, LayerKind, ModelConfig, coded_page_bytes

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
        _refuse_unless_possible(self.all, own, of, page_size)
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


def _refuse_unless_possible(
    kinds: tuple[Kind, ...], own: dict[int, Kind], of: dict[Extent, list[int]], page_size: int
) -> None:
    names = {kind.name for kind in own.values()}
    riders = [kind for kind in kinds if kind.rider_of is not None]
    if len({kind.name for kind in kinds}) < len(kinds) or len(own) + len(riders) < len(kinds):
        raise ValueError(f"two kinds have one name or number: {kinds}")
    for kind in riders:
        if kind.rider_of not in names:
            raise ValueError(f"kind {kind.name} rides on {kind.rider_of}, which has no pool")
    if of[Extent.path] != [FULL]:
        raise ValueError(f"full must be the only path, got the numbers {of[Extent.path]}")
    if len(of[Extent.point]) > 1:
        raise ValueError(f"a second point must ride on the first, got {of[Extent.point]}")
    if min(own) < 0 or max(own) >= len(KEY_TAGS):
        raise ValueError(f"numbers must lie in [0, {len(KEY_TAGS)}), got {sorted(own)}")
    if not all(own[number].window_len > 0 for number in of[Extent.window] + of[Extent.chunk]):
        raise ValueError(f"a window must have tokens: {kinds}")
    if of[Extent.point] and any(kind.is_replayed for kind in kinds):
        raise ValueError("cache.window=replay needs a model without states, which it would repeat")
    for number in of[Extent.chunk]:
        if own[number].window_len % page_size:
            raise ValueError(
                f"cache.page_size must divide the chunks of {own[number].name}, "
                f"{own[number].window_len} tokens, got {page_size}"
            )


def named_kinds(
    page_size: int, *, window_len: int = 0, has_states: bool = False, page_bytes: Iterable[int] = ()
) -> Kinds:
    sizes = dict(zip(range(len(KIND_NAMES)), page_bytes, strict=False))
    kinds = [Kind(name="full", number=FULL, page_bytes=sizes.get(FULL, 1))]
    if window_len:
        extent, size = Extent.window, sizes.get(SWA, 1)
        kinds.append(
            Kind(name="swa", number=SWA, extent=extent, window_len=window_len, page_bytes=size)
        )
    if has_states:
        size = sizes.get(MAMBA, 1)
        kinds.append(Kind(name="mamba", number=MAMBA, extent=Extent.point, page_bytes=size))
    return Kinds(kinds, page_size)


def model_kinds(
    model: ModelConfig, page_size: int, tp: int, form: str = PLAIN, *, replays: bool = False
) -> Kinds:
    """Return the kinds of data that `model` caches, with the bytes of a page of each kind.

    `page_size` is in tokens. `tp` is the number of tensor-parallel devices. `form` is the number
    format of cached values, such as fp8; "plain" keeps the model's own format. `replays` is True if
    sliding windows are recomputed instead of cached (`cache.window=replay`).

    Raises:
        ValueError: `page_size` does not fit the data of the model.
    """
    sizes = [
        coded_page_bytes(model, kind, page_size, form) * model.kv_copies(kind, tp)
        for kind in LayerKind
    ]
    named = named_kinds(
        page_size,
        window_len=model.window_len if sizes[SWA] else 0,
        has_states=sizes[MAMBA] > 0,
        page_bytes=sizes,
    )
    extent = Extent.chunk if model.window_restarts else Extent.window
    kinds = [
        replace(kind, extent=extent, is_replayed=replays) if kind.number == SWA else kind
        for kind in named.all
    ]
    kinds += [
        Kind(
            name=part.name,
            number=model.kind_names.index(part.name) if part.window_len else -1,
            extent=Extent.window if part.window_len else Extent.path,
            window_len=part.window_len,
            is_replayed=replays and part.window_len > 0,
            rider_of=None if part.window_len else part.rides_on,
            page_bytes=model.part_page_bytes(part, page_size, tp),
        )
        for part in model.parts
    ]
    return Kinds(kinds, page_size)


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
