"""Public calls of the data plane, for executors and other engines.

On CUDA tensors they launch the Triton kernels; on CPU tensors they run `reference`. A launch goes
to the current stream, allocates its result only, and never waits. Callers order the streams, and
keep pools alive until a copy is done.

`library` registers the copies as `torch.ops.hicache.*`, for compiled and exported programs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hicache.kernels import copy, index, reference
from hicache.kernels.checks import (
    Sides,
    check_copy_form,
    check_copy_ids,
    check_form,
    check_range,
    check_spans,
    check_tensor,
)
from hicache.kernels.table import CopyTable


def copy_pages(
    table: CopyTable,
    src_page_ids: Tensor,
    dst_page_ids: Tensor,
    *,
    num_programs: int | None = None,
    debug: bool = False,
    trusted: bool = False,
) -> None:
    """Copy pages between two pools in one launch.

    A page is one index of the first axis of the pools' buffers. Token rows and Mamba slots are
    copied in the same way. A table from a pool to itself gives copy-on-write.

    Args:
        table: the two pools, as described by `copy_table`.
        src_page_ids: [pages] int32. Duplicates are allowed. A pair with a negative id is skipped.
        dst_page_ids: [pages] int32, without duplicates. Within one pool, no id may be both a source
            and a target.
        num_programs: number of Triton programs that share the work; about as many SMs are busy.
            None means 4 between host and device, and 2 per SM within a device.
        debug: also check the values of ids in device memory, which waits for the device. Ids in
            host memory are always checked.
        trusted: skip all checks. The ids must come from `send_ids`.

    Raises:
        TypeError: the ids are not tensors.
        ValueError: a tensor of ids has a wrong shape, dtype or device, or a checked id is invalid.
    """
    ids = src_page_ids, dst_page_ids
    if not trusted:
        ids = _ready(table, *ids, debug=debug)
    plane = reference if table.device.type == "cpu" else copy
    plane.copy_items(table, *ids, num_programs=num_programs)


def copy_pages_with_checksum(
    table: CopyTable,
    src_page_ids: Tensor,
    dst_page_ids: Tensor,
    *,
    num_programs: int | None = None,
    debug: bool = False,
    trusted: bool = False,
) -> Tensor:
    """Copy pages between two pools, and return the checksum of each page as [pages] int64.

    The arguments are those of `copy_pages`. A checksum depends on the content of a page, not on the
    layout of the pool. It does depend on the order in which the table lists the buffers.
    """
    ids = src_page_ids, dst_page_ids
    if not trusted:
        ids = _ready(table, *ids, debug=debug)
    plane = reference if table.device.type == "cpu" else copy
    sums: Tensor = plane.copy_items_with_checksum(table, *ids, num_programs=num_programs)
    return sums


def send_ids(*pairs: tuple[Sides, Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Check the page ids of several transfers, and send them to the device in one copy.

    The results are source and target ids on the device, in the order of `pairs`. They can be passed
    to `copy_pages` with `trusted=True`. They also fit another tensor-parallel rank, if its pools
    have as many pages.

    Args:
        pairs: for each transfer, the two pools, the source ids and the target ids. Ids are [pages]
            int32 in host memory. All transfers use the same device.
    """
    host = torch.device("cpu")
    for table, src_ids, dst_ids in pairs:
        check_copy_form(src_ids, dst_ids, device=host)
        check_copy_ids(table, src_ids, dst_ids)
    if not pairs:
        return []
    ids = send([each for _, *both in pairs for each in both], pairs[0][0].device)
    return list(zip(ids[::2], ids[1::2], strict=True))


def send(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Send one-dimensional tensors of one dtype to a device, all in one copy from pinned memory."""
    if device.type == "cpu" or not parts:
        return list(parts)
    lengths = [len(part) for part in parts]
    pinned = torch.empty(sum(lengths), dtype=parts[0].dtype, pin_memory=True)
    torch.cat(list(parts), out=pinned)
    return list(torch.split(pinned.to(device, non_blocking=True), lengths))


def warm_up(*tables: CopyTable, page_size: int) -> None:
    """Compile and load all kernels that copy pages of these tables or build page tables.

    No launch during serving then waits for the compiler or the driver. Tables whose pools are all
    in host memory need no kernels.
    """
    _launch_over_nothing([t for t in tables if t.device.type != "cpu"], page_size=page_size)


def page_table(
    page_ids: Tensor,
    spans: Tensor,
    request_spans: Tensor,
    *,
    num_columns: int,
    hole: int = 0,
    debug: bool = False,
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
        debug: also check values in device memory, which waits for the device.

    Returns:
        [requests, num_columns] int32.
    """
    device = page_ids.device
    check_form(page_ids, name="page ids", device=device)
    check_form(request_spans, name="request spans", device=device)
    check_form(spans.flatten(), name="spans", device=device)
    if spans.dim() != 2 or spans.shape[1] != 2 or not spans.is_contiguous():
        raise ValueError(f"spans must be [S, 2] and contiguous, got shape {tuple(spans.shape)}")
    if num_columns < 0 or len(request_spans) == 0:
        raise ValueError(
            f"columns and the bounds of requests wanted, got {num_columns} columns, "
            f"{len(request_spans)} bounds"
        )
    if debug or device.type == "cpu":
        check_spans(page_ids, spans, request_spans)
    plane = reference if device.type == "cpu" else index
    result: Tensor = plane.page_table(
        page_ids, spans, request_spans, num_columns=num_columns, hole=hole
    )
    return result


def window_table(
    page_table: Tensor,
    seq_lens: Tensor,
    full_to_swa: Tensor,
    *,
    page_size: int,
    window_len: int,
    hole: int = 0,
    debug: bool = False,
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
        debug: also check values in device memory, which waits for the device.

    Returns:
        [requests, columns] int32, with as many columns as a window can touch pages. Column 0 is the
        page that holds the window's first token.
    """
    device = page_table.device
    if page_table.dim() != 2 or not page_table.is_contiguous():
        raise ValueError(f"page table must be [B, C] contiguous, got {tuple(page_table.shape)}")
    check_form(page_table.flatten(), name="page table", device=device)
    check_form(seq_lens, name="sequence lengths", device=device)
    check_form(full_to_swa, name="full to swa map", device=device)
    if len(seq_lens) != len(page_table):
        raise ValueError(f"{len(seq_lens)} sequence lengths do not match {len(page_table)} rows")
    if page_size < 1 or window_len < 1:
        raise ValueError(f"positive sizes wanted, got page {page_size}, window {window_len}")
    if debug or device.type == "cpu":
        check_range(page_table.flatten(), name="page table", limit=len(full_to_swa))
        check_range(
            seq_lens, name="sequence lengths", least=0, limit=page_table.shape[1] * page_size + 1
        )
    plane = reference if device.type == "cpu" else index
    result: Tensor = plane.window_table(
        page_table, seq_lens, full_to_swa, page_size=page_size, window_len=window_len, hole=hole
    )
    return result


def _launch_over_nothing(tables: Sequence[CopyTable], *, page_size: int) -> None:
    for table in tables:
        none = torch.zeros(0, dtype=torch.int32, device=table.device)
        copy.copy_items(table, none, none)
        copy.copy_items_with_checksum(table, none, none)
    for device in {table.device for table in tables}:
        zero = torch.zeros(2, dtype=torch.int32, device=device)  # one request without pages
        pages = index.page_table(zero, zero.view(1, 2), zero, num_columns=1)
        index.window_table(pages, zero[:1], zero, page_size=page_size, window_len=1)


def _ready(
    table: CopyTable, src_ids: Tensor, dst_ids: Tensor, *, debug: bool
) -> tuple[Tensor, Tensor]:
    check_tensor(src_ids, name="source ids")
    check_tensor(dst_ids, name="target ids")
    in_host = src_ids.device.type == dst_ids.device.type == "cpu"
    device = src_ids.device if in_host else table.device
    check_copy_form(src_ids, dst_ids, device=device)
    if debug or in_host:
        check_copy_ids(table, src_ids, dst_ids)
    src_ids = src_ids.to(table.device, non_blocking=True)
    return src_ids, dst_ids.to(table.device, non_blocking=True)
