"""The data plane as `torch.ops.hicache.*`, for compiled, exported and traced programs.

Copies take the buffers themselves, source and target, and read addresses off them in every call:
a program that was made functional hands over copies of what it was traced with. Importing
`hicache.kernels` registers the operators; that is what an operator library is for, and the only
thing this package does when imported. Checks of ids are left to `ops`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from hicache.kernels import checksum, copy, index, reference
from hicache.kernels.table import copy_table


@custom_op("hicache::copy_items", mutates_args={"dst"})
def copy_items(
    src: Sequence[Tensor],
    dst: Sequence[Tensor],
    src_ids: Tensor,
    dst_ids: Tensor,
    src_map: Tensor | None,
    dst_map: Tensor | None,
    num_programs: int | None,
) -> None:
    """`copy.copy_items` over `copy_table(src, dst)`."""
    table = copy_table(src, dst)
    plane = reference if table.device.type == "cpu" else copy
    plane.copy_items(
        table, src_ids, dst_ids, src_map=src_map, dst_map=dst_map, num_programs=num_programs
    )


@custom_op("hicache::copy_items_with_checksum", mutates_args={"dst"})
def copy_items_with_checksum(
    src: Sequence[Tensor],
    dst: Sequence[Tensor],
    src_ids: Tensor,
    dst_ids: Tensor,
    num_programs: int | None,
) -> Tensor:
    """`checksum.copy_items_with_checksum` over `copy_table(src, dst)`."""
    table = copy_table(src, dst)
    plane = reference if table.device.type == "cpu" else checksum
    sums: Tensor = plane.copy_items_with_checksum(
        table, src_ids, dst_ids, num_programs=num_programs
    )
    return sums


@custom_op("hicache::page_table", mutates_args=())
def page_table(
    page_ids: Tensor, spans: Tensor, request_spans: Tensor, num_columns: int, hole: int
) -> Tensor:
    """`index.page_table`."""
    plane = reference if page_ids.device.type == "cpu" else index
    table: Tensor = plane.page_table(
        page_ids, spans, request_spans, num_columns=num_columns, hole=hole
    )
    return table


@custom_op("hicache::window_table", mutates_args=())
def window_table(
    page_table: Tensor,
    seq_lens: Tensor,
    full_to_swa: Tensor,
    page_size: int,
    window_len: int,
    hole: int,
) -> Tensor:
    """`index.window_table`."""
    plane = reference if page_table.device.type == "cpu" else index
    table: Tensor = plane.window_table(
        page_table,
        seq_lens,
        full_to_swa,
        page_size=page_size,
        window_len=window_len,
        hole=hole,
    )
    return table


@custom_op("hicache::translate_pages", mutates_args=())
def translate_pages(page_ids: Tensor, page_map: Tensor | None, hole: int) -> Tensor:
    """`index.translate_pages`."""
    plane = reference if page_ids.device.type == "cpu" else index
    translated: Tensor = plane.translate_pages(page_ids, page_map, hole=hole)
    return translated


@copy_items.register_fake
def _(src, dst, src_ids, dst_ids, src_map, dst_map, num_programs):
    return None


@copy_items_with_checksum.register_fake
def _(src, dst, src_ids, dst_ids, num_programs):
    return torch.empty_like(src_ids, dtype=torch.int64)


@page_table.register_fake
def _(page_ids, spans, request_spans, num_columns, hole):
    return page_ids.new_empty(request_spans.shape[0] - 1, num_columns)


@window_table.register_fake
def _(page_table, seq_lens, full_to_swa, page_size, window_len, hole):
    num_pages = index.window_pages(window_len, page_size)
    return page_table.new_empty(page_table.shape[0], num_pages)


@translate_pages.register_fake
def _(page_ids, page_map, hole):
    return torch.empty_like(page_ids)
