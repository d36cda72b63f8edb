"""Loops whose machine code the static model is shown.

`two_deep_kernel` is the copy that this package had before: its text has two tiles on their way.
`words = next_words` becomes moves from register to register, and these wait for the loads of the
next tile, which they should overlap; so in every turn but the first there is one.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(
    pieces_ptr,  # [NP, 6]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
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
    do_not_specialize_on_alignment=["src_ids_ptr", "dst_ids_ptr"],
)
def two_deep_kernel(
    pieces_ptr,  # [NP, 6]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    num_items,  # G
    num_tiles,
    ITEMS: tl.constexpr,
    WORDS: tl.constexpr,
):
    tile = tl.program_id(0)
    src, _, exists = _tile(
        pieces_ptr, src_ids_ptr, dst_ids_ptr, num_items, num_tiles, tile, ITEMS, WORDS
    )  # fmt: skip
    words = tl.load(src, mask=exists, other=0, eviction_policy="evict_first")
    while tile < num_tiles:
        next_tile = tile + tl.num_programs(0)
        src, _, exists = _tile(
            pieces_ptr, src_ids_ptr, dst_ids_ptr, num_items, num_tiles, next_tile, ITEMS, WORDS
        )  # fmt: skip
        next_words = tl.load(src, mask=exists, other=0, eviction_policy="evict_first")
        _, dst, exists = _tile(
            pieces_ptr, src_ids_ptr, dst_ids_ptr, num_items, num_tiles, tile, ITEMS, WORDS
        )  # fmt: skip
        tl.store(dst, words, mask=exists)
        words = next_words
        tile = next_tile


@triton.jit
def staged_kernel(pieces_ptr, num_tiles, WORDS: tl.constexpr):
    """The compiler's own pipeline: copies into shared memory, three turns ahead."""
    piece = pieces_ptr + tl.program_id(0) * 6
    src = tl.multiple_of(tl.load(piece).to(tl.pointer_type(tl.int64)), 16)
    dst = tl.multiple_of(tl.load(piece + 1).to(tl.pointer_type(tl.int64)), 16)
    word = tl.arange(0, WORDS)
    for tile in tl.range(0, num_tiles, num_stages=4):
        tl.store(dst + tile * WORDS + word, tl.load(src + tile * WORDS + word))
