"""Paged append: write the keys and values of new tokens into the pages of their sequences.

Sizes: B tiles of R rows (consecutive tokens), C columns of a page table, P pages of T tokens, H KV
heads of D elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit(
    do_not_specialize=["num_rows", "num_columns", "page_stride", "kv_stride"],
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
    tile = tl.program_id(1)
    info = tiles_ptr + tile * 4
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = (row >= tl.load(info + 1)) & (row < tl.load(info + 2))
    position = tl.load(info) + row
    column = position // PAGE - tl.load(info + 3)
    page = tl.load(table_ptr + tile * num_columns + column, mask=exists, other=0).to(tl.int64)
    place = page * page_stride + (position % PAGE) * SIZE
    element = tl.arange(0, WIDTH)[None, :]
    limit = tl.where(exists, SIZE, 0)[:, None]
    source = (tile * num_rows + row).to(tl.int64)
    keys = tl.load(keys_ptr + source[:, None] * key_stride + element, mask=element < limit)
    tl.store(pool_ptr + place[:, None] + element, keys, mask=element < limit)
    values = tl.load(values_ptr + source[:, None] * value_stride + element, mask=element < limit)
    tl.store(pool_ptr + kv_stride + place[:, None] + element, values, mask=element < limit)


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
    """
    num_tiles, num_rows, heads, dim = keys.shape
    width = triton.next_power_of_2(heads * dim)
    sizes = {"PAGE": pool.shape[2], "SIZE": heads * dim, "WIDTH": width, "ROWS": ROWS}
    strides = pool.stride(1), pool.stride(0), keys.stride(1), values.stride(1)
    with torch.cuda.device_of(pool):
        _append_kernel[(triton.cdiv(num_rows, ROWS), num_tiles)](
            pool, table, tiles, keys, values, num_rows, table.shape[1], *strides, **sizes
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
