"""Index kernels of a step: build page tables from spans, translate windows, replace holes.

Lengths and spans are read on the device, and grids follow from sizes known to the host. So these
launches never wait for the device, and CUDA graphs can capture them.

Sizes: B requests, S spans, C columns of a page table, P pages of a pool.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels.checks import check_form

BLOCK = 1024
WINDOW_BLOCK = 128  # pages of a window per program; windows are short


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


@triton.jit(
    do_not_specialize=["num_columns", "window_len", "num_pages", "hole"],
    do_not_specialize_on_alignment=[
        "page_table_ptr",
        "seq_lens_ptr",
        "page_map_ptr",
        "window_table_ptr",
    ],
)
def _window_table_kernel(
    page_table_ptr,  # [B, C]
    seq_lens_ptr,  # [B]
    page_map_ptr,  # [P]
    window_table_ptr,  # [B, W]
    num_columns,  # C
    window_len,
    num_pages,  # W
    hole,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    first_page = tl.maximum(seq_len - window_len, 0) // PAGE
    num_held = tl.minimum((seq_len + PAGE - 1) // PAGE, num_columns) - first_page
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    full_id = tl.load(
        page_table_ptr + request * num_columns + first_page + page, mask=page < num_held, other=-1
    ).to(tl.int64)
    swa_id = tl.load(page_map_ptr + full_id, mask=full_id >= 0, other=-1)
    swa_id = tl.where(swa_id < 0, hole, swa_id)
    tl.store(window_table_ptr + request * num_pages + page, swa_id, mask=page < num_pages)


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


def window_table(
    page_table: Tensor,
    seq_lens: Tensor,
    full_to_swa: Tensor,
    *,
    page_size: int,
    window_len: int,
    hole: int = 0,
) -> Tensor:
    """Build page tables of sliding-window (SWA) layers from page tables of full-attention layers.

    Each row covers the last `window_len` tokens of a request.

    Args:
        page_table: [requests, columns] int32, full-attention page ids, in the order of the
            sequence.
        seq_lens: [requests] int32, tokens of each request.
        full_to_swa: [pages] int32, the SWA page id for each full-attention page id; -1 means none.
        page_size: tokens per page.
        window_len: tokens of the window.
        hole: page id to write where there is no SWA page, and after a request's last page. It must
            be safe to read.

    Returns:
        [requests, `window_pages(window_len, page_size)`] int32. Column 0 is the page that holds the
        window's first token.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device. Values are not checked.
    """
    device = page_table.device
    check_form(page_table.flatten(), name="page table", device=device)
    check_form(seq_lens, name="sequence lengths", device=device)
    check_form(full_to_swa, name="full to swa map", device=device)
    if not page_table.is_contiguous() or page_table.shape[:-1] != seq_lens.shape:
        shape = tuple(page_table.shape)
        raise ValueError(f"page table must be [{len(seq_lens)}, C] contiguous, got shape {shape}")
    num_requests, num_columns = page_table.shape
    num_pages = window_pages(window_len, page_size)
    table = torch.empty(num_requests, num_pages, dtype=torch.int32, device=device)
    if table.numel():
        grid = (num_requests, triton.cdiv(num_pages, WINDOW_BLOCK))
        with torch.cuda.device_of(table):
            tensors = page_table, seq_lens, full_to_swa, table
            sizes = {"PAGE": page_size, "BLOCK": WINDOW_BLOCK}
            _window_table_kernel[grid](*tensors, num_columns, window_len, num_pages, hole, **sizes)
    return table


def window_pages(window_len: int, page_size: int) -> int:
    """Return the largest number of pages that `window_len` consecutive tokens can touch."""
    return (window_len + page_size - 2) // page_size + 1


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


def naive_window_table(
    page_table: Tensor,
    seq_lens: Tensor,
    full_to_swa: Tensor,
    *,
    page_size: int,
    window_len: int,
    hole: int = 0,
) -> Tensor:
    num_requests, num_columns = page_table.shape
    num_pages = window_pages(window_len, page_size)
    window = torch.full((num_requests, num_pages), -1, dtype=torch.int32)
    for row, pages, seq_len in zip(window, page_table, seq_lens.tolist(), strict=True):
        first_page = max(seq_len - window_len, 0) // page_size
        held = pages[first_page : min(-(-seq_len // page_size), num_columns)]
        row[: len(held)] = held
    window = torch.where(window < 0, -1, full_to_swa[window.clamp(min=0).long()])
    return torch.where(window < 0, hole, window)
