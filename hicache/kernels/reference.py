"""PyTorch references of the kernels; also the data plane of a machine without a GPU.

Names, signatures and results are those of the launchers in `copy` and `index`. Tests require
byte-identical results.

Sizes: as in `copy.py` and `index.py`.
"""

from functools import lru_cache

import torch
from torch import Tensor

from hicache.kernels.index import window_pages
from hicache.kernels.table import CopyTable

SALT = 0x9E3779B97F4A7C15 - (1 << 64)  # two's complement: torch counts in signed words
MIX_1 = 0xFF51AFD7ED558CCD - (1 << 64)
MIX_2 = 0xC4CEB9FE1A85EC53 - (1 << 64)


def copy_items(
    table: CopyTable, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> None:
    """Copy items between two pools in plain PyTorch, as a reference for the Triton kernel.

    `num_programs` is ignored.
    """
    sources, targets, _ = _moved(src_ids, dst_ids)
    for src, dst in zip(table.src, table.dst, strict=True):
        dst.index_copy_(0, targets, src.index_select(0, sources))


def copy_items_with_checksum(
    table: CopyTable, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> Tensor:
    copy_items(table, src_ids, dst_ids)
    sources, _, moved = _moved(src_ids, dst_ids)
    sums = torch.zeros(len(src_ids), dtype=torch.int64)
    items = [src.index_select(0, sources).flatten(1) for src in table.src]
    sums[moved] = checksums(torch.cat(items, dim=1))
    return sums


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
    return torch.tensor([int(_mix(item ^ salt).sum()) for item in items], dtype=torch.int64)


@lru_cache(maxsize=8)  # one entry per item size; few sizes occur
def _salt(num_words: int) -> Tensor:
    return _mix(torch.arange(num_words) + SALT)


def page_table(
    page_ids: Tensor, spans: Tensor, request_spans: Tensor, *, num_columns: int, hole: int = 0
) -> Tensor:
    bounds = request_spans.tolist()
    table = torch.full((len(bounds) - 1, num_columns), hole, dtype=torch.int32)
    for row, first, last in zip(table, bounds[:-1], bounds[1:], strict=True):
        pieces = [page_ids[start : start + length] for start, length in spans[first:last].tolist()]
        pages = torch.cat([page_ids[:0], *pieces])[:num_columns]
        row[: len(pages)] = pages
    return torch.where(table < 0, hole, table)


def window_table(
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


def _moved(src_ids: Tensor, dst_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    moved = (src_ids >= 0) & (dst_ids >= 0)
    return src_ids[moved].long(), dst_ids[moved].long(), moved


def _mix(x: Tensor) -> Tensor:
    for bits, factor in ((33, MIX_1), (29, MIX_2)):
        x = _shifted(x, bits).bitwise_xor_(x).mul_(factor)
    return _shifted(x, 32).bitwise_xor_(x)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
