"""Copies that convert number formats: bf16 pages and fp32 states are stored in fewer bytes.

`encode_items` writes items of a wide pool into a pool of coded items, all buffers in one launch.
A load-back (`load.py`) writes them back. A *row* is a run of consecutive elements of the last axis;
its length is the largest power of two that divides the axis, at most 256 (128 for a head of 128, 64
for one of 192). A coded item holds the codes of all rows of a buffer, then their fp32 scales,
padded to 16 bytes.

    int8  q · 2**e, with the smallest e for which |x| <= 127 · 2**e in the whole row
    fp8   e4m3 · 2**e, with the e that puts the largest |x| of the row into [128, 240]
    bf16  the nearest bf16, ties to even, without scales

Rounding the largest value of a row never changes its scale, and scales are powers of two. So
decoding is exact, encoding a decoded item gives the same bytes, and repeated moves add no error. A
row with a value that is not finite, or too large for the scale of any code, decodes to NaN.

Sizes: G items, NP pieces of ROWS rows, DIM elements in a row, TILE rows in a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels.copy import ID_POINTERS, NUM_WARPS, programs_of
from hicache.kernels.overlap import refuse_overlaps
from hicache.kernels.table import (
    ALIGN_BYTES,
    _axes_of,
    _Geometry,
    _geometry,
    _refuse_bad_buffer,
    device_of,
)

MAX_DIM = 256
SCALE_BYTES = 4
TILE_BYTES = 32 << 10  # wide bytes that a tile reads
NUM_STAGES = 3  # tiles: one is converted while the next two, 64 KiB, are loading
DECODE_WARPS = 8  # with 16, triton 3.6 loads each scale many times, and fp8 spills registers
WIDE = {torch.bfloat16: 16, torch.float32: 32}  # bits of an element
INT8, FP8, BF16 = (tl.constexpr(number) for number in range(3))  # `FORM` of the kernel


class Format(Enum):
    """A number format in which KV pages and Mamba states are stored in fewer bytes."""

    int8 = INT8.value
    fp8 = FP8.value
    bf16 = BF16.value

    @property
    def code_bytes(self) -> int:
        return 2 if self is Format.bf16 else 1

    @property
    def scale_bytes(self) -> int:
        return 0 if self is Format.bf16 else SCALE_BYTES


def row_len(num_elements: int) -> int:
    """Return how many consecutive elements of a tensor share one quantization scale.

    `num_elements` is the length of the tensor's last axis.
    """
    return min(num_elements & -num_elements, MAX_DIM)


def coded_bytes(shape: Sequence[int], form: Format) -> int:
    """Return how many bytes a page or state of this shape takes in the number format `form`.

    The result includes scales and padding.
    """
    num_elements = torch.Size(shape).numel()
    num_rows = num_elements // row_len(shape[-1])
    num_bytes = num_elements * form.code_bytes + num_rows * form.scale_bytes
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeTable:
    """The conversion of items between a pool of bf16 or fp32 and a pool in a smaller format.

    An item is a page or a Mamba state. `wide` holds the original numbers, and `coded` the bytes of
    the smaller number format. Each of the `pieces` is a part of an item that is contiguous in both.
    """

    wide: tuple[Tensor, ...]  # NB × [P, ..., last] bf16 or fp32
    coded: tuple[Tensor, ...]  # NB × [HP, coded bytes] uint8
    form: Format
    # [NP, 3] int64 on the device that converts: addresses of first wide row, codes, scale
    pieces: Tensor
    rows: int  # ROWS, a power of two
    dim: int  # DIM
    wide_stride: int  # bytes from item to item
    coded_stride: int

    @property
    def device(self) -> torch.device:
        return self.pieces.device

    @property
    def crosses_link(self) -> bool:
        return self.wide[0].device != self.coded[0].device


def code_table(wide: Sequence[Tensor], coded: Sequence[Tensor], form: Format) -> CodeTable:
    """Describe the conversion between a pool of bf16 or fp32 numbers and a pool of fewer bytes.

    Args:
        wide: tensors [items, ..., last] of bf16 or fp32, equal in shape and strides. All axes but
            the last may have any order and any stride.
        coded: one uint8 tensor [items, `coded_bytes(...)`] for each tensor of `wide`, with equal
            strides. Host memory must be pinned if a GPU converts.
        form: the smaller number format: int8 or fp8, or bf16 if `wide` is fp32.

    Raises:
        ValueError: the kernels do not support the pools; the message names the reason.
    """
    if len(wide) != len(coded) or not wide:
        raise ValueError(f"as many wide as coded buffers wanted, got {len(wide)} and {len(coded)}")
    dtype, shape = wide[0].dtype, wide[0].shape[1:]
    if dtype not in WIDE or (form is Format.bf16 and dtype is not torch.float32):
        raise ValueError(f"{form.name} codes fp32 (int8 and fp8 also bf16), got {dtype}")
    device = device_of({"wide": wide, "coded": coded})
    dim, num_bytes = row_len(shape[-1]), coded_bytes(shape, form)
    sides: list[list[_Geometry]] = []
    for what, buffers in (("wide", wide), ("coded", coded)):
        sides.append([_geometry(each, f"{what} buffer {i}") for i, each in enumerate(buffers)])
        first = sides[-1][0]
        for buffer, place in zip(buffers, sides[-1], strict=True):
            _refuse_bad_buffer(place)
            same = (first.shape, first.strides) == (place.shape, place.strides)
            if not same or buffer.dtype != buffers[0].dtype:
                raise ValueError(f"{place.name}: dtype, shape and strides of {first.name} wanted")
    if coded[0].dtype != torch.uint8 or coded[0].shape[1:] != (num_bytes,):
        got = f"{tuple(coded[0].shape)} {coded[0].dtype}"
        raise ValueError(f"coded buffers of [items, {num_bytes}] uint8 wanted, got {got}")
    if not coded[0].is_contiguous() and coded[0].stride(1) != 1:
        raise ValueError("coded items must be contiguous")
    starts, run_bytes = _runs(sides[0][0])
    rows = run_bytes // (dim * dtype.itemsize)
    if dim * form.code_bytes < ALIGN_BYTES or run_bytes % (dim * dtype.itemsize):
        raise ValueError(f"contiguous rows of 16·n coded bytes wanted, got a last axis of {dim}")
    _refuse_overlaps(sides, starts, run_bytes)
    rows &= -rows
    starts = (starts[:, None] + torch.arange(0, run_bytes, rows * dim * dtype.itemsize)).flatten()
    number = torch.arange(len(starts)) * rows  # index of each piece's first row
    pieces = [
        torch.stack(
            [
                starts + wide_place.address,
                number * dim * form.code_bytes + coded_place.address,
                number * SCALE_BYTES + coded_place.address + shape.numel() * form.code_bytes,
            ],
            dim=1,
        )
        for wide_place, coded_place in zip(*sides, strict=True)
    ]
    return CodeTable(
        wide=tuple(wide),
        coded=tuple(coded),
        form=form,
        pieces=torch.cat(pieces).to(device),
        rows=rows,
        dim=dim,
        wide_stride=sides[0][0].strides[0],
        coded_stride=sides[1][0].strides[0],
    )


def _runs(place: _Geometry) -> tuple[Tensor, int]:
    *axes, (run_bytes, _) = _axes_of(place)
    starts = torch.zeros(1, dtype=torch.int64)
    for length, stride in axes:
        if stride % ALIGN_BYTES:
            raise ValueError(f"{place.name}: rows 16·n bytes apart wanted, got {stride}")
        starts = (starts[:, None] + torch.arange(length) * stride).flatten()
    return starts, run_bytes


def _refuse_overlaps(sides: Sequence[Sequence[_Geometry]], starts: Tensor, run_bytes: int) -> None:
    names, columns = [], []
    item_bytes = sides[1][0].shape[1]
    for places, offsets, size in (
        (sides[0], starts, run_bytes),
        (sides[1], starts[:1], item_bytes),
    ):
        for place in places:
            names += [place.name] * len(offsets)
            same = map(torch.tensor, (place.strides[0], place.shape[0], size, 1))
            columns.append(torch.broadcast_tensors(offsets + place.address, *same))
    refuse_overlaps(names, columns)


@triton.jit
def _rows(
    pieces_ptr,  # [NP, 3]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    num_items,  # G
    num_lines,  # G · NP
    tile,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    # Per row of a tile: addresses of its piece, ids of its item, index in the piece. If a piece
    # fills a tile, the tile has one piece, and its ids are scalars. Else pieces of several items
    # share the tile. Rows beyond the last have negative ids
    if ROWS >= TILE:
        line = tile // (ROWS // TILE)
        row = tile % (ROWS // TILE) * TILE + tl.arange(0, TILE)
    else:
        line = tile * (TILE // ROWS) + tl.arange(0, TILE) // ROWS
        row = tl.arange(0, TILE) % ROWS
    exists = line < num_lines
    item = line % num_items
    piece = pieces_ptr + line // num_items * 3
    src_id = tl.load(src_ids_ptr + item, mask=exists, other=-1)
    dst_id = tl.load(dst_ids_ptr + item, mask=exists, other=-1)
    wide = tl.load(piece, mask=exists, other=0)
    codes = tl.load(piece + 1, mask=exists, other=0)
    scales = tl.load(piece + 2, mask=exists, other=0)
    return wide, codes, scales, src_id.to(tl.int64), dst_id.to(tl.int64), row


@triton.jit
def _encoded(bits, FORM: tl.constexpr):
    # Only integer operations and products with powers of two: the interpreter's own conversions
    # round differently from a GPU's
    magnitude = bits & 0x7FFFFFFF
    largest = tl.minimum(tl.max(magnitude, axis=1), 0x7F800000)
    if FORM == BF16:
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        codes = tl.where(magnitude > 0x7F800000, 0x7FC0, nearest).to(tl.int16)
        scales = largest  # unused
    else:
        # the exponent of the largest value after rounding to the code's precision
        place: tl.constexpr = 6 if FORM == INT8 else 7
        if FORM == INT8:
            exponent = (largest + 0x1FFFF) >> 23
        else:
            exponent = (largest + 0x7FFFF + ((largest >> 20) & 1)) >> 23
        exponent = tl.maximum(exponent, place + 1)
        is_lost = exponent > 254
        scales = tl.where(is_lost, 0x7FC00000, (exponent - place) << 23)
        inverse = ((254 + place - exponent) << 23).to(tl.float32, bitcast=True)
        x = bits.to(tl.float32, bitcast=True) * inverse[:, None]
        if FORM == INT8:
            codes = (x + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 · 2**23: rounds to integers
        else:
            bits = x.to(tl.int32, bitcast=True)
            magnitude = bits & 0x7FFFFFFF
            normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
            # 2**14: rounds to multiples of 2**-9, the smallest number that e4m3 has
            small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
            codes = tl.where(magnitude < 0x3C800000, small - 0x46800000, normal)
            codes |= (bits >> 24) & 0x80
        codes = tl.where(is_lost[:, None], 0, codes).to(tl.int8)
    return codes, scales


@triton.jit
def _decoded(codes, scales, FORM: tl.constexpr):
    if FORM == BF16:
        bits = codes.to(tl.int32) << 16
    else:
        if FORM == INT8:
            x = codes.to(tl.float32)
        else:
            codes = codes.to(tl.int32)
            bits = ((codes << 20) & 0x07F00000) | (codes & -0x80000000)
            x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        bits = (x * scales[:, None]).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _move(
    pieces_ptr, src_ids_ptr, dst_ids_ptr, wide_stride, coded_stride, num_items, num_lines, tile,
    ENCODES: tl.constexpr, FORM: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    wide, codes, scales, src_id, dst_id, row = _rows(
        pieces_ptr, src_ids_ptr, dst_ids_ptr, num_items, num_lines, tile, ROWS, TILE
    )
    wide_id, coded_id = (src_id, dst_id) if ENCODES else (dst_id, src_id)
    wide_type: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    code_type: tl.constexpr = tl.int16 if FORM == BF16 else tl.int8
    # hints that `code_table` guarantees; they must follow the cast, else they are lost
    wide = tl.multiple_of((wide + wide_id * wide_stride).to(tl.pointer_type(wide_type)), 16)
    codes = tl.multiple_of((codes + coded_id * coded_stride).to(tl.pointer_type(code_type)), 16)
    scales = tl.multiple_of((scales + coded_id * coded_stride).to(tl.pointer_type(tl.int32)), 4)
    moves = tl.where(tl.minimum(src_id, dst_id) >= 0, row, -1) >= 0
    place = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    if ROWS < TILE:
        wide, codes = wide[:, None], codes[:, None]
    if ENCODES:
        bits = tl.load(wide + place, mask=moves[:, None], other=0).to(tl.int32)
        values, factors = _encoded(bits << 16 if BITS == 16 else bits, FORM)
        tl.store(codes + place, values, mask=moves[:, None])
        if FORM != BF16:
            tl.store(scales + row, factors, mask=moves)
    else:
        values = tl.load(codes + place, mask=moves[:, None], other=0)
        factors = tl.zeros((TILE,), tl.float32)
        if FORM != BF16:
            factors = tl.load(scales + row, mask=moves, other=0).to(tl.float32, bitcast=True)
        bits = _decoded(values, factors, FORM)
        tl.store(
            wide + place, (bits >> 16 if BITS == 16 else bits).to(wide_type), mask=moves[:, None]
        )


@triton.jit
def _move_tiles(
    pieces_ptr, src_ids_ptr, dst_ids_ptr, wide_stride, coded_stride, num_items, num_lines, first,
    ENCODES: tl.constexpr, FORM: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # every tile that is this program's: `first`, and one in so many as there are programs
    num_tiles = tl.cdiv(num_lines * ROWS, TILE)
    # pipelined by the compiler through shared memory, so that computing does not delay loads; in a
    # plain loop it does (only 16 KiB in flight)
    for tile in tl.range(first, num_tiles, tl.num_programs(0), num_stages=STAGES):
        _move(
            pieces_ptr, src_ids_ptr, dst_ids_ptr, wide_stride, coded_stride, num_items, num_lines,
            tile, ENCODES, FORM, BITS, ROWS, TILE, DIM,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["wide_stride", "coded_stride", "num_items", "num_lines"],
    do_not_specialize_on_alignment=ID_POINTERS,
)
def _encode_kernel(
    pieces_ptr,  # [NP, 3]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    wide_stride,
    coded_stride,
    num_items,  # G
    num_lines,  # G · NP
    FORM: tl.constexpr,
    BITS: tl.constexpr,  # of a wide element
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    _move_tiles(
        pieces_ptr, src_ids_ptr, dst_ids_ptr, wide_stride, coded_stride, num_items, num_lines,
        tl.program_id(0), ENCODES=True, FORM=FORM, BITS=BITS, ROWS=ROWS, TILE=TILE, DIM=DIM,
        STAGES=STAGES,
    )  # fmt: skip


def encode_items(
    table: CodeTable, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> None:
    """Launch the conversion of pages or states from bf16 or fp32 to a smaller number format.

    Args:
        table: the two pools and the number format, as described by `code_table`.
        src_ids: [items] int32 on the table's device: pages of `table.wide`. Duplicates are allowed.
            A pair with a negative id is skipped.
        dst_ids: [items] int32 on the table's device: pages of `table.coded`, without duplicates.
        num_programs: number of Triton programs that share the work. None means 4 between host and
            device, and 2 per SM within a device.
    """
    num_lines = len(table.pieces) * len(src_ids)
    if num_lines * table.rows >= 1 << 31:
        raise ValueError(f"a transfer of {num_lines * table.rows} rows is too long, 2**31 wanted")
    constants = constants_of(table, encodes=True)
    num_tiles = triton.cdiv(num_lines * table.rows, constants["TILE"])
    with torch.cuda.device_of(table.pieces):
        strides = table.wide_stride, table.coded_stride
        _encode_kernel[(programs_of(table, num_tiles, num_programs),)](
            table.pieces, src_ids, dst_ids, *strides, len(src_ids), num_lines, **constants
        )
    if table.device.type == "cuda":  # keep the table's memory until this launch has read it
        table.pieces.record_stream(torch.cuda.current_stream(table.device))


def constants_of(table: CodeTable, *, encodes: bool) -> dict[str, int]:
    bits = WIDE[table.wide[0].dtype]
    element_bytes = bits // 8 if encodes else table.form.code_bytes
    return {
        "FORM": table.form.value,
        "BITS": bits,
        "ROWS": table.rows,
        "TILE": TILE_BYTES // (table.dim * element_bytes),
        "DIM": table.dim,
        "STAGES": NUM_STAGES,
        "num_warps": NUM_WARPS if encodes and table.form is not Format.fp8 else DECODE_WARPS,
    }


def naive_encode(rows: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Convert rows to a smaller number format in plain PyTorch, as a reference for the kernel.

    `rows` is [..., row length]; the elements of a row share a scale. The result is the codes, in
    the shape of `rows`, and fp32 scales [...]. Codes are int8 (int8 or fp8 bits) or int16 (bf16
    bits).
    """
    if form is Format.bf16:
        codes = rows.to(torch.bfloat16).view(torch.int16)
        return torch.where(rows.isnan(), 0x7FC0, codes), torch.zeros(rows.shape[:-1])
    rows = rows.double()
    largest = rows.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)  # in [0.5, 1)
    if form is Format.int8:
        exponent = exponent - 7 + (mantissa > 127 / 128).int()
        limit = 121
    else:  # e4m3 has four bits of mantissa
        exponent = exponent - 8 + ((mantissa * 16).round() == 16).int()
        limit = 120
    exponent = torch.where(largest == 0, -126, exponent).clamp(min=-126)
    is_lost = ~largest.isfinite() | (exponent > limit)
    exponent = torch.where(is_lost, 0, exponent)
    units = torch.ldexp(torch.where(is_lost[..., None], 0.0, rows), -exponent[..., None])
    if form is Format.int8:
        codes = units.round().to(torch.int8)
    else:
        codes = units.float().to(torch.float8_e4m3fn).view(torch.int8)
    scales = torch.ldexp(torch.ones_like(largest), exponent).float()
    return codes, torch.where(is_lost, torch.nan, scales)


def naive_decode(codes: Tensor, scales: Tensor, form: Format) -> Tensor:
    """Convert `codes` back to fp32 rows in plain PyTorch, as a reference for the kernel.

    `codes` is [..., row length], and `scales` is [...]: one fp32 scale per row.
    """
    if form is Format.bf16:
        return codes.view(torch.bfloat16).float()
    values = codes if form is Format.int8 else codes.view(torch.float8_e4m3fn)
    return values.float() * scales[..., None]


def naive_encode_items(
    table: CodeTable, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> None:
    moved = (src_ids >= 0) & (dst_ids >= 0)
    if not bool(moved.any()):
        return
    for wide, coded in zip(table.wide, table.coded, strict=True):
        whole = coded_of(wide[src_ids[moved].long()], table.form)
        coded[dst_ids[moved].long(), : whole.shape[1]] = whole


def naive_decode_buffer(table: CodeTable, buffer: int, src_ids: Tensor, dst_ids: Tensor) -> None:
    wide = table.wide[buffer]
    items = wide_of(table.coded[buffer][src_ids], wide.shape[1:], table.form)
    wide[dst_ids] = items.to(wide.dtype)


def coded_of(items: Tensor, form: Format) -> Tensor:
    """Convert items [items, ...] to a smaller number format; return bytes [items, bytes] uint8.

    The bytes of an item are the codes of its numbers, then the scales. There is no padding.
    """
    rows = items.flatten(1).unflatten(1, (-1, row_len(items.shape[-1])))
    codes, scales = naive_encode(rows.float(), form)
    parts = [codes.flatten(1).view(torch.uint8)]
    if form.scale_bytes:
        parts.append(scales.view(torch.uint8))
    return torch.cat(parts, dim=1)


def wide_of(coded: Tensor, shape: Sequence[int], form: Format) -> Tensor:
    """Convert bytes [items, bytes] in a smaller number format back to fp32 items [items, *shape].

    Padding after the codes and scales of an item is ignored.
    """
    end = torch.Size(shape).numel() * form.code_bytes
    codes = coded[:, :end].contiguous().view(torch.int16 if form is Format.bf16 else torch.int8)
    codes = codes.unflatten(1, (-1, row_len(shape[-1])))
    stop = end + codes.shape[1] * form.scale_bytes
    scales = coded[:, end:stop].contiguous().view(torch.float32)
    return naive_decode(codes, scales, form).view(-1, *shape)
