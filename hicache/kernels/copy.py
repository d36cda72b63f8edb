"""The copy kernel: buffers × items, any layout on either side, one launch.

A transfer moves G items. Every item has the same NP pieces (`table.CopyTable` lists them), and a
piece of an item is read at `src + src_id * src_stride` and written at `dst + dst_id * dst_stride`.
Layer-first to page-first, all layers, K and V, token rows, windows, packing and Mamba slots are
this one kernel over different tables. Words are 8 opaque bytes, so no dtype matters.

Sizes: G items, NP pieces, a tile is ITEMS × WORDS.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels.table import CopyTable

NUM_WARPS = 8
LINK_PROGRAMS = 4  # enough bytes in flight for PCIe 5 ×16: see README.md, "how many programs"
PROGRAMS_PER_SM = 4


@triton.jit
def _tile(
    pieces_ptr,  # [NP, 6]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    src_map_ptr,  # [items of another pool], or None
    dst_map_ptr,  # [items of another pool], or None
    num_items,  # G
    num_tiles,
    tile,
    ITEMS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Where a tile is read and written, and which of its words exist; beyond the last, none do."""
    item_tiles = (num_items + ITEMS - 1) // ITEMS
    first_item = (tile % item_tiles) * ITEMS
    num_left = tl.where(tile < num_tiles, num_items - first_item, 0)
    piece = pieces_ptr + (tl.where(tile < num_tiles, tile, 0) // item_tiles) * 6
    item = tl.arange(0, ITEMS)
    src_id = tl.load(src_ids_ptr + first_item + item, mask=item < num_left, other=-1).to(tl.int64)
    dst_id = tl.load(dst_ids_ptr + first_item + item, mask=item < num_left, other=-1).to(tl.int64)
    if src_map_ptr is not None:
        src_id = tl.load(src_map_ptr + src_id, mask=src_id >= 0, other=-1).to(tl.int64)
    if dst_map_ptr is not None:
        dst_id = tl.load(dst_map_ptr + dst_id, mask=dst_id >= 0, other=-1).to(tl.int64)
    # the compiler knows nothing of an address it loads: these five promises, kept by `copy_table`,
    # make the accesses 128 bits wide. On the pointer after the cast: on the integer they are lost
    src = tl.multiple_of(tl.load(piece).to(tl.pointer_type(tl.int64)), 16)
    dst = tl.multiple_of(tl.load(piece + 1).to(tl.pointer_type(tl.int64)), 16)
    src += tl.multiple_of(src_id * tl.load(piece + 2), 2)
    dst += tl.multiple_of(dst_id * tl.load(piece + 3), 2)
    # a hole on either side has no words
    words = tl.where((src_id >= 0) & (dst_id >= 0), tl.load(piece + 4), 0)
    words = tl.multiple_of(words, 2)
    word = tl.arange(0, WORDS)[None, :]
    return src[:, None] + word, dst[:, None] + word, word < words[:, None]


@triton.jit(
    do_not_specialize=["num_items", "num_tiles"],
    do_not_specialize_on_alignment=["src_ids_ptr", "dst_ids_ptr", "src_map_ptr", "dst_map_ptr"],
)
def _copy_kernel(
    pieces_ptr,  # [NP, 6]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    src_map_ptr,
    dst_map_ptr,
    num_items,  # G
    num_tiles,
    ITEMS: tl.constexpr,
    WORDS: tl.constexpr,
):
    tile = tl.program_id(0)
    src, _, exists = _tile(
        pieces_ptr, src_ids_ptr, dst_ids_ptr, src_map_ptr, dst_map_ptr,
        num_items, num_tiles, tile, ITEMS, WORDS,
    )  # fmt: skip
    words = tl.load(src, mask=exists, other=0, eviction_policy="evict_first")
    # `while`, not `range`: a range over tensors fails in the interpreter of triton 3.6
    while tile < num_tiles:
        # the next tile is on its way before this one is stored: two tiles of words in flight.
        # Addresses and masks are not carried along but made again, which keeps registers few
        # and shared memory unused
        next_tile = tile + tl.num_programs(0)
        src, _, exists = _tile(
            pieces_ptr, src_ids_ptr, dst_ids_ptr, src_map_ptr, dst_map_ptr,
            num_items, num_tiles, next_tile, ITEMS, WORDS,
        )  # fmt: skip
        next_words = tl.load(src, mask=exists, other=0, eviction_policy="evict_first")
        _, dst, exists = _tile(
            pieces_ptr, src_ids_ptr, dst_ids_ptr, src_map_ptr, dst_map_ptr,
            num_items, num_tiles, tile, ITEMS, WORDS,
        )  # fmt: skip
        tl.store(dst, words, mask=exists)
        words = next_words
        tile = next_tile


def copy_items(
    table: CopyTable,
    src_ids: Tensor,
    dst_ids: Tensor,
    *,
    src_map: Tensor | None = None,
    dst_map: Tensor | None = None,
    num_programs: int | None = None,
) -> None:
    """Launch the copy of items `src_ids` of the source to items `dst_ids` of the target.

    Args:
        src_ids: [G] int32 on the table's device. Duplicates are allowed; a negative id is a hole.
        dst_ids: [G] int32 likewise, without duplicates.
        src_map: [any] int32: the source item is `src_map[src_id]`.
        dst_map: [any] int32: the target item is `dst_map[dst_id]`.
        num_programs: how many programs share the work; None: few across a link, else many.
    """
    num_items = src_ids.shape[0]
    if num_items == 0:
        return
    num_tiles = tiles_of(table, num_items)
    _copy_kernel[(programs_of(table, num_tiles, num_programs),)](
        table.pieces,
        src_ids,
        dst_ids,
        src_map,
        dst_map,
        num_items,
        num_tiles,
        ITEMS=table.tile_items,
        WORDS=table.piece_words,
        num_warps=NUM_WARPS,
    )


def tiles_of(table: CopyTable, num_items: int) -> int:
    """Tiles of a transfer of `num_items` items."""
    num_tiles = table.pieces.shape[0] * -(-num_items // table.tile_items)
    if num_tiles >= 1 << 30:
        raise ValueError(f"a transfer of {num_tiles} tiles is too long, fewer than 2**30 wanted")
    return num_tiles


def programs_of(table: CopyTable, num_tiles: int, wanted: int | None) -> int:
    """Programs to launch: `wanted`, or few when the copy crosses a link, never more than tiles."""
    if wanted is not None and wanted < 1:
        raise ValueError(f"at least one program wanted, got {wanted}")
    if wanted is None:
        wanted = LINK_PROGRAMS if table.crosses_link else PROGRAMS_PER_SM * num_sms(table.device)
    return min(wanted, num_tiles)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere, where programs run one at a time."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
