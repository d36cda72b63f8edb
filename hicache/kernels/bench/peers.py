"""What the bench compares with: other ways to make the same transfer.

The two Triton kernels here are written for the bench after what public engines are known to do
(README.md names them), so that they can be timed where those engines are not installed. SGLang's
own kernels are called when its package is importable.
"""

import importlib
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels import copy_engine
from hicache.kernels.bench.measure import Transfer
from hicache.kernels.table import WORD_BYTES

Launch = Callable[[], object]
SGLANG_MODULE = "sglang.kernels.ops.kvcache.hicache"  # as of 0.5.23


@triton.jit
def _pointer_copy_kernel(
    src_addresses_ptr,  # [N] int64
    dst_addresses_ptr,  # [N] int64
    num_items,
    words,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One item after another, from and to listed addresses, with nothing promised of them."""
    item = tl.program_id(0)
    while item < num_items:
        src = tl.load(src_addresses_ptr + item).to(tl.pointer_type(WORD))
        dst = tl.load(dst_addresses_ptr + item).to(tl.pointer_type(WORD))
        start = 0
        while start < words:
            word = start + tl.arange(0, BLOCK)
            value = tl.load(src + word, mask=word < words)
            tl.store(dst + word, value, mask=word < words)
            start += BLOCK
        item += tl.num_programs(0)


def pointer_copy(
    transfer: Transfer, *, word: tl.dtype, block: int, num_warps: int, num_programs: int
) -> Launch:
    """The pointer-list kernel over the items of a transfer; buffers must have equal items."""
    runs = _addresses(transfer)
    words = transfer.table.src[0].shape[1] * WORD_BYTES * 8 // word.primitive_bitwidth

    def launch() -> None:
        _pointer_copy_kernel[(min(num_programs, len(runs[0])),)](
            runs[0], runs[1], len(runs[0]), words, WORD=word, BLOCK=block, num_warps=num_warps
        )

    return launch


def block_copy_of_vllm(transfer: Transfer, *, num_programs: int = 12) -> Launch:
    """As vLLM's `_swap_blocks_kernel`: 12 programs, 64-bit accesses."""
    return pointer_copy(transfer, word=tl.int64, block=1024, num_warps=4, num_programs=num_programs)


def warp_copy_of_sgl_kernel(transfer: Transfer, *, num_programs: int = 2) -> Launch:
    """As sgl_kernel's `transfer_kv_*`: 2 × 32 warps, 8 bytes in flight a thread."""
    return pointer_copy(
        transfer, word=tl.int64, block=1024, num_warps=32, num_programs=num_programs
    )


def slot_copy_of_sglang(transfer: Transfer, *, num_programs: int) -> Launch:
    """As SGLang's `_fused_slot_copy_kernel`: 16-bit accesses, found in its compiled code."""
    return pointer_copy(transfer, word=tl.int16, block=8192, num_warps=8, num_programs=num_programs)


def torch_index(transfer: Transfer) -> Launch:
    """`dst[dst_ids] = src[src_ids]`, a gather and a scatter for each buffer."""
    sources, targets = transfer.src_ids.long(), transfer.dst_ids.long()

    def launch() -> None:
        for src, dst in zip(transfer.table.src, transfer.table.dst, strict=True):
            dst.index_copy_(0, targets, src.index_select(0, sources))

    return launch


def memcpy_per_page(transfer: Transfer) -> Launch:
    """One asynchronous copy for each page and buffer."""
    pairs = list(zip(transfer.src_ids.tolist(), transfer.dst_ids.tolist(), strict=True))

    def launch() -> None:
        for src, dst in zip(transfer.table.src, transfer.table.dst, strict=True):
            for src_id, dst_id in pairs:
                dst[dst_id].copy_(src[src_id], non_blocking=True)

    return launch


def memcpy_batch(transfer: Transfer) -> Launch:
    """The copy engine, with the list of runs made beforehand."""
    runs = copy_engine.contiguous_runs(
        transfer.table, transfer.src_ids.cpu(), transfer.dst_ids.cpu()
    )
    return lambda: copy_engine.copy_runs(runs, transfer.table.device)


def transfer_of_sglang(
    transfer: Transfer, *, page_size: int, num_programs: int, uses_tma: bool
) -> Launch:
    """SGLang's `transfer_hicache_all_layer` between layer-first pools, K and V alternating.

    With `page_size=1` its TMA kernel declines, and the register kernel runs.

    Raises:
        ImportError: SGLang is not installed.
        RuntimeError: its TMA kernel was asked for, and it would take the other.
    """
    module = importlib.import_module(SGLANG_MODULE)
    table, device = transfer.table, transfer.table.device
    row_bytes = table.src[0].shape[1] * WORD_BYTES // page_size
    if uses_tma and not module.use_hicache_tma_kernel(
        element_size=row_bytes, block_quota=num_programs, page_size=page_size
    ):
        raise RuntimeError("SGLang's TMA kernel declines these pages, or could not be built")
    tokens = torch.arange(page_size, device=device)
    src_rows, dst_rows = (
        (ids.long()[:, None] * page_size + tokens).flatten()
        for ids in (transfer.src_ids, transfer.dst_ids)
    )

    def addresses(buffers: tuple[Tensor, ...]) -> Tensor:
        values = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)
        return values.to(device).view(torch.uint64)

    def launch() -> None:
        module.transfer_hicache_all_layer(
            k_ptr_dst=addresses_of["k_dst"],
            v_ptr_dst=addresses_of["v_dst"],
            indices_dst=dst_rows,
            k_ptr_src=addresses_of["k_src"],
            v_ptr_src=addresses_of["v_src"],
            indices_src=src_rows,
            kv_cache_src_stride_bytes=row_bytes,
            kv_cache_dst_stride_bytes=row_bytes,
            element_size=row_bytes,
            block_quota=num_programs,
            page_size=page_size if uses_tma else 1,
        )

    addresses_of = {
        "k_src": addresses(table.src[::2]),
        "v_src": addresses(table.src[1::2]),
        "k_dst": addresses(table.dst[::2]),
        "v_dst": addresses(table.dst[1::2]),
    }
    return launch


def _addresses(transfer: Transfer) -> tuple[Tensor, Tensor]:
    """Source and target address of every item of every buffer, layer by layer."""
    src, dst = [], []
    for src_buffer, dst_buffer in zip(transfer.table.src, transfer.table.dst, strict=True):
        src.append(
            src_buffer.data_ptr() + transfer.src_ids.long() * src_buffer.stride(0) * WORD_BYTES
        )
        dst.append(
            dst_buffer.data_ptr() + transfer.dst_ids.long() * dst_buffer.stride(0) * WORD_BYTES
        )
    return torch.cat(src), torch.cat(dst)
