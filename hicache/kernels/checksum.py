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

from hicache.kernels.copy import NUM_WARPS, _tile, programs_of, tiles_of
from hicache.kernels.table import CopyTable


@triton.jit
def _mix(x):
    """A bijection of 64-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 29)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 32)


@triton.jit(
    do_not_specialize=["num_items", "num_tiles"],
    do_not_specialize_on_alignment=["src_ids_ptr", "dst_ids_ptr", "src_map_ptr", "dst_map_ptr"],
)
def _copy_with_checksum_kernel(
    pieces_ptr,  # [NP, 6]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    src_map_ptr,
    dst_map_ptr,
    sums_ptr,  # [G] int64, zeros
    num_items,  # G
    num_tiles,
    ITEMS: tl.constexpr,
    WORDS: tl.constexpr,
):
    item_tiles = (num_items + ITEMS - 1) // ITEMS
    tile = tl.program_id(0)
    while tile < num_tiles:
        src, dst, exists = _tile(
            pieces_ptr, src_ids_ptr, dst_ids_ptr, src_map_ptr, dst_map_ptr,
            num_items, num_tiles, tile, ITEMS, WORDS,
        )  # fmt: skip
        words = tl.load(src, mask=exists, other=0, eviction_policy="evict_first")
        tl.store(dst, words, mask=exists)
        first_place = tl.load(pieces_ptr + (tile // item_tiles) * 6 + 5)
        place = (first_place + tl.arange(0, WORDS)).to(tl.uint64)[None, :]
        mixed = _mix(words.to(tl.uint64, bitcast=True) ^ _mix(place + 0x9E3779B97F4A7C15))
        mixed = tl.where(exists, mixed.to(tl.int64, bitcast=True), 0)
        item = (tile % item_tiles) * ITEMS + tl.arange(0, ITEMS)
        # sums commute: no order is needed between the pieces of an item
        tl.atomic_add(sums_ptr + item, tl.sum(mixed, axis=1), mask=item < num_items, sem="relaxed")
        tile += tl.num_programs(0)


def copy_items_with_checksum(
    table: CopyTable,
    src_ids: Tensor,
    dst_ids: Tensor,
    *,
    src_map: Tensor | None = None,
    dst_map: Tensor | None = None,
    num_programs: int | None = None,
) -> Tensor:
    """Launch `copy.copy_items` and return [G] int64, the checksum of each item (0 for a hole)."""
    num_items = src_ids.shape[0]
    sums = torch.zeros(num_items, dtype=torch.int64, device=table.device)
    if num_items == 0:
        return sums
    num_tiles = tiles_of(table, num_items)
    _copy_with_checksum_kernel[(programs_of(table, num_tiles, num_programs),)](
        table.pieces,
        src_ids,
        dst_ids,
        src_map,
        dst_map,
        sums,
        num_items,
        num_tiles,
        ITEMS=table.tile_items,
        WORDS=table.piece_words,
        num_warps=NUM_WARPS,
    )
    return sums
