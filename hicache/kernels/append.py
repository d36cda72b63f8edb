"""Paged append: write the keys and values of new tokens into the pages of their sequences.

Accesses have 128 bits if rows are multiples of 16 bytes, and lie multiples of 16 bytes apart.

Sizes: B tiles of R rows (consecutive tokens), C columns of a page table, P pages of T tokens, H KV
heads of D elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 16 << 10  # of the keys of a program's rows
MAX_ROW_BYTES = 32 << 10  # longer rows spill registers


@triton.jit(
    do_not_specialize=["num_rows", "num_columns"],
    do_not_specialize_on_alignment=["table_ptr", "tiles_ptr"],
)
def _append_kernel(
    pool_ptr,  # [2, P, T, H, D]
    table_ptr,  # [B, C]
    tiles_ptr,  # [B, 4] position of the first row, first and end row to write, first page in table
    keys_ptr,  # [B, R, H · D]
    values_ptr,  # likewise
    num_rows,  # R
    num_columns,  # C
    page_stride,
    kv_stride,
    key_stride,  # from row to row
    value_stride,
    PAGE: tl.constexpr,  # T
    SIZE: tl.constexpr,  # H · D
    WIDTH: tl.constexpr,  # SIZE, rounded up to a power of two
    ROWS: tl.constexpr,
):
    tile = tl.program_id(1).to(tl.int64)
    info = tiles_ptr + tile * 4
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = (row >= tl.load(info + 1)) & (row < tl.load(info + 2))
    position = tl.load(info) + row
    column = position // PAGE - tl.load(info + 3)
    page = tl.load(table_ptr + tile * num_columns + column, mask=exists, other=0).to(tl.int64)
    place = page * page_stride + (position % PAGE) * SIZE
    element = tl.arange(0, WIDTH)[None, :]
    moves = exists[:, None] & (element < SIZE)
    source = (tile * num_rows + row)[:, None]
    keys = tl.load(keys_ptr + source * key_stride + element, mask=moves)
    values = tl.load(values_ptr + source * value_stride + element, mask=moves)
    target = pool_ptr + place[:, None] + element
    tl.store(target, keys, mask=moves)
    tl.store(target + kv_stride, values, mask=moves)


def append(pool: Tensor, table: Tensor, tiles: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write the keys and values of new tokens into the pages of a paged KV cache.

    The new tokens come in tiles. A tile is a run of consecutive tokens of one sequence, one per
    row:

        append(pool, table, torch.tensor([[position, 0, len(keys[0]), 0]]).int(), keys, values)

    Args:
        pool: [2, pages, page_size, kv_heads, head_dim], the keys and values of one layer. Pages
            need not be adjacent in memory.
        table: [tiles, columns] int32, the page ids of each tile's sequence. The first page ids of a
            sequence may be left out.
        tiles: [tiles, 4] int32. The fields are the position of row 0 in the sequence, the first row
            to write, the end of the rows to write, and the number of page ids left out.
        keys: [tiles, rows, kv_heads, head_dim]. Rows need not be adjacent in memory, but all rows
            of all tiles must be equally far apart.
        values: the values, in the same shape as `keys`.

    Raises:
        ValueError: a shape or stride is not supported; the message names it.
    """
    heads, dim = pool.shape[3:]
    if heads * dim * pool.element_size() > MAX_ROW_BYTES:
        raise ValueError(f"rows of at most {MAX_ROW_BYTES} bytes wanted, got {heads} heads × {dim}")
    for name, each in (("pool", pool), ("keys", keys), ("values", values)):
        if each.shape[-2:] != (heads, dim) or not each[0, 0].is_contiguous():
            got = f"{tuple(each.shape)} with strides {each.stride()}"
            raise ValueError(f"{name}: contiguous rows of {heads} × {dim} wanted, got {got}")
        if each is not pool and len(each) > 1 and each.stride(0) != each.shape[1] * each.stride(1):
            raise ValueError(f"{name}: rows equally far apart wanted, got strides {each.stride()}")
    width = triton.next_power_of_2(heads * dim)
    rows = max(TILE_BYTES // (width * pool.element_size()), 1)
    constants = {"PAGE": pool.shape[2], "SIZE": heads * dim, "WIDTH": width, "ROWS": rows}
    strides = pool.stride(1), pool.stride(0), keys.stride(1), values.stride(1)
    num_tiles, num_rows = keys.shape[:2]
    with torch.cuda.device_of(pool):
        _append_kernel[(triton.cdiv(num_rows, rows), num_tiles)](
            pool, table, tiles, keys, values, num_rows, table.shape[1], *strides, **constants
        )


def naive_append(pool: Tensor, table: Tensor, tiles: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values into pages in plain PyTorch, as a reference for the `append` kernel."""
    for row_of, (position, start, end, first), *both in zip(
        table, tiles.tolist(), keys, values, strict=True
    ):
        place = torch.arange(position + start, position + end, device=pool.device)
        pages, rows = row_of[place // pool.shape[2] - first].long(), place % pool.shape[2]
        for part, each in zip(pool, both, strict=True):
            part[pages, rows] = each[start:end]
