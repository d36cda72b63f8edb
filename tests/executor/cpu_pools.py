"""Pools for a test: real ones, in the memory of the CPU."""

from typing import Any

import torch

from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import Counts, PoolSpec
from hicache.models.shapes import ModelConfig


def cpu_pools(
    model: ModelConfig, page_size: int, device: Counts, host: Counts = (0, 0, 0), **others: Any
) -> TorchPools:
    """Pools with `device` and `host` pages and slots by kind; `others` are fields of `PoolSpec`."""
    spec = PoolSpec(
        model=model,
        page_size=page_size,
        device_counts=device,
        host_counts=host,
        device=torch.device("cpu"),
        **others,
    )
    return TorchPools(spec)
