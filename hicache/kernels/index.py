"""Page tables of a step, built from spans; holes are replaced.

Spans are read on the device, and the grid follows from sizes known to the host. So the launch
never waits for the device, and CUDA graphs can capture it.

Sizes: B requests, S spans, C columns of a page table, P pages of a pool.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels.checks import check_form

BLOCK = 1024


@triton.jit(
    do_not_specialize=["num_columns", "hole"],
    do_not_specialize_on_alignment=["page_ids_ptr", "spans_ptr", "request_spans_ptr", "table_ptr"],
)
def _page_table_kernel(
    page_ids_ptr,  # [any]
    spans_ptr,  # [S, 2]
    request_spans_ptr,  # [B + 1]
    table_ptr,  # [B, C]
    num_columns,  # C
    hole,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page_id = tl.full((BLOCK,), -1, tl.int32)
    first_column = tl.zeros((), tl.int32)
    span = tl.load(request_spans_ptr + request)
    last_span = tl.load(request_spans_ptr + request + 1)
    while span < last_span:
        start = tl.load(spans_ptr + span.to(tl.int64) * 2).to(tl.int64)
        num_pages = tl.load(spans_ptr + span.to(tl.int64) * 2 + 1)
        place = column - first_column
        inside = (place >= 0) & (place < num_pages)
        span_page_id = tl.load(page_ids_ptr + start + place, mask=inside, other=-1)
        page_id = tl.where(inside, span_page_id, page_id)
        first_column += num_pages
        span += 1
    page_id = tl.where(page_id < 0, hole, page_id)
    tl.store(table_ptr + request * num_columns + column, page_id, mask=column < num_columns)


def page_table(
    page_ids: Tensor, spans: Tensor, request_spans: Tensor, *, num_columns: int, hole: int = 0
) -> Tensor:
    """Build one page table row per request from spans of page ids, such as those of tree nodes.

    A row holds the pages of the request's spans, one span after the other.

    Args:
        page_ids: int32, one axis of any length: page ids that the spans point into. -1 means that
            there is no page.
        spans: [spans, 2] int32: offset in `page_ids` and number of pages. Each span belongs to one
            request.
        request_spans: [requests + 1] int32. Request b has the spans from `request_spans[b]` to
            `request_spans[b + 1]`, end excluded.
        num_columns: columns of the result. Pages beyond them are dropped.
        hole: page id to write where there is no page, and after a request's last page. It must be
            safe to read.

    Returns:
        [requests, num_columns] int32.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device. Values are not checked.
    """
    device = page_ids.device
    check_form(page_ids, name="page ids", device=device)
    check_form(request_spans, name="request spans", device=device)
    check_form(spans.flatten(), name="spans", device=device)
    if spans.dim() != 2 or spans.shape[1] != 2 or not spans.is_contiguous():
        raise ValueError(f"spans must be [S, 2] and contiguous, got shape {tuple(spans.shape)}")
    num_requests = request_spans.shape[0] - 1
    table = torch.empty(num_requests, num_columns, dtype=torch.int32, device=device)
    if table.numel():
        grid = (num_requests, triton.cdiv(num_columns, BLOCK))
        with torch.cuda.device_of(table):
            _page_table_kernel[grid](
                page_ids, spans, request_spans, table, num_columns, hole, BLOCK=BLOCK
            )
    return table


def naive_page_table(
    page_ids: Tensor, spans: Tensor, request_spans: Tensor, *, num_columns: int, hole: int = 0
) -> Tensor:
    bounds = request_spans.tolist()
    table = torch.full((len(bounds) - 1, num_columns), hole, dtype=torch.int32)
    for row, first, last in zip(table, bounds[:-1], bounds[1:], strict=True):
        pieces = [page_ids[start : start + length] for start, length in spans[first:last].tolist()]
        pages = torch.cat([page_ids[:0], *pieces])[:num_columns]
        row[: len(pages)] = pages
    return torch.where(table < 0, hole, table)
