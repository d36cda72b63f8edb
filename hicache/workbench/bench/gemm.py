"""A matrix product whose programs stay on their SMs until the whole product is done.

A copy that starts meanwhile gets an SM only when a program ends, not after every tile as with a
library's product. Engines run such kernels in prefill.

Sizes: a is [M, K], b is [K, N], both float16 and contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels.copy import num_sms

BLOCKS = (128, 256, 64)  # of M, N and K


@triton.jit
def _persistent_gemm_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    out_ptr,  # [M, N]
    num_rows,  # M
    num_columns,  # N
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_across = tl.cdiv(num_columns, BLOCK_N)
    tile = tl.program_id(0)
    while tile < tl.cdiv(num_rows, BLOCK_M) * tiles_across:
        row = (tile // tiles_across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        column = (tile % tiles_across * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a_mask = (row < num_rows) & (k[None, :] < K)
            b_mask = (k[:, None] < K) & (column < num_columns)
            a = tl.load(a_ptr + row * K + k[None, :], mask=a_mask, other=0.0)
            b = tl.load(
                b_ptr + k[:, None].to(tl.int64) * num_columns + column, mask=b_mask, other=0.0
            )
            total = tl.dot(a, b, total)
        is_inside = (row < num_rows) & (column < num_columns)
        tl.store(out_ptr + row * num_columns + column, total.to(tl.float16), mask=is_inside)
        tile += tl.num_programs(0)


def persistent_gemm(
    a: Tensor, b: Tensor, out: Tensor, *, blocks: tuple[int, int, int] = BLOCKS
) -> None:
    block_m, block_n, block_k = blocks
    with torch.cuda.device_of(a):
        _persistent_gemm_kernel[(num_sms(a.device),)](
            a, b, out, a.shape[0], b.shape[1],
            K=a.shape[1], BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=8, num_stages=3,
        )  # fmt: skip
