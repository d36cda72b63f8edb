"""What a config comes to: an engine's devices, what a step costs there, the sizes of its pools."""

from dataclasses import dataclass, replace

from hicache.cache.tiers.capacity import Capacity, capacities, engine_rule, page_bytes
from hicache.cache.tree.node import FULL, KIND_NAMES, MAMBA, SWA
from hicache.config import ExperimentConfig
from hicache.executor.simulated.cost import CostModel
from hicache.models import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One model on the devices of one engine.

    `page_bytes`: of a page (full, swa) and a slot (mamba), over all devices. `device`, `host`: the
    pools of the two tiers.
    """

    tp: int
    cost: CostModel
    page_bytes: tuple[int, int, int]
    device: Capacity
    host: Capacity


def deploy(config: ExperimentConfig) -> Deployment:
    """The deployment that a config names.

    Raises:
        ValueError: a pool has no room for the least that a request needs.
    """
    cost = CostModel(config.model, config.hardware, tp=config.tp, ep=config.parallel.ep)
    sizes = page_bytes(config.model, config.cache.page_size, config.tp)
    cache, free_bytes = config.cache, cost.free_device_bytes
    ruled_bytes = engine_rule(cache, config.model, config.hardware, config.tp)
    if ruled_bytes is not None:
        cache, free_bytes = replace(cache, device_gib=None), ruled_bytes
    if cache.host_gib_per_rank is not None:
        cache = replace(cache, host_gib=cache.host_gib_per_rank * config.tp)
    device, host = capacities(cache, config.model, sizes, free_bytes)
    return Deployment(tp=config.tp, cost=cost, page_bytes=sizes, device=device, host=host)


def describe(config: ExperimentConfig, deployment: Deployment) -> list[str]:
    """A line for the pools of each tier."""
    model, devices = config.model.name, f"{deployment.tp} device(s)"
    if config.cache.unlimited:
        return [f"{model} on {devices}: pools of unlimited size"]
    notes = []
    for word, capacity in (("device", deployment.device), ("host", deployment.host)):
        parts = []
        for kind in (FULL, SWA, MAMBA):
            number = capacity.counts[kind]
            if not deployment.page_bytes[kind] or number is None:
                continue
            if kind == MAMBA:
                parts.append(f"{number:,} states")
            else:
                parts.append(f"{number * config.cache.page_size:,} {KIND_NAMES[kind]} tokens")
        held = " + ".join(parts)
        notes.append(f"{model} on {devices}, {word}: {_gib(capacity.total_bytes)} = {held}")
    return notes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
