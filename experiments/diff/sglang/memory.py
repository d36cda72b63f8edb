"""SGLang's pools and allocators for a model's components, at one byte per token."""

from typing import Any, NamedTuple

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from experiments.diff.protocol import Pools

LAYERS = ([0], [1])  # full attention; windows or states
TINY: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
ROW = {"head_num": 1, "head_dim": 1}


class Memory(NamedTuple):
    allocator: Any
    rows: Any
    components: tuple[Any, ...]


def make_memory(pools: Pools) -> Memory:
    rows = _rows_with_states(pools) if pools.num_states else ReqToTokenPool(**_rows(pools))
    states = (ComponentType.MAMBA,) if pools.num_states else ()
    if pools.window_len:
        return Memory(_windowed(pools), rows, (ComponentType.FULL, ComponentType.SWA, *states))
    sizes = {"size": pools.device_tokens, "page_size": pools.page_size}
    shape = {**sizes, **TINY, **ROW, "enable_memory_saver": False}
    if pools.num_states:
        kv_pool = HybridLinearKVPool(
            full_attention_layer_ids=LAYERS[0], mamba_pool=rows.mamba_pool, **shape
        )
    else:
        kv_pool = MHATokenToKVPool(layer_num=1, **shape)
    allocator = PagedTokenToKVPoolAllocator(**sizes, kvcache=kv_pool, need_sort=False, **TINY)
    return Memory(allocator, rows, (ComponentType.FULL, *states))


def take_pages(allocator: Any, count: int) -> Any:
    if not isinstance(allocator, SWATokenToKVPoolAllocator):
        return allocator.alloc(count)
    full = allocator.full_attn_allocator.alloc(count)
    window = allocator.swa_attn_allocator.alloc(count)
    if full is not None and window is not None:
        allocator.set_full_to_swa_mapping(full, window)
        return full
    return None


def _rows(pools: Pools) -> dict[str, Any]:
    return {
        "size": pools.max_running if pools.in_flight else pools.num_running + 2,
        "max_context_len": pools.max_len + pools.page_size,
        "device": "cpu",
        "enable_memory_saver": False,
    }


def _windowed(pools: Pools) -> Any:
    full, window = LAYERS
    sizes = {"size": pools.device_tokens, "size_swa": pools.swa_tokens}
    kv_pool = SWAKVPool(
        page_size=pools.page_size,
        swa_attention_layer_ids=window,
        full_attention_layer_ids=full,
        **sizes,
        **TINY,
        **ROW,
    )
    return SWATokenToKVPoolAllocator(
        page_size=pools.page_size, kvcache=kv_pool, need_sort=False, **sizes, **TINY
    )


def _rows_with_states(pools: Pools) -> Any:
    _, recurrent = LAYERS
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=8,
            n_groups=1,
            num_heads=1,
            head_dim=8,
            state_size=8,
            conv_kernel=2,
        )
        params = Mamba2CacheParams(shape=shape, layers=recurrent)
    return HybridReqToTokenPool(
        mamba_size=pools.num_states,
        mamba_spec_state_size=pools.num_running + 2,
        cache_params=params,
        mamba_layer_ids=recurrent,
        enable_mamba_extra_buffer=True,
        **_rows(pools),
    )
