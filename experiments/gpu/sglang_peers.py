"""SGLang's own copy kernels as kernels for the workbench, where its package is importable.

    python -m hicache.workbench.bench --kernel experiments.gpu.sglang_peers:tma   (on a GPU)

`experiments.gpu.sglang_kernels` makes a small folder to import them from.
"""

import importlib
from functools import partial

import torch
from torch import Tensor

from hicache.kernels.table import device_of
from hicache.workbench.bench.peers import Bound, Buffers, Launch
from hicache.workbench.contract import CopyLaunch

SGLANG_MODULE = "sglang.kernels.ops.kvcache.hicache"  # as of 0.5.23
SGLANG_PAGE = 16  # tokens of a page


def _sglang(src: Buffers, dst: Buffers, *, programs: int, uses_tma: bool) -> CopyLaunch:
    """Return a function that copies pages with SGLang's kernel `transfer_hicache_all_layer`.

    Both pools are layer-first, and their buffers alternate between K and V. With `uses_tma`, the
    kernel is SGLang's variant with TMA.

    Raises:
        NotImplementedError: SGLang is not installed, or would choose another of its kernels.
    """
    try:
        module = importlib.import_module(SGLANG_MODULE)
    except ImportError as error:
        raise NotImplementedError(f"SGLang cannot be imported: {error}") from error
    page_size = SGLANG_PAGE
    row_bytes = src[0][:1].nbytes // page_size
    for buffer in (*src, *dst):
        if buffer[:1].nbytes != page_size * row_bytes or not buffer.is_contiguous():
            raise NotImplementedError("layer-first pools of equal pages wanted")
    if uses_tma and not module.use_hicache_tma_kernel(
        element_size=row_bytes, block_quota=programs, page_size=page_size
    ):
        raise NotImplementedError("SGLang's TMA kernel declines these pages, or was not built")
    device = device_of({"source": src, "target": dst})

    def addresses(buffers: Buffers) -> Tensor:
        values = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)
        return values.to(device).view(torch.uint64)

    tables = {
        "k_ptr_src": addresses(src[::2]),
        "v_ptr_src": addresses(src[1::2]),
        "k_ptr_dst": addresses(dst[::2]),
        "v_ptr_dst": addresses(dst[1::2]),
    }
    tokens = torch.arange(page_size, device=device)

    def bind(src_ids: Tensor, dst_ids: Tensor, num_programs: int | None) -> Launch:
        src_rows, dst_rows = (
            (ids.long()[:, None] * page_size + tokens).flatten() for ids in (src_ids, dst_ids)
        )
        return partial(
            module.transfer_hicache_all_layer,
            **tables,
            indices_src=src_rows,
            indices_dst=dst_rows,
            kv_cache_src_stride_bytes=row_bytes,
            kv_cache_dst_stride_bytes=row_bytes,
            element_size=row_bytes,
            block_quota=num_programs or programs,
            page_size=page_size if uses_tma else 1,
        )

    return Bound(bind=bind)


registers = partial(_sglang, programs=2, uses_tma=False)
tma = partial(_sglang, programs=4, uses_tma=True)
