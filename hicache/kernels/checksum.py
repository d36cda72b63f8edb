"""The copy kernel with a checksum of what it moved, in one pass over the bytes.

The checksum of an item is the sum modulo 2**64 over its words of `mix(word ^ mix(place + SALT))`,
`mix` being a multiply-and-shift hash and `place` the word's place in the item, all buffers taken
one after another. So it depends on content and order, not on layout, tile or grid: a page copied
device → host and the same page copied back have equal checksums. It finds faults, not attacks.

Sizes: as in `copy.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels import copy
from hicache.kernels.copy import ID_POINTERS, _lines, _read, _write
from hicache.kernels.table import CopyTable


@triton.jit
def _mix(x):
    """A bijection of 64-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 29)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 32)


@triton.jit(
    do_not_specialize=["num_items", "num_lines", "num_tiles"],
    do_not_specialize_on_alignment=ID_POINTERS,
)
def _copy_with_checksum_kernel(
    pieces_ptr,  # [NP, 6]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    sums_ptr,  # [G] int64, zeros
    num_items,  # G
    num_lines,  # G · NP
    num_tiles,
    TOGETHER: tl.constexpr,
    LINES: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tile = tl.program_id(0)
    while tile < num_tiles:
        src, dst, words, item, piece = _lines(
            pieces_ptr, src_ids_ptr, dst_ids_ptr, num_items, num_lines, tile, TOGETHER, LINES
        )  # fmt: skip
        values = _read(src, words, STEPS, WIDTH)
        _write(dst, words, values, STEPS, WIDTH)
        is_line = tile * LINES + tl.arange(0, LINES) < num_lines
        first_place = tl.load(piece + 5, mask=is_line, other=0).to(tl.uint64)
        mixed = tl.zeros((LINES, WIDTH), tl.int64)
        for step in tl.static_range(STEPS):
            word = step * WIDTH + tl.arange(0, WIDTH)[None, :]
            salt = _mix(first_place[:, None] + word.to(tl.uint64) + 0x9E3779B97F4A7C15)
            value = _mix(values[step].to(tl.uint64, bitcast=True) ^ salt)
            mixed += tl.where(word < words[:, None], value.to(tl.int64, bitcast=True), 0)
        # sums commute: no order is needed between the pieces of an item
        tl.atomic_add(sums_ptr + item, tl.sum(mixed, axis=1), mask=is_line, sem="relaxed")
        tile += tl.num_programs(0)


def copy_items_with_checksum(
    table: CopyTable, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> Tensor:
    """Launch `copy.copy_items` and return [G] int64, the checksum of each item (0 for a hole)."""
    sums = torch.zeros(len(src_ids), dtype=torch.int64, device=table.device)
    kernel = _copy_with_checksum_kernel
    copy.copy_items(
        table, src_ids, dst_ids, num_programs=num_programs, kernel=kernel, results=(sums,)
    )
    return sums
