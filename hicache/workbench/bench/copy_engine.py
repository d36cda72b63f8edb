"""Transfers by the copy engine, for items that are large and contiguous.

A copy engine needs no SM but has a cost per piece. In public measurements it moves 4 to 7 GB/s in
pieces of 4 to 16 KiB and 52 GB/s in pieces of 64 KiB (H100, PCIe 5; vLLM pull request 42212).

One driver call submits many pieces: `cuMemcpyBatchAsync`, of CUDA 12.8 and later, found through
`ctypes`.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hicache.kernels.table import CopyTable

STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order
ANY_ORDER = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY: ... at any time after the call
BATCH_RUNS = 1 << 15  # per call: at about 52,000 the driver hangs (vLLM issue 49276)


class Runs(NamedTuple):
    """A list of copies between contiguous memory ranges, for the GPU's copy engine.

    Each tensor is [copies] int64 in host memory.
    """

    src: Tensor  # addresses
    dst: Tensor  # addresses
    num_bytes: Tensor
    order: int  # access order of the sources


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_location", ctypes.c_int * 2),
        ("dst_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


def runs_of(table: CopyTable, src_ids: Tensor, dst_ids: Tensor) -> Runs:
    """Return a memory copy for each row of each item; an item is a page or a Mamba state.

    Args:
        table: the two pools, as described by `copy_table`.
        src_ids: [items] int32 in host memory. A pair with a negative id is skipped.
        dst_ids: [items] int32 in host memory.
    """
    moved = (src_ids >= 0) & (dst_ids >= 0)
    src, dst, src_stride, dst_stride, size = table.rows.T[:, :, None]
    from_, to = src + src_ids[moved] * src_stride, dst + dst_ids[moved] * dst_stride
    is_from_host = table.crosses_link and table.src[0].device.type == "cpu"
    order = ANY_ORDER if is_from_host else STREAM_ORDER
    sizes = size.expand_as(to).flatten().contiguous()  # read by address
    return Runs(from_.flatten(), to.flatten(), sizes, order)


def copy_runs(runs: Runs, device: torch.device) -> None:
    """Queue all copies of `runs` on the current stream of `device`. Host memory must be pinned.

    The driver refuses the default stream.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    driver = _driver()  # holds what `batch` calls
    batch, extra = _batch_call(driver)
    attributes = ctypes.byref(_Attributes(src_access_order=runs.order))
    first, one = ctypes.byref(ctypes.c_size_t(0)), ctypes.c_size_t(1)
    with torch.cuda.device(device):
        for start in range(0, len(runs.num_bytes), BATCH_RUNS):
            part = [
                each[start : start + BATCH_RUNS] for each in (runs.dst, runs.src, runs.num_bytes)
            ]
            lists = [ctypes.c_void_p(each.data_ptr()) for each in part]
            count = ctypes.c_size_t(len(part[0]))
            code = batch(*lists, count, attributes, first, one, *extra, ctypes.c_void_p(stream))
            if code != 0:
                raise RuntimeError(f"the CUDA driver refused a copy with error {code}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _batch_call(driver: ctypes.CDLL) -> tuple[Callable[..., int], list[object]]:
    failed = ctypes.c_size_t(0)
    for name, extra in (("cuMemcpyBatchAsync_v2", []), ("cuMemcpyBatchAsync", [failed])):
        if hasattr(driver, name):
            return getattr(driver, name), [ctypes.byref(argument) for argument in extra]
    raise NotImplementedError("the driver has no cuMemcpyBatchAsync: CUDA 12.8 wanted")
