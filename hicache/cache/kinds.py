"""The kinds of data that a model caches, and what a hit needs of each.

A *kind* is what one sort of layers keeps of the tokens it has read. Two properties decide how the
cache treats it: the extent that a hit needs, and the kind that it rides on. The tree, transfers,
prefetches and checks iterate over the model's own list, `Kinds`.

The cache identifies a kind by its number, which is its index in every list by kind and its mark in
storage keys.
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
    """Which data of a kind a request needs to continue after a page boundary."""

    path = "every page from the root to the boundary"
    window = "the last pages before the boundary; all of them if there are fewer"
    chunk = "the pages since the last multiple of the window's length; none at a multiple"
    point = "the boundary itself"


@dataclass(frozen=True, slots=True)
class Window:
    """The pages before a boundary that a request needs to continue there.

    `num_pages`: the most pages; exactly those, or with `is_chunk` those since the last multiple of
    `num_pages`.
    """

    num_pages: int
    is_chunk: bool = False

    def first(self, end: Position) -> Position:
        """The first of these pages at boundary `end`; negative if a window has fewer pages."""
        return end - (end % self.num_pages if self.is_chunk else self.num_pages)


Extents = tuple[tuple[int, Window], ...]  # by number of a kind
_POINT = Window(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of cached data.

    Attributes:
        name: used in counters, measures and messages.
        number: index in lists by kind; unused for a rider.
        extent: what a hit needs. A point counts slots, all others count pages.
        window_len: tokens of a window or chunk; a chunk has whole pages.
        is_replayed: True if no tier keeps the pages: a request computes its window again.
        rider_of: name of the kind whose pages (or slots) also hold this kind's data. A rider has no
            pool, page table or key of its own: its bytes are a part of each such page.
        page_bytes: bytes of a page or a slot, over all devices of an engine.
    """

    name: str
    number: int = -1
    extent: Extent = Extent.path
    window_len: int = 0
    is_replayed: bool = False
    rider_of: str | None = None
    page_bytes: int = 1


class Kinds:
    """The kinds of one model.

    Full (number 0) is the only path, and all other kinds need it. There is at most one point: a
    second kind with that extent must ride on the first.

    Attributes:
        page_size: tokens per page.
        size: length of a list by kind. Entries of numbers that the model lacks are unused.
        numbers: kinds with a pool, ascending.
        paged: those of them that count pages.
        kept: those of `paged` that the tree keeps.
        aux: those of them other than full.
        windows: the kinds with a window or chunk that the tree keeps, each with its pages.
        replayed: those that it does not keep.
        window_lens: length in tokens, by kind.
        points: the kind whose extent is a point, if there is one.
        extents: what a stored prefix must end with, of every kind in `aux`.
        lost_with: by kind, the kinds that an inner node loses together with it: itself, and with a
            window that slides also the point.
        names: by kind.
        page_bytes: bytes of a page or slot with its riders, by kind.
        units: tokens per page, or 1 for a point, by kind.
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
        """The page at which a request with a hit of `end` pages starts to compute."""
        return max(min([end, *(window.first(end) for _, window in self.replayed)]), 0)

    def node_end(self, start: int, end: int) -> int:
        """Where a node of pages `[start, end)` must end, so that it has pages of one chunk."""
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
    """The kinds of a model whose engine has `tp` devices; with `replays` no window is kept.

    `form` is the number format (`models.FORMATS`), which sets the bytes; model parts keep their
    own.

    Raises:
        ValueError: a page would hold a fraction of an entry of a model part, or two chunks.
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
    """The lengths, in pages and ascending, after which a request can continue.

    `present`: which pages from page `start` on are present; the pages before them do not count.
    """
    lengths, gap = [], 0  # `gap`: the last length whose own page is missing
    for length, is_there in enumerate(present, 1):
        if not is_there:
            gap = length
        if gap <= max(window.first(start + length) - start, 0):
            lengths.append(length)
    return lengths
