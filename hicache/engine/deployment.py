"""What a config comes to: an engine's devices, what a step costs there, the sizes of its pools."""

from dataclasses import dataclass

from hicache.cache.tiers.capacity import Capacity, capacities, page_bytes
from hicache.cache.tree.node import FULL, KIND_NAMES, MAMBA, SWA
from hicache.config import ExperimentConfig
from hicache.executor.simulated.cost import CostModel
from hicache.models import GIB, PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One model on the devices of one engine.

    `page_bytes`: of a page (full, swa) and a slot (mamba), over all devices; `host_page_bytes`,
    `storage_page_bytes`: in the formats of these tiers. `device`, `host`: pools of the two tiers.
    """

    tp: int
    cost: CostModel
    page_bytes: tuple[int, int, int]
    host_page_bytes: tuple[int, int, int]
    storage_page_bytes: tuple[int, int, int]
    device: Capacity
    host: Capacity


def deploy(config: ExperimentConfig) -> Deployment:
    """The deployment that a config names.

    Raises:
        ValueError: a pool has no room for the least that a request needs.
    """
    cost = CostModel(config.model, config.hardware, tp=config.tp)
    shape = config.model, config.cache.page_size, config.tp
    sizes, host_sizes, storage_sizes = (
        page_bytes(*shape, form)
        for form in (PLAIN, config.cache.host_format, config.storage_format)
    )
    device, host = capacities(
        config.cache, config.model, sizes, cost.free_device_bytes, host_sizes=host_sizes
    )
    return Deployment(
        tp=config.tp,
        cost=cost,
        page_bytes=sizes,
        host_page_bytes=host_sizes,
        storage_page_bytes=storage_sizes,
        device=device,
        host=host,
    )


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
    forms = {"host": config.cache.host_format}
    if config.storage.kind != "none":
        forms["storage"] = config.storage_format
    coded = ", ".join(f"{tier} {form}" for tier, form in forms.items() if form != PLAIN)
    if coded:
        notes.append(
            f"pages are kept in fewer bytes ({coded}): what comes back differs from what was "
            f"computed, and no result here says how much (lossy)"
        )
    return notes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
