"""Copies that convert number formats: bf16 pages and fp32 states are stored in fewer bytes.

`encode_items` writes items of a wide pool into a pool of coded items, all buffers in one launch.
A load-back (`load.py`) writes them back. A *row* is a run of consecutive elements of the last axis;
its length is the largest power of two that divides the axis, at most 256 (128 for a head of 128, 64
for one of 192). A coded item holds the codes of all rows of a buffer, then their fp32 scales,
padded to 16 bytes.

    int8  q · 2**e, with the smallest e for which |x| <= 127 · 2**e in the whole row
    fp8   e4m3 · 2**e, with the e that puts the largest |x| of the row into [128, 240]
    bf16  the nearest bf16, ties to even, without scales
    fp4   e2m1 · s · 2**e, with an e4m3 number s for each block of 16 elements, about a sixth of the
          block's largest |x|, and the e that puts the largest s of the row into [128, 240]. A byte
          holds an element of the first half of the row and one of the second

Rounding the largest value of a row or block never changes its scale, and scales have few bits. So
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
INT8, FP8, BF16, FP4 = (tl.constexpr(number) for number in range(4))  # `FORM` of the kernel
BLOCK = tl.constexpr(16)  # elements of fp4 that share a scale
SIXTH = tl.constexpr(0.16666667163372040)  # in fp32


class Format(Enum):
    """A number format in which KV pages and Mamba states are stored in fewer bytes."""

    int8 = INT8.value
    fp8 = FP8.value
    bf16 = BF16.value
    fp4 = FP4.value

    @property
    def code_bits(self) -> int:
        return {Format.bf16: 16, Format.fp4: 4}.get(self, 8)

    def scale_bytes(self, dim: int) -> int:
        """Return the bytes of all scales of a row of `dim` elements."""
        if self is Format.fp4:
            return SCALE_BYTES + dim // int(BLOCK.value)
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
    dim = row_len(shape[-1])
    num_bytes = num_elements * form.code_bits // 8 + num_elements // dim * form.scale_bytes(dim)
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
        form: the smaller number format: int8, fp8 or fp4, or bf16 if `wide` is fp32.

    Raises:
        ValueError: the kernels do not support the pools; the message names the reason.
    """
    if len(wide) != len(coded) or not wide:
        raise ValueError(f"as many wide as coded buffers wanted, got {len(wide)} and {len(coded)}")
    dtype, shape = wide[0].dtype, wide[0].shape[1:]
    if dtype not in WIDE or (form is Format.bf16 and dtype is not torch.float32):
        raise ValueError(f"{form.name} codes fp32 (int8, fp8 and fp4 also bf16), got {dtype}")
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
    code_bytes, scale_bytes = dim * form.code_bits // 8, form.scale_bytes(dim)
    is_short = code_bytes < ALIGN_BYTES or scale_bytes % SCALE_BYTES
    if is_short or run_bytes % (dim * dtype.itemsize):
        least = "of 64·n elements" if form is Format.fp4 else "of 16·n coded bytes"
        raise ValueError(f"contiguous rows {least} wanted, got a last axis of {dim}")
    _refuse_overlaps(sides, starts, run_bytes)
    rows &= -rows
    starts = (starts[:, None] + torch.arange(0, run_bytes, rows * dim * dtype.itemsize)).flatten()
    number = torch.arange(len(starts)) * rows  # index of each piece's first row
    pieces = [
        torch.stack(
            [
                starts + wide_place.address,
                number * code_bytes + coded_place.address,
                number * scale_bytes + coded_place.address + shape.numel() // dim * code_bytes,
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
def _as_e4m3(x):
    # the nearest e4m3 of normal numbers, as its bits
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)


@triton.jit
def _of_e4m3(codes):
    bits = ((codes << 20) & 0x07F00000) | (codes & -0x80000000)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def _halves_encoded(low, high, TILE: tl.constexpr, DIM: tl.constexpr):
    blocks: tl.constexpr = DIM // 2 // BLOCK
    bits = tl.join(low, high).permute(0, 2, 1).reshape(TILE, 2, blocks, BLOCK)
    largest = tl.minimum(tl.max(bits & 0x7FFFFFFF, axis=3), 0x7F800000)
    wanted = largest.to(tl.float32, bitcast=True) * SIXTH
    most = tl.max(tl.max(wanted, axis=2), axis=1).to(tl.int32, bitcast=True)
    exponent = tl.maximum((most + 0x7FFFF + ((most >> 20) & 1)) >> 23, 8)
    is_lost = exponent > 251  # 6 times a scale of 2**125 may be too large
    factor = tl.where(is_lost, 0x7FC00000, (exponent - 7) << 23)
    inverse = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(is_lost[:, None, None], 1.0, wanted * inverse[:, None, None])
    scales = _as_e4m3(tl.maximum(scaled, 0.015625))  # 2**-6, the smallest normal number
    part = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), _of_e4m3(scales))
    x = bits.to(tl.float32, bitcast=True) * inverse[:, None, None, None] * part[:, :, :, None]
    its = x.to(tl.int32, bitcast=True)
    magnitude = its & 0x7FFFFFFF
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - 252
    small = (magnitude.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True)
    codes = tl.where(magnitude < 0x40000000, small - 0x4A800000, normal) | ((its >> 28) & 8)
    codes = tl.where(is_lost[:, None, None, None], 0, codes)
    first, second = tl.split(codes.reshape(TILE, 2, DIM // 2).permute(0, 2, 1))
    return (first | (second << 4)).to(tl.int8), scales.reshape(TILE, 2 * blocks).to(tl.int8), factor


@triton.jit
def _half_decoded(codes, scales, factors, TILE: tl.constexpr, DIM: tl.constexpr):
    # of one half: codes of 4 bits [TILE, DIM / 2], scales [TILE, DIM / 32]
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    x = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    x = x.reshape(TILE, DIM // 2 // BLOCK, BLOCK)
    x = x * (_of_e4m3(scales.to(tl.int32)) * factors[:, None])[:, :, None]
    return x.reshape(TILE, DIM // 2).to(tl.int32, bitcast=True)


@triton.jit
def _move_halves(
    wide, codes, scales, row, moves, ENCODES: tl.constexpr, BITS: tl.constexpr,
    TILE: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = DIM // 2
    place, here = row[:, None] * half + tl.arange(0, half)[None, :], moves[:, None]
    first = wide + row[:, None] * DIM + tl.arange(0, half)[None, :]
    wide_type: tl.constexpr = wide.dtype.element_ty
    shift: tl.constexpr = 32 - BITS
    block = tl.arange(0, half // BLOCK)[None, :]
    its = (scales + row * (SCALES // 4)).to(tl.pointer_type(tl.int8))[:, None] + 4
    if ENCODES:
        low = tl.load(first, mask=here, other=0).to(tl.int32) << shift
        high = tl.load(first + half, mask=here, other=0).to(tl.int32) << shift
        values, parts, factors = _halves_encoded(low, high, TILE, DIM)
        tl.store(codes + place, values, mask=here)
        tl.store(its + tl.arange(0, 2 * (half // BLOCK))[None, :], parts, mask=here)
        tl.store(scales + row * (SCALES // 4), factors, mask=moves)
    else:
        values = tl.load(codes + place, mask=here, other=0).to(tl.int32)
        factors = tl.load(scales + row * (SCALES // 4), mask=moves, other=0)
        for side in tl.static_range(2):
            parts = tl.load(its + side * (half // BLOCK) + block, mask=here, other=0)
            bits = _half_decoded(
                values >> (4 * side), parts, factors.to(tl.float32, bitcast=True), TILE, DIM
            )
            tl.store(first + side * half, (bits >> shift).to(wide_type), mask=here)


@triton.jit
def _move(
    pieces_ptr, src_ids_ptr, dst_ids_ptr, wide_stride, coded_stride, num_items, num_lines, tile,
    ENCODES: tl.constexpr, FORM: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr,
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
    if FORM == FP4:
        _move_halves(wide, codes, scales, row, moves, ENCODES, BITS, TILE, DIM, SCALES)
    elif ENCODES:
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
    TILE: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # every tile that is this program's: `first`, and one in so many as there are programs
    num_tiles = tl.cdiv(num_lines * ROWS, TILE)
    # pipelined by the compiler through shared memory, so that computing does not delay loads; in a
    # plain loop it does (only 16 KiB in flight)
    for tile in tl.range(first, num_tiles, tl.num_programs(0), num_stages=STAGES):
        _move(
            pieces_ptr, src_ids_ptr, dst_ids_ptr, wide_stride, coded_stride, num_items, num_lines,
            tile, ENCODES, FORM, BITS, ROWS, TILE, DIM, SCALES,
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
    SCALES: tl.constexpr,  # bytes of a row's scales
    STAGES: tl.constexpr,
):
    _move_tiles(
        pieces_ptr, src_ids_ptr, dst_ids_ptr, wide_stride, coded_stride, num_items, num_lines,
        tl.program_id(0), ENCODES=True, FORM=FORM, BITS=BITS, ROWS=ROWS, TILE=TILE, DIM=DIM,
        SCALES=SCALES, STAGES=STAGES,
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
    bits, form = WIDE[table.wide[0].dtype], table.form
    num_warps = (
        NUM_WARPS if form is Format.fp4 or (encodes and form is not Format.fp8) else DECODE_WARPS
    )
    element_bytes = bits // 8 if encodes else max(table.form.code_bits // 8, 1)
    return {
        "FORM": table.form.value,
        "BITS": bits,
        "ROWS": table.rows,
        "TILE": TILE_BYTES // (table.dim * element_bytes),
        "DIM": table.dim,
        "SCALES": table.form.scale_bytes(table.dim),
        # tiles of fp4 have half the codes, so twice as many are loading
        "STAGES": NUM_STAGES if encodes or form is not Format.fp4 else 2 * NUM_STAGES - 1,
        "num_warps": num_warps,
    }


def naive_encode(rows: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Convert rows to a smaller number format in plain PyTorch, as a reference for the kernel.

    `rows` is fp32 [..., row length]; the elements of a row share a scale. The result is the codes,
    in the shape of `rows`, and fp32 scales [...]. Codes are int8 (int8 or fp8 bits) or int16 (bf16
    bits). For fp4, codes are uint8 [..., row length / 2], and scales uint8 [..., scale bytes].
    """
    if form is Format.fp4:
        return _naive_encode_fp4(rows)
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


def _naive_encode_fp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    # in fp32 as the kernel: the scale of a block is no power of two, so a quotient is rounded
    blocks = rows.unflatten(-1, (-1, BLOCK.value))
    wanted = blocks.abs().amax(-1) * torch.tensor(SIXTH.value)
    _, scales = naive_encode(wanted, Format.fp8)
    scales = torch.where(scales > 2.0**117, torch.nan, scales)
    factor = torch.where(scales.isnan(), 1.0, scales)[..., None]
    relative = torch.where(scales.isnan()[..., None], 1.0, wanted / factor).clamp(min=2.0**-6)
    units = relative.to(torch.float8_e4m3fn)
    x = blocks / factor[..., None] * (1 / units.float())[..., None]
    x = torch.where(scales.isnan()[..., None, None], 0.0, x)
    # with one bit of mantissa, and multiples of a half below 2; ties to even
    step = torch.exp2(x.abs().clamp(min=1).log2().floor() - 1)
    half = ((x / step).round() * step).abs() * 2  # 0, 1, 2, 3, 4, 6, 8, 12
    codes = torch.tensor([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7], dtype=torch.uint8)[half.int()]
    codes = (codes | x.signbit().to(torch.uint8) * 8).flatten(-2)
    low, high = codes.chunk(2, dim=-1)
    parts = scales[..., None].view(torch.uint8), units.view(torch.uint8)
    return low | high << 4, torch.cat(parts, dim=-1)


def naive_decode(codes: Tensor, scales: Tensor, form: Format) -> Tensor:
    """Convert `codes` back to fp32 rows in plain PyTorch, as a reference for the kernel.

    `codes` and `scales` are those of `naive_encode`.
    """
    if form is Format.fp4:
        both = torch.cat([codes & 15, codes >> 4], dim=-1).unflatten(-1, (-1, BLOCK.value)).int()
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = numbers[both & 7] * (1 - (both >> 3) * 2)
        factors, units = (each.contiguous() for each in scales.tensor_split([SCALE_BYTES], -1))
        parts = units.view(torch.float8_e4m3fn).float() * factors.view(torch.float32)
        result: Tensor = (values * parts[..., None]).flatten(-2)
        return result
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
    if form is not Format.bf16:
        parts.append(scales.flatten(1).view(torch.uint8))
    return torch.cat(parts, dim=1)


def wide_of(coded: Tensor, shape: Sequence[int], form: Format) -> Tensor:
    """Convert bytes [items, bytes] in a smaller number format back to fp32 items [items, *shape].

    Padding after the codes and scales of an item is ignored.
    """
    dim = row_len(shape[-1])
    num_rows, scale_bytes = torch.Size(shape).numel() // dim, form.scale_bytes(dim)
    end = num_rows * dim * form.code_bits // 8
    codes, scales = coded[:, :end].contiguous(), coded[:, end : end + num_rows * scale_bytes]
    if form is Format.fp4:
        both = codes.unflatten(1, (num_rows, -1)), scales.unflatten(1, (num_rows, -1))
        return naive_decode(*both, form).view(-1, *shape)
    codes = codes.view(torch.int16 if form is Format.bf16 else torch.int8)
    scales = scales.contiguous().view(torch.float32)
    return naive_decode(codes.unflatten(1, (num_rows, dim)), scales, form).view(-1, *shape)
