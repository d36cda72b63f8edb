"""The copies as `torch.ops.hicache.*`, for compiled, exported and traced programs.

Operators take source and target buffers and read their addresses in every call, because a
functionalized program passes copies of the tensors it was traced with. Importing `hicache.kernels`
registers the operators; the import has no other side effect.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from hicache.kernels import index, ops
from hicache.kernels.table import copy_table


@custom_op("hicache::copy_items", mutates_args={"dst"})
def copy_items(
    src: Sequence[Tensor],
    dst: Sequence[Tensor],
    src_ids: Tensor,
    dst_ids: Tensor,
    num_programs: int | None = None,
) -> None:
    """Copy the items `src_ids` of the buffers `src` to the items `dst_ids` of the buffers `dst`.

    An item is one index of a buffer's first axis, such as a page. The operator is
    `torch.ops.hicache.copy_items`, for compiled and exported programs.
    """
    ops.copy_pages(copy_table(src, dst), src_ids, dst_ids, num_programs=num_programs)


@custom_op("hicache::copy_items_with_checksum", mutates_args={"dst"})
def copy_items_with_checksum(
    src: Sequence[Tensor],
    dst: Sequence[Tensor],
    src_ids: Tensor,
    dst_ids: Tensor,
    num_programs: int | None = None,
) -> Tensor:
    """Copy items between the buffers `src` and `dst`, and return the checksum of each item.

    An item is one index of a buffer's first axis, such as a page. The operator is
    `torch.ops.hicache.copy_items_with_checksum`, for compiled and exported programs.
    """
    table = copy_table(src, dst)
    return ops.copy_pages_with_checksum(table, src_ids, dst_ids, num_programs=num_programs)


page_table = custom_op("hicache::page_table", mutates_args=())(ops.page_table)
window_table = custom_op("hicache::window_table", mutates_args=())(ops.window_table)


@copy_items.register_fake
def _(src, dst, src_ids, dst_ids, num_programs=None):
    return None


@copy_items_with_checksum.register_fake
def _(src, dst, src_ids, dst_ids, num_programs=None):
    return torch.empty_like(src_ids, dtype=torch.int64)


@page_table.register_fake
def _(page_ids, spans, request_spans, *, num_columns, hole=0, debug=False):
    return page_ids.new_empty(request_spans.shape[0] - 1, num_columns)


@window_table.register_fake
def _(page_table, seq_lens, full_to_swa, *, page_size, window_len, hole=0, debug=False):
    num_pages = index.window_pages(window_len, page_size)
    return page_table.new_empty(page_table.shape[0], num_pages)
