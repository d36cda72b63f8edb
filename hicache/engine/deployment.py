"""What a config comes to: an engine's devices, what a step costs there, the sizes of its pools."""

from dataclasses import dataclass, replace

from hicache.cache.kinds import Kinds, model_kinds
from hicache.cache.tiers.capacity import Capacity, capacities, engine_rule
from hicache.config import ExperimentConfig
from hicache.executor.simulated.cost import CostModel
from hicache.models import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One model on the devices of one engine.

    `kinds`: what is cached. `device`, `host`: the pools of the two tiers.
    """

    tp: int
    cost: CostModel
    kinds: Kinds
    device: Capacity
    host: Capacity


def deploy(config: ExperimentConfig) -> Deployment:
    """The deployment that a config names.

    Raises:
        ValueError: a pool has no room for the least that a request needs.
    """
    cost = CostModel(config.model, config.hardware, tp=config.tp, ep=config.parallel.ep)
    kinds = model_kinds(config.model, config.cache.page_size, config.tp)
    cache, free_bytes = config.cache, cost.free_device_bytes
    ruled_bytes = engine_rule(cache, config.model, config.hardware, config.tp)
    if ruled_bytes is not None:
        cache, free_bytes = replace(cache, device_gib=None), ruled_bytes
    if cache.host_gib_per_rank is not None:
        cache = replace(cache, host_gib=cache.host_gib_per_rank * config.tp)
    device, host = capacities(cache, config.model, kinds, free_bytes)
    return Deployment(tp=config.tp, cost=cost, kinds=kinds, device=device, host=host)


def describe(config: ExperimentConfig, deployment: Deployment) -> list[str]:
    """A line for the pools of each tier."""
    model, devices = config.model.name, f"{deployment.tp} device(s)"
    if config.cache.unlimited:
        return [f"{model} on {devices}: pools of unlimited size"]
    notes = []
    for word, capacity in (("device", deployment.device), ("host", deployment.host)):
        kinds, parts = deployment.kinds, []
        for kind in kinds.numbers:
            number = capacity.counts[kind] or 0
            unit = "states" if kind in kinds.points else f"{kinds.names[kind]} tokens"
            parts.append(f"{number * kinds.units[kind]:,} {unit}")
        held = " + ".join(parts)
        notes.append(f"{model} on {devices}, {word}: {_gib(capacity.total_bytes)} = {held}")
    return notes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
