"""A step as its kernels read it: tiles, page tables, ends and tokens, sent in one pinned copy.

A tile is one page of one sequence, with the rows (tokens of the page) that the step computes. The
tiles of a sequence are adjacent, and so are its new tokens among the rows of all tiles. A fixed
number of tiles is computed together, as a group. The last group is filled up with tiles that have
no rows.

Sizes: B tiles, R rows of a tile (the page size), C columns of a page table, E ends.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hicache.cache.pages import PageIds
from hicache.executor.real.pools import TorchPools
from hicache.kernels import send

Numbers = NDArray[np.integer[Any]]


class HoleError(RuntimeError):
    pass


class Stretch(NamedTuple):
    """Consecutive tokens of one sequence that a step computes.

    Attributes:
        tokens: all tokens of the sequence as packed int32.
        start: position of the first token to compute.
        end: position after the last token to compute.
        pages: by kind, page ids of the sequence in order. -1 means that the page is missing.
        slot: slot of the sequence's Mamba state. -1 means that the model has no such state.
        captures: lengths in tokens, ascending, after which the Mamba state is also copied to
            another slot.
        logits_from: position of the first token whose logits are wanted. None means the last one.
    """

    tokens: bytes
    start: int
    end: int
    pages: Sequence[PageIds]
    slot: int = -1
    captures: Sequence[tuple[int, int]] = ()
    logits_from: int | None = None


class Group(NamedTuple):
    """Tiles that are computed together.

    Attributes:
        tiles: their place among all tiles.
        end: the largest position, over the tiles, at which the rows to compute end.
        pages: for each tile with rows, the index of its page in the sequence, and the end of the
            rows to compute.
    """

    tiles: slice
    end: int
    pages: Sequence[tuple[int, int]]


class _Tiles(NamedTuple):
    stretch: Numbers  # each field by tile
    page: Numbers  # index in the sequence
    first_row: Numbers
    end_row: Numbers


class StepTables:
    """The tables of a step on the device, for all its sequences.

    Attributes:
        groups: the tiles in groups.
        rows: by stretch, the place of its tokens among the rows of all tiles.
        tokens: [B, R] int32, token ids.
        positions: [B] int32, position of row 0.
        choices: [B · R, 4] int32, tiles of one row each, for attention to chosen tokens: a row sees
            a sequence of the tokens chosen for it. Empty if the model has no index keys.
        sequences: by stretch, [S, 5] int32 as `kernels.scan.scan` reads them.
        ends: [E, 2] int32, as there.
        tiles: by kind of attention, [B, 4] int32 as `kernels.attend.attend` reads them.
        tables: by kind of attention, [B, C] int32, page ids.

    Raises:
        HoleError: a page that the step reads or writes is missing.
    """

    def __init__(self, pools: TorchPools, stretches: Sequence[Stretch], together: int) -> None:
        size, kinds = pools.page_size, list(pools.windows)
        tiles = _tiles(stretches, size)
        num_tiles = -(-len(tiles.page) // together) * together
        self.groups = _groups(tiles, size, together)
        self.rows = _rows(stretches, size)
        ends = [
            [(end - each.start, slot) for end, slot in (*each.captures, (each.end, each.slot))]
            for each in stretches
        ]
        parts = [
            _tokens(stretches, self.rows, num_tiles * size),
            _padded(tiles.page * size, num_tiles),
            _choices(tiles, size, num_tiles, pools.top_tokens),
            np.arange(num_tiles + 1),
            np.array(list(chain.from_iterable(ends))),
            _sequences(stretches, self.rows, [len(pairs) for pairs in ends]),
        ]
        widths = []
        for kind in kinds:
            seen = _first_seen(tiles.page, size, pools.windows[kind])
            fields = tiles.page * size, tiles.first_row, tiles.end_row, seen
            ids, spans = _spans(stretches, kind, tiles, seen)
            parts += [_padded(np.stack(fields, 1), num_tiles), ids, _padded(spans, num_tiles)]
            widths.append(int(spans[:, 1].max()))
        flat = [torch.from_numpy(part.astype(np.int32).ravel()) for part in parts]
        tokens, self.positions, choices, bounds, every_end, sequences, *sent = send(
            flat, pools.device
        )
        self.tokens = tokens.view(num_tiles, size)
        self.choices = choices.view(-1, 4)
        self.ends, self.sequences = every_end.view(-1, 2), sequences.view(-1, 5)
        self.tiles, self.tables = dict[int, Tensor](), dict[int, Tensor]()
        rest = iter(sent)
        for kind, width in zip(kinds, widths, strict=True):
            self.tiles[kind] = next(rest).view(-1, 4)
            self.tables[kind] = pools.plane.page_table(
                next(rest), next(rest).view(-1, 2), bounds, num_columns=width
            )


def _tiles(stretches: Sequence[Stretch], size: int) -> _Tiles:
    starts, ends = np.array([(each.start, each.end) for each in stretches]).T
    counts = -(-ends // size) - starts // size
    of = np.repeat(np.arange(len(stretches)), counts)
    page = np.arange(len(of)) + (starts // size + counts - counts.cumsum())[of]
    first_row, end_row = starts[of] - page * size, ends[of] - page * size
    return _Tiles(of, page, first_row.clip(min=0), end_row.clip(max=size))


def _groups(tiles: _Tiles, size: int, together: int) -> list[Group]:
    pages = list(zip(tiles.page.tolist(), tiles.end_row.tolist(), strict=True))
    return [
        Group(
            slice(first, first + together),
            max(page * size + end_row for page, end_row in pages[first : first + together]),
            pages[first : first + together],
        )
        for first in range(0, len(pages), together)
    ]


def _rows(stretches: Sequence[Stretch], size: int) -> list[slice]:
    rows, first = [], 0  # `first`: of the stretch's first tile
    for each in stretches:
        begin = first + each.start % size
        rows.append(slice(begin, begin + each.end - each.start))
        first += (-(-each.end // size) - each.start // size) * size
    return rows


def _sequences(
    stretches: Sequence[Stretch], rows: Sequence[slice], num_ends: Sequence[int]
) -> Numbers:
    after = np.cumsum(num_ends)
    slots, starts = np.array([(each.slot, each.start) for each in stretches]).T
    first_rows = [each.start for each in rows]
    return np.stack([slots, first_rows, after - num_ends, after, starts], axis=1)


def _tokens(stretches: Sequence[Stretch], rows: Sequence[slice], count: int) -> Numbers:
    tokens = np.zeros(count, np.int32)
    for each, its_rows in zip(stretches, rows, strict=True):
        held = np.frombuffer(each.tokens, "<i4", each.end - each.start, 4 * each.start)
        tokens[its_rows] = held
    return tokens


def _choices(tiles: _Tiles, size: int, num_tiles: int, top_tokens: int) -> Numbers:
    if not top_tokens:
        return np.zeros(0, np.int32)
    row = np.arange(size)
    count = (tiles.page[:, None] * size + row + 1).clip(max=top_tokens)  # of tokens chosen
    is_computed = (row >= tiles.first_row[:, None]) & (row < tiles.end_row[:, None])
    fields = np.stack([count - 1, 0 * count, 0 * count + 1, 0 * count], axis=-1)
    return _padded(fields * is_computed[:, :, None], num_tiles)


def _first_seen(page: Numbers, size: int, window_len: int) -> Numbers:
    # index of the first page that a row of page `page` sees
    return (page * size - window_len + 1).clip(min=0) // size if window_len else 0 * page


def _spans(
    stretches: Sequence[Stretch], kind: int, tiles: _Tiles, seen: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the page ids that the tiles see, and for each tile the part that it sees.

    The parts are [tiles, 2]: index of the first page id, and number of page ids.
    """
    ids, shifts = list[PageIds](), []
    num_ids = 0
    for number, each in enumerate(stretches):
        first_tile, end_tile = np.searchsorted(tiles.stretch, [number, number + 1])
        first, end = int(seen[first_tile]), int(tiles.page[end_tile - 1]) + 1
        its_ids = each.pages[kind][first:end]
        if len(its_ids) < end - first or min(its_ids) < 0:
            raise HoleError(
                f"pages [{first}, {end}) of a sequence are {its_ids}: at least one is missing"
            )
        ids.append(its_ids)
        shifts.append(num_ids - first)
        num_ids += end - first
    spans = np.stack([seen + np.array(shifts)[tiles.stretch], tiles.page + 1 - seen], axis=1)
    return np.fromiter(chain.from_iterable(ids), np.int32, num_ids), spans


def _padded(by_tile: Numbers, num_tiles: int) -> Numbers:
    return np.pad(by_tile, [(0, num_tiles - len(by_tile)), *[(0, 0)] * (by_tile.ndim - 1)])
