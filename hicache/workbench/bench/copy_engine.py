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


def contiguous_runs(table: CopyTable, src_ids: Tensor, dst_ids: Tensor) -> Runs:
    """Split a copy of items between two pools into the longest contiguous memory copies.

    An item is a page or a Mamba state.

    Args:
        table: the two pools, as described by `copy_table`.
        src_ids: [items] int32 in host memory. A pair with a negative id is skipped.
        dst_ids: [items] int32 in host memory.
    """
    moved = (src_ids >= 0) & (dst_ids >= 0)
    sources, targets = src_ids[moved].long(), dst_ids[moved].long()
    breaks = torch.ones(len(sources), dtype=torch.bool)
    breaks[1:] = (sources.diff() != 1) | (targets.diff() != 1)
    every = _merged_rows(table.rows)
    size = every[:, 4]
    merges = (every[:, 2] == size) & (every[:, 3] == size)
    runs = []
    for rows, starts in (
        (every[merges], torch.nonzero(breaks).flatten()),
        (every[~merges], torch.arange(len(sources))),
    ):
        src, dst, src_stride, dst_stride, size = rows.T[:, :, None]
        lengths = torch.cat([starts, torch.tensor([len(sources)])]).diff()
        from_, to = src + sources[starts] * src_stride, dst + targets[starts] * dst_stride
        runs.append((from_, to, lengths * size))
    src, dst, num_bytes = (
        torch.cat([each.flatten() for each in column]) for column in zip(*runs, strict=True)
    )
    is_from_host = table.crosses_link and table.src[0].device.type == "cpu"
    return Runs(src, dst, num_bytes, ANY_ORDER if is_from_host else STREAM_ORDER)


def _merged_rows(rows: Tensor) -> Tensor:
    goes_on = (rows[:-1, :2] + rows[:-1, 4:] == rows[1:, :2]).all(1)
    goes_on &= (rows[:-1, 2:4] == rows[1:, 2:4]).all(1)
    number = torch.cat([torch.zeros(1, dtype=torch.int64), (~goes_on).cumsum(0)])
    first = torch.cat([torch.ones(1, dtype=torch.bool), ~goes_on])
    merged = rows[first].clone()
    merged[:, 4] = torch.zeros(len(merged), dtype=torch.int64).index_add_(0, number, rows[:, 4])
    return merged


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
