"""The copy kernel: all buffers of all items, between any two layouts, in one launch.

A transfer moves G items. Every item has the same NP pieces (`table.CopyTable` lists them). A piece
of an item is read at `src + src_id * src_stride` and written at `dst + dst_id * dst_stride`.
Different tables give layer-first to page-first, all layers, K and V, token rows, slices of the
heads, windows, packing and Mamba slots. A word is 8 opaque bytes, so dtypes do not matter.

A line is one piece of one item. Lines are ordered by buffer, then by item, then by piece. So the
layers of a load-back arrive in order, and a short transfer of many buffers fills its tiles.

The checksum of an item is the sum modulo 2**64 over its words of `mix(word ^ mix(place + SALT))`,
where `mix` is a multiply-and-shift hash and `place` is the index of the word in the item, with all
buffers concatenated. It depends on content and order, not on layout, tile or grid: a page copied
from device to host and back keeps its checksum. It finds faults; it does not resist attacks.

Sizes: G items, NP pieces, TOGETHER pieces of a buffer, a tile is LINES × STEPS · WIDTH words.
"""

import functools
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels.table import TILE_WORDS, CopyTable

NUM_WARPS = 16
LINK_PROGRAMS = 4  # enough bytes in flight for PCIe 5 ×16: see README.md, "how many programs"
# enough to fill the link; with more, the stores that wait for it slow the rest of the device
BACK_UP_PROGRAMS = 2
PROGRAMS_PER_SM = 2
MAX_STEPS = TILE_WORDS // (32 * NUM_WARPS) // 2  # accesses of 128 bits of a thread: 8
LINE_WORDS = 16  # 128 bytes, the unit of memory and link: no access of a line is narrower
ID_POINTERS = ["src_ids_ptr", "dst_ids_ptr"]
# the kernel's constants in two's complement: torch counts in signed words
SALT, MIX_1, MIX_2 = (
    constant - (1 << 64)
    for constant in (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
)


@triton.jit
def _lines(
    pieces_ptr,  # [NP, 6]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    num_items,  # G
    num_lines,  # G · NP
    tile,
    TOGETHER: tl.constexpr,
    LINES: tl.constexpr,
):
    # A line is one piece of one item. It has no words beyond the last line, and where either id is
    # < 0
    line = tile * LINES + tl.arange(0, LINES)
    exists = line < num_lines
    item_of_buffer = line // TOGETHER
    item = item_of_buffer % num_items
    piece = pieces_ptr + (item_of_buffer // num_items * TOGETHER + line % TOGETHER) * 6
    src_id = tl.load(src_ids_ptr + item, mask=exists, other=-1).to(tl.int64)
    dst_id = tl.load(dst_ids_ptr + item, mask=exists, other=-1).to(tl.int64)
    moves = (src_id >= 0) & (dst_id >= 0)
    # The compiler does not know the alignment of loaded addresses. These hints, which `copy_table`
    # guarantees, make accesses 128 bits wide. They follow the cast: on an integer they are lost
    src = tl.load(piece, mask=exists, other=0).to(tl.pointer_type(tl.int64))
    dst = tl.load(piece + 1, mask=exists, other=0).to(tl.pointer_type(tl.int64))
    src = tl.multiple_of(src, 16)
    dst = tl.multiple_of(dst, 16)
    src += tl.multiple_of(src_id * tl.load(piece + 2, mask=exists, other=0), 2)
    dst += tl.multiple_of(dst_id * tl.load(piece + 3, mask=exists, other=0), 2)
    words = tl.multiple_of(tl.load(piece + 4, mask=moves, other=0), 2)
    return src, dst, words, item, piece


@triton.jit
def _read(src, words, STEPS: tl.constexpr, WIDTH: tl.constexpr):
    # Each step reads a part of all lines, so a thread holds one or two lines' addresses, not one
    # for each access. The steps are separate blocks, not an axis of one, because triton 3.6 and 3.9
    # distribute such an axis to threads in different orders
    tile = ()
    for step in tl.static_range(STEPS):
        word = step * WIDTH + tl.arange(0, WIDTH)[None, :]
        exists = word < words[:, None]
        block = tl.load(src[:, None] + word, mask=exists, other=0)
        tile = tile + (block,)  # type: ignore[assignment]  # noqa: RUF005 - no stars in a kernel
    return tile


@triton.jit
def _write(dst, words, tile, STEPS: tl.constexpr, WIDTH: tl.constexpr):
    for step in tl.static_range(STEPS):
        word = step * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(dst[:, None] + word, tile[step], mask=word < words[:, None])


@triton.jit
def _mix(x):
    # a bijection in which every input bit affects every output bit
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 29)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 32)


@triton.jit
def _sums(tile, words, first_word, STEPS: tl.constexpr, WIDTH: tl.constexpr):
    mixed = tl.zeros(tile[0].shape, tl.int64)
    for step in tl.static_range(STEPS):
        word = step * WIDTH + tl.arange(0, WIDTH)[None, :]
        salt = _mix(first_word[:, None] + word.to(tl.uint64) + 0x9E3779B97F4A7C15)
        value = _mix(tile[step].to(tl.uint64, bitcast=True) ^ salt)
        mixed += tl.where(word < words[:, None], value.to(tl.int64, bitcast=True), 0)
    return tl.sum(mixed, axis=1)


@triton.jit(
    do_not_specialize=["num_items", "num_lines", "num_tiles"],
    do_not_specialize_on_alignment=ID_POINTERS,
)
def _copy_kernel(
    pieces_ptr,  # [NP, 6]
    src_ids_ptr,  # [G]
    dst_ids_ptr,  # [G]
    sums_ptr,  # [G] int64, zeros; None: no checksums
    num_items,  # G
    num_lines,  # G · NP
    num_tiles,
    TOGETHER: tl.constexpr,
    LINES: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tile = tl.program_id(0)
    # `while`, not `range`: a range over tensors fails in the interpreter of triton 3.6.
    # A plain loop: if a tile is carried into the next iteration, the compiler moves its registers,
    # and these moves wait for the loads that should overlap (see `codegen`)
    while tile < num_tiles:
        src, dst, words, item, piece = _lines(
            pieces_ptr, src_ids_ptr, dst_ids_ptr, num_items, num_lines, tile, TOGETHER, LINES
        )
        values = _read(src, words, STEPS, WIDTH)
        _write(dst, words, values, STEPS, WIDTH)
        if sums_ptr is not None:
            exists = tile * LINES + tl.arange(0, LINES) < num_lines
            first_word = tl.load(piece + 5, mask=exists, other=0).to(tl.uint64)
            sums = _sums(values, words, first_word, STEPS, WIDTH)
            # sums commute: no order is needed between the pieces of an item
            tl.atomic_add(sums_ptr + item, sums, mask=exists, sem="relaxed")
        tile += tl.num_programs(0)


def copy_items(
    table: CopyTable,
    src_ids: Tensor,
    dst_ids: Tensor,
    *,
    num_programs: int | None = None,
    sums: Tensor | None = None,
) -> None:
    """Launch a copy of the items `src_ids` of one pool to the items `dst_ids` of another.

    An item is a page, a token row or a Mamba slot. If `src_ids` is empty, the call only loads the
    kernel.

    Args:
        table: the two pools, as described by `copy_table`.
        src_ids: [items] int32 on the table's device. Duplicates are allowed. A pair with a negative
            id is skipped.
        dst_ids: [items] int32 on the table's device, without duplicates.
        num_programs: number of Triton programs that share the work. None means 4 into the device,
            2 to the host, and one per tile of 64 KiB within a device.
        sums: [items] int64 on the table's device, to which the kernel adds each item's checksum.
            None means that no checksums are computed.
    """
    num_items = src_ids.shape[0]
    num_lines, num_tiles = lines_and_tiles_of(table, num_items)
    if num_programs is None and not table.crosses_link:
        num_programs = max(num_tiles, 1)
    elif num_programs is None and table.dst[0].device != table.device:
        num_programs = BACK_UP_PROGRAMS
    constants = {**tile_shape(table), "num_warps": NUM_WARPS}
    # `copy_table` keeps the pieces as long as the pools, which the caller keeps until the copy ends
    with torch.cuda.device_of(table.pieces):
        _copy_kernel[(programs_of(table, num_tiles, num_programs),)](
            table.pieces, src_ids, dst_ids, sums, num_items, num_lines, num_tiles, **constants
        )


def copy_items_with_checksum(
    table: CopyTable, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> Tensor:
    """Launch a copy of items between two pools, and return the checksum of each item.

    The arguments are those of `copy_items`. The result is [items] int64; an item whose source or
    target id is negative is skipped and has checksum 0.
    """
    sums = torch.zeros(len(src_ids), dtype=torch.int64, device=table.device)
    copy_items(table, src_ids, dst_ids, num_programs=num_programs, sums=sums)
    return sums


def tile_shape(table: CopyTable) -> dict[str, int]:
    steps = max(min(MAX_STEPS, table.piece_words // LINE_WORDS), 1)
    return {
        "TOGETHER": table.pieces_together,
        "LINES": TILE_WORDS // table.piece_words,
        "STEPS": steps,
        "WIDTH": table.piece_words // steps,
    }


def lines_and_tiles_of(table: CopyTable, num_items: int) -> tuple[int, int]:
    num_lines = table.pieces.shape[0] * num_items
    if num_lines >= 1 << 30:
        raise ValueError(f"a transfer of {num_lines} lines is too long, fewer than 2**30 wanted")
    return num_lines, -(-num_lines // (TILE_WORDS // table.piece_words))


class Places(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def crosses_link(self) -> bool: ...


def programs_of(table: Places, num_tiles: int, wanted: int | None) -> int:
    """Return how many Triton programs to launch for `num_tiles` units of work.

    The result is `wanted`, but at most one program per tile. If `wanted` is None, the limit is 4
    programs between host and device, and 2 per SM within a device.
    """
    if wanted is not None and wanted < 1:
        raise ValueError(f"at least one program wanted, got {wanted}")
    if wanted is None:
        wanted = LINK_PROGRAMS if table.crosses_link else PROGRAMS_PER_SM * num_sms(table.device)
    return max(min(wanted, num_tiles), 1)


@functools.cache
def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def naive_copy_items(
    table: CopyTable, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> None:
    """Copy items between two pools in plain PyTorch, as a reference for the Triton kernel.

    `num_programs` is ignored.
    """
    sources, targets, _ = _moved(src_ids, dst_ids)
    for src, dst in zip(table.src, table.dst, strict=True):
        dst.index_copy_(0, targets, src.index_select(0, sources))


def naive_copy_items_with_checksum(
    table: CopyTable, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> Tensor:
    naive_copy_items(table, src_ids, dst_ids)
    sources, _, moved = _moved(src_ids, dst_ids)
    sums = torch.zeros(len(src_ids), dtype=torch.int64)
    items = [src.index_select(0, sources).flatten(1) for src in table.src]
    sums[moved] = checksums(torch.cat(items, dim=1))
    return sums


def _moved(src_ids: Tensor, dst_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    moved = (src_ids >= 0) & (dst_ids >= 0)
    return src_ids[moved].long(), dst_ids[moved].long(), moved


def checksums(items: Tensor) -> Tensor:
    """Return the checksum of each item in host memory, where an item is a page or a Mamba state.

    The results equal the checksums that the copy kernels return for the same bytes.

    Args:
        items: [items, words] int64, the content of each item as 8-byte words. The buffers of a pool
            are concatenated.

    Returns:
        [items] int64.
    """
    salt = _salt(items.shape[1])
    return torch.tensor([int(_mixed(item ^ salt).sum()) for item in items], dtype=torch.int64)


@functools.lru_cache(maxsize=8)  # one entry per item size; few sizes occur
def _salt(num_words: int) -> Tensor:
    return _mixed(torch.arange(num_words) + SALT)


def _mixed(x: Tensor) -> Tensor:
    for bits, factor in ((33, MIX_1), (29, MIX_2)):
        x = _shifted(x, bits).bitwise_xor_(x).mul_(factor)
    return _shifted(x, 32).bitwise_xor_(x)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
