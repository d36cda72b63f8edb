"""Attention and scans of libraries, as peers of ours where the libraries are installed.

A library that is missing, or fails to build its kernels, is named in the notes of the session.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hicache.workbench.bench.session import Session

WORKSPACE_BYTES = 256 << 20


def attention(
    session: Session, pool: Tensor, table: Tensor, queries: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Return attention over the same pages by FlashInfer, and by PyTorch over gathered ones.

    Args:
        pool: [2, pages, page_size, kv_heads, head_dim].
        table: [sequences, columns] int32; every page is full.
        queries: [sequences, rows, query_heads, head_dim], of the last tokens.
    """
    num_sequences, num_rows = queries.shape[:2]
    length = table.shape[1] * pool.shape[2]
    keys, values = (
        part[table.long()].view(num_sequences, length, *part.shape[2:]).transpose(1, 2).contiguous()
        for part in pool
    )
    first = queries.transpose(1, 2).contiguous()
    position = torch.arange(length - num_rows, length, device=pool.device)[:, None]
    mask = torch.arange(length, device=pool.device) <= position
    seen = None if num_rows == 1 else mask

    def gathered() -> Tensor:
        mixed = functional.scaled_dot_product_attention(
            first, keys, values, attn_mask=seen, enable_gqa=True
        )
        return mixed.transpose(1, 2).contiguous()

    found = {"torch, pages gathered before": gathered}
    return found | _built(session, "FlashInfer", partial(_flashinfer, pool, table, queries))


def _built(
    session: Session, name: str, build: Callable[[], Callable[[], Tensor]]
) -> dict[str, Callable[[], Tensor]]:
    try:
        return {name: build()}
    except Exception as error:  # in foreign code
        session.notes[name] = f"{type(error).__name__}: {error}"[:300]
        return {}


def _flashinfer(pool: Tensor, table: Tensor, queries: Tensor) -> Callable[[], Tensor]:
    import flashinfer

    num_sequences, num_rows, query_heads, dim = queries.shape
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
    counts = torch.arange(num_sequences + 1, dtype=torch.int32, device=pool.device)
    pages = counts * table.shape[1], table.flatten()
    full = torch.full_like(counts[1:], pool.shape[2])
    sizes = query_heads, pool.shape[3], dim, pool.shape[2]
    dtypes: dict[str, Any] = {"q_data_type": queries.dtype, "kv_data_type": pool.dtype}
    flat = queries.flatten(0, 1)
    both = pool[0], pool[1]
    wrapper: Any
    if num_rows == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(*pages, full, *sizes, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(counts * num_rows, *pages, full, *sizes, causal=True, **dtypes)
    wrapper.run(flat, both)  # compiles
    return lambda: wrapper.run(flat, both)


def delta_rule(
    session: Session, size: tuple[int, int, int], keys: int, dim: int
) -> dict[str, Callable[[], Tensor]]:
    """Return flash-linear-attention's gated delta rule on random inputs.

    `size` has the numbers of sequences, of tokens of each, and of heads.
    """
    build = partial(_delta_rule, session.bench.device, size, keys, dim)
    return _built(session, "flash-linear-attention", build)


def _delta_rule(
    device: torch.device, size: tuple[int, int, int], keys: int, dim: int
) -> Callable[[], Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    query, key = (torch.randn(*size, keys, device=device, dtype=torch.bfloat16) for _ in range(2))
    value = torch.randn(*size, dim, device=device, dtype=torch.bfloat16)
    gate = functional.logsigmoid(torch.randn(*size, device=device))
    beta = torch.rand(*size, device=device, dtype=torch.bfloat16)
    state = torch.zeros(size[0], size[2], keys, dim, device=device)
    rule = fused_recurrent_gated_delta_rule if size[1] == 1 else chunk_gated_delta_rule
    launch = partial(
        rule, query, key, value, g=gate, beta=beta, initial_state=state,
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    launch()  # compiles
    return launch
