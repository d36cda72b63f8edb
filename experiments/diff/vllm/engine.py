"""vLLM's scheduler over pools like ours, for a model that never runs."""

import os
from pathlib import Path
from typing import Any

from experiments.diff.protocol import Pools, SideError

os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # do not search for a GPU
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch  # isort: skip
from vllm import config  # isort: skip
from vllm.v1 import kv_cache_interface as kv  # isort: skip
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # isort: skip
from vllm.v1.core.sched.scheduler import Scheduler  # isort: skip
from vllm.v1.structured_output import StructuredOutputManager  # isort: skip
from experiments.diff.vllm.dialect import known  # isort: skip

HEAD_SIZE = 64
MODEL = Path(__file__).parent / "model"  # a config.json for a head of `HEAD_SIZE`


def make_scheduler(
    pools: Pools, *, eviction: str, is_late: bool = False, has_draft: bool = False
) -> Any:
    longest = pools.max_len + pools.page_size
    model = config.ModelConfig(
        model=str(MODEL), skip_tokenizer_init=True, max_model_len=longest, dtype="bfloat16"
    )
    cache = config.CacheConfig(block_size=pools.page_size, enable_prefix_caching=True)
    num_blocks, num_on_host = room(pools)
    # one block is the null block; the release chooses which windows and states to keep
    kept = getattr(cache, "prefix_cache_retention_interval", None)
    layout = make_layout(pools, num_blocks + 1, kept)
    transfer = None
    if num_on_host:
        block_bytes = layout.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        transfer = config.KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": num_on_host * block_bytes,
                "eviction_policy": eviction,
            },
        )
    settings = config.VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=known(
            config.SchedulerConfig,
            max_num_seqs=pools.max_running if pools.in_flight else pools.num_running + 1,
            max_num_batched_tokens=pools.chunk_tokens,
            max_model_len=longest,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=is_late,
        ),
        kv_transfer_config=transfer,
        device_config=config.DeviceConfig("cpu"),
    )
    if has_draft:
        layout.kv_cache_groups[0].is_eagle_group = True  # the draft has full attention
        object.__setattr__(settings, "speculative_config", Draft())
    cache.num_gpu_blocks = num_blocks + 1
    if pools.num_states:
        cache.mamba_cache_mode = "align"
    # some releases switch hybrid models off for a CPU
    settings.scheduler_config.disable_hybrid_kv_cache_manager = len(pools.components) == 1
    settings.scheduler_config.async_scheduling = is_late  # switched off without a GPU, too
    return (AsyncScheduler if is_late else Scheduler)(
        vllm_config=settings,
        kv_cache_config=layout,
        structured_output_manager=StructuredOutputManager(settings),
        block_size=pools.page_size,
    )


class Draft:
    """Stands for a `SpeculativeConfig` of EAGLE whose drafts are never accepted.

    No step has draft tokens, so that requests advance as without it.
    """

    num_speculative_tokens = max_num_new_slots_for_drafting = 0
    num_speculative_tokens_per_batch_size = None
    disable_lookahead_block_hashes = disable_eagle_block_drop = False

    def __getattr__(self, name: str) -> Any:
        is_true = name in ("use_eagle", "use_eagle_block_drop", "needs_eagle_block_drop")
        return lambda: is_true


def room(pools: Pools) -> tuple[int, int]:
    blocks = (pools.device_tokens + pools.swa_tokens) // pools.page_size + pools.num_states
    return blocks, int(blocks * pools.host_ratio)


def make_layout(pools: Pools, num_blocks: int, kept: int | None) -> Any:
    """Return a vLLM cache configuration with one group of layers per kind of KV cache.

    Blocks of all groups have the same number of bytes. A sliding window or a Mamba state is cached
    every `kept` tokens. If `kept` is 0, they are cached only at the ends of prompts and at branch
    points. None means at every block.
    """
    if pools.window_len and pools.num_states:
        raise SideError("vllm: models with both windows and states are not supported")
    shape: dict[str, Any] = {
        "block_size": pools.page_size,
        "num_kv_heads": 1,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    specs = [kv.FullAttentionSpec(**shape)]
    block_bytes = specs[0].page_size_bytes
    if pools.window_len:
        specs.append(kv.SlidingWindowSpec(**shape, sliding_window=pools.window_len))
    if pools.num_states:
        specs.append(
            kv.MambaSpec(
                block_size=pools.page_size,
                shapes=((block_bytes // torch.float32.itemsize,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
        )
    names = list(pools.components)
    tensor = known(
        kv.KVCacheTensor,
        size=num_blocks * block_bytes,
        shared_by=names,
        layers=names[:1],
        layer_stride=0,
        block_stride=block_bytes,
    )
    groups = [kv.KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
    return known(
        kv.KVCacheConfig,
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=kept,
        hash_block_size=pools.page_size,
        cache_hit_alignment_tokens=pools.page_size,
    )
