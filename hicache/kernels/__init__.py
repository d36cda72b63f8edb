"""Kernels that move pages, rows, windows and Mamba slots between device and pinned host memory.

They know tensors and tables, and nothing of the cache: any engine may call them. Only torch,
triton and einops are needed. README.md says how, and what each operation costs.
"""

from hicache.kernels import library as library  # registers the operators
from hicache.kernels.layout import (
    layer_first_buffers,
    page_first_buffers,
    token_buffers,
)
from hicache.kernels.ops import (
    copy_pages,
    copy_pages_with_checksum,
    page_table,
    send,
    send_ids,
    warm_up,
    window_table,
)
from hicache.kernels.table import CopyTable, copy_table

__all__ = [
    "CopyTable",
    "copy_pages",
    "copy_pages_with_checksum",
    "copy_table",
    "layer_first_buffers",
    "page_first_buffers",
    "page_table",
    "send",
    "send_ids",
    "token_buffers",
    "warm_up",
    "window_table",
]
