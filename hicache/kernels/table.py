"""Copy tables: describe once what transfers between a pair of pools move.

A pool is a list of buffers: tensors whose first axis is the item (a page, a token row, a Mamba
slot). The other axes may have any order and any stride, as long as a row (the part contiguous on
both sides) is a multiple of 16 bytes. Every layout of a slab is such a list of views. So one table
serves layer-first to page-first, head-first, a slice of the heads, all layers, K and V at once, and
Mamba states of different sizes and dtypes. The table keeps its pools alive, and guarantees to the
kernels that every address and size is a multiple of 16 bytes.

Sizes: NB buffers, P items in a pool, NP pieces, R pieces of a buffer, G items of one transfer.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hicache.kernels.overlap import refuse_overlaps

WORD_BYTES = 8
ALIGN_BYTES = 16  # one 128-bit access
BURST_WORDS = 32  # 256 bytes: whole packets of the link and whole memory sectors
TILE_WORDS = 8192  # 64 KiB: 16 warps × 128 bytes per thread


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyTable:
    """Describes a pair of pools once, so that items (such as pages) can be copied many times.

    `src` and `dst` are the buffers of the two pools, one tensor [items, ...] per layer and K or V.
    A kernel copies an item in `pieces`, which are contiguous in both pools.
    """

    src: tuple[Tensor, ...]  # NB × [P, *rows, words] int64, the same rows on both sides
    dst: tuple[Tensor, ...]
    # [NP, 6] int64 on the device that copies: source and target address in bytes, source and target
    # stride between items in words, words of the piece, index of its first word in the item
    pieces: Tensor
    rows: Tensor  # [rows, 5] int64 on the host, in bytes: addresses, item strides, size
    piece_words: int  # words of the widest piece, a power of two
    pieces_together: int  # R if all buffers have equally many pieces, else 1
    in_place: bool  # source and target share rows

    @property
    def device(self) -> torch.device:
        """Return the device that copies: the CUDA device if one of the pools is on one."""
        return self.pieces.device

    @property
    def crosses_link(self) -> bool:
        return self.src[0].device != self.dst[0].device

    @property
    def num_src_items(self) -> int:
        return min(buffer.shape[0] for buffer in self.src)

    @property
    def num_dst_items(self) -> int:
        return min(buffer.shape[0] for buffer in self.dst)

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one item, such as a page, summed over all buffers."""
        return WORD_BYTES * sum(buffer.shape[1:].numel() for buffer in self.src)


class _Axis(NamedTuple):
    length: int
    src_stride: int
    dst_stride: int


class _Geometry(NamedTuple):
    address: int
    storage_address: int
    size: int  # of an element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    name: str


# A launch, or a captured graph, reads the addresses of a plan after `copy_table` has returned, so a
# plan is kept as long as all the memory that it points into.
_Places = tuple[tuple[_Geometry, ...], tuple[_Geometry, ...], torch.device]
_Axes = tuple[tuple[_Axis, ...], ...]  # of each buffer; the last axis is the row
_plans: dict[_Places, tuple[_Axes, CopyTable]] = {}  # tables without their buffers


def copy_table(src: Sequence[Tensor], dst: Sequence[Tensor]) -> CopyTable:
    """Describe the copy from the pool `src` to the pool `dst`.

    A pool is a list of buffers. The first axis of a buffer counts items, such as pages, token rows
    or Mamba slots.

    Args:
        src: tensors [items, ...] of any dtype, on one device or in pinned host memory.
        dst: one tensor for each tensor of `src`. An item has the same bytes in the same order in
            both tensors. `src` and `dst` may be the same pool.

    Raises:
        ValueError: the kernels do not support the pools; the message names the reason.
    """
    if len(src) != len(dst) or not src:
        raise ValueError(f"as many source as target buffers wanted, got {len(src)} and {len(dst)}")
    device = device_of({"source": src, "target": dst})
    sources, targets = (
        tuple(_geometry(buffer, f"{what} buffer {i}") for i, buffer in enumerate(buffers))
        for what, buffers in (("source", src), ("target", dst))
    )
    places = sources, targets, device
    plan = _plans.get(places)
    if plan is None:
        plan = _plans[places] = _plan(*places)
        for storage in {buffer.untyped_storage() for buffer in (*src, *dst)}:
            weakref.finalize(storage, _plans.pop, places, None)
    axes, table = plan
    src, dst = (
        tuple(map(partial(_as_words, side=side), buffers, axes))
        for side, buffers in enumerate((src, dst))
    )
    return replace(table, src=src, dst=dst)


def device_of(pools: Mapping[str, Sequence[Tensor]]) -> torch.device:
    """Return the device that copies between these pools: their CUDA device if there is one.

    Raises:
        ValueError: the pools lie on two devices, or one lies in host memory that is not pinned.
    """
    devices = {buffer.device for buffers in pools.values() for buffer in buffers}
    if len(devices - {torch.device("cpu")}) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"one device and the host wanted, got buffers on {listed}")
    device = max(devices, key=lambda d: d.type != "cpu")
    for what, buffers in pools.items():
        for i, buffer in enumerate(buffers):
            if device.type != buffer.device.type == "cpu" and not buffer.is_pinned():
                raise ValueError(
                    f"{what} buffer {i}: host memory that a device copies must be pinned"
                )
    return device


def _geometry(buffer: Tensor, name: str) -> _Geometry:
    size = buffer.element_size()
    return _Geometry(
        address=buffer.data_ptr(),
        storage_address=buffer.untyped_storage().data_ptr(),
        size=size,
        shape=tuple(buffer.shape),
        strides=tuple(stride * size for stride in buffer.stride()),
        name=name,
    )


def _plan(
    src: tuple[_Geometry, ...], dst: tuple[_Geometry, ...], device: torch.device
) -> tuple[_Axes, CopyTable]:
    for buffer in (*src, *dst):
        _refuse_bad_buffer(buffer)
    axes = [_common_axes(s, d, index=i) for i, (s, d) in enumerate(zip(src, dst, strict=True))]
    rows = [_rows(s, d, each) for s, d, each in zip(src, dst, axes, strict=True)]
    piece_words = _piece_words([(len(each), int(each[0, 4]) // WORD_BYTES) for each in rows])
    pieces = []
    first_place = 0
    for each in rows:
        pieces.append(_pieces(each, piece_words, first_place))
        first_place += int(each[:, 4].sum()) // WORD_BYTES
    every = torch.cat(rows)
    is_shared = (every[:, 0] == every[:, 1]) & (every[:, 2] == every[:, 3])
    _refuse_overlaps(rows, src, dst, is_shared)
    counts = {len(piece) for piece in pieces}
    return tuple(map(tuple, axes)), CopyTable(
        src=(),
        dst=(),
        rows=every,
        pieces=torch.cat(pieces).to(device),
        piece_words=piece_words,
        pieces_together=counts.pop() if len(counts) == 1 else 1,
        in_place=bool(is_shared.any()),
    )


def _refuse_bad_buffer(buffer: _Geometry) -> None:
    name, shape = buffer.name, buffer.shape
    if not shape or 0 in shape:
        raise ValueError(f"{name}: at least one item of at least a byte wanted, got shape {shape}")
    for what, value, multiple in (
        ("address", buffer.address, ALIGN_BYTES),
        ("address of its storage", buffer.storage_address, WORD_BYTES),
        ("stride between items", buffer.strides[0] if shape[0] > 1 else 0, ALIGN_BYTES),
        ("item size", math.prod(shape[1:]) * buffer.size, ALIGN_BYTES),
    ):
        if value % multiple:
            raise ValueError(f"{name}: {what} must be a multiple of {multiple} bytes: {value}")
    # by rising stride: the stride of each axis must exceed the extent of those inside
    reach = buffer.size
    for stride, length in sorted(zip(buffer.strides, shape, strict=True)):
        if length > 1 and stride < reach:
            raise ValueError(f"{name}: parts of {reach} bytes lie {stride} bytes apart")
        reach += stride * (length - 1)


def _common_axes(src: _Geometry, dst: _Geometry, *, index: int) -> list[_Axis]:
    # outermost first, split so that each has one stride per side; the last is the row, contiguous
    # on both sides. Shapes may differ as long as both sides list the bytes in the same order
    sizes = [math.prod(buffer.shape[1:]) * buffer.size for buffer in (src, dst)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"buffer {index}: a source item has {sizes[0]} bytes, a target item {sizes[1]}"
        )
    sides = _axes_of(src), _axes_of(dst)
    common: list[_Axis] = []
    while sides[0]:
        (src_length, src_stride), (dst_length, dst_stride) = (axes.pop() for axes in sides)
        length = min(src_length, dst_length)
        if max(src_length, dst_length) % length:
            shapes = f"{src.shape[1:]} and {dst.shape[1:]}"
            raise ValueError(f"buffer {index}: items of one shape wanted, got {shapes}")
        common.append(_Axis(length, src_stride, dst_stride))
        if src_length > length:
            sides[0].append((src_length // length, src_stride * length))
        if dst_length > length:
            sides[1].append((dst_length // length, dst_stride * length))
    row = common[0].length
    if row % ALIGN_BYTES:
        raise ValueError(f"buffer {index}: contiguous rows of 16·n bytes wanted, got {row}")
    for axis in common[1:]:
        for stride in axis[1:]:
            if stride % ALIGN_BYTES:
                raise ValueError(f"buffer {index}: rows 16·n bytes apart wanted, got {stride}")
    return common[::-1]


def _axes_of(buffer: _Geometry) -> list[tuple[int, int]]:
    # (length, stride), outermost first; contiguous axes are merged
    axes = [(buffer.size, 1)]
    for length, stride in zip(buffer.shape[:0:-1], buffer.strides[:0:-1], strict=True):
        inner_length, inner_stride = axes[-1]
        if length == 1:
            continue
        if stride == inner_length * inner_stride:
            axes[-1] = (inner_length * length, inner_stride)
        else:
            axes.append((length, stride))
    return axes[::-1]


def _as_words(buffer: Tensor, axes: tuple[_Axis, ...], *, side: int) -> Tensor:
    size = buffer.element_size()
    words = torch.empty(0, dtype=torch.int64, device=buffer.device)
    offset = buffer.storage_offset() * size // WORD_BYTES
    item = buffer.stride(0) * size // WORD_BYTES
    lengths = (buffer.shape[0], *(axis.length for axis in axes[:-1]), axes[-1].length // WORD_BYTES)
    strides = (item, *(axis[1 + side] // WORD_BYTES for axis in axes[:-1]), 1)
    return words.set_(buffer.untyped_storage(), offset, lengths, strides)


def _piece_words(rows: Sequence[tuple[int, int]]) -> int:
    # the widest power of two that wastes at most 1/8 of its lanes, else the least wasteful; at
    # least a full burst of the link, unless the rows are narrower

    def efficiency(width: int) -> float:
        lanes = sum(count * -(-words // width) * width for count, words in rows)
        return sum(count * words for count, words in rows) / lanes

    narrowest = min(BURST_WORDS, 1 << (max(words for _, words in rows) - 1).bit_length())
    widths = [width for k in range(14) if (width := TILE_WORDS >> k) >= narrowest]
    return next((w for w in widths if efficiency(w) >= 7 / 8), max(widths, key=efficiency))


def _rows(src: _Geometry, dst: _Geometry, axes: Sequence[_Axis]) -> Tensor:
    addresses = torch.tensor([[src.address], [dst.address]])
    for length, *strides in axes[:-1]:
        steps = torch.arange(length) * torch.tensor(strides)[:, None]
        addresses = (addresses[:, :, None] + steps[:, None]).flatten(1)
    same = torch.tensor([src.strides[0], dst.strides[0], axes[-1].length])
    return torch.cat([addresses.T, same.expand(addresses.shape[1], 3)], dim=1)


def _pieces(rows: Tensor, piece_words: int, first_place: int) -> Tensor:
    num_rows, row_words = len(rows), int(rows[0, 4]) // WORD_BYTES
    start = torch.arange(0, row_words, piece_words)
    columns = [
        rows[:, 0, None] + start * WORD_BYTES,
        rows[:, 1, None] + start * WORD_BYTES,
        rows[:, 2, None] // WORD_BYTES,
        rows[:, 3, None] // WORD_BYTES,
        (row_words - start).clamp(max=piece_words),
        first_place + torch.arange(num_rows)[:, None] * row_words + start,
    ]
    shape = (num_rows, len(start))
    return torch.stack([column.expand(shape) for column in columns], dim=-1).flatten(0, 1)


def _refuse_overlaps(
    rows: Sequence[Tensor], src: Sequence[_Geometry], dst: Sequence[_Geometry], is_shared: Tensor
) -> None:
    # identical rows in source and target (`is_shared`) may overlap: there, the ids decide
    every = torch.cat(list(rows))
    number = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(each) for each in rows]))
    names, columns = [], []
    for side, (buffers, which) in enumerate(((src, ~is_shared), (dst, torch.ones_like(is_shared)))):
        its, numbers = every[which], number[which]
        count = torch.tensor([buffer.shape[0] for buffer in buffers])[numbers]
        size = its[:, 4]
        columns.append((its[:, side], its[:, 2 + side], count, size, torch.full_like(size, side)))
        names += [buffers[i].name for i in numbers.tolist()]
    refuse_overlaps(names, columns)
