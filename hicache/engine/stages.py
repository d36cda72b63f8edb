"""Pipeline stages of an engine: their links, and their shards of storage."""

from collections.abc import Sequence

from hicache.cache.kinds import FULL, KEY_TAGS
from hicache.clock import Stall
from hicache.engine.deployment import Deployment, Place
from hicache.executor.simulated.pipeline import LongestStall, Shards
from hicache.executor.simulated.stores import KeyStore


def shard_sizes(deployment: Deployment, num_ranks: int) -> list[dict[int, int]]:
    """Return the bytes of a page, by kind, in each store: one of each rank for each stage.

    One rank, which stands for all devices of a stage, has a store for each of them.
    """
    devices = 1 if num_ranks > 1 else deployment.tp
    sizes = [
        {
            tag: -(-size // (devices * num_ranks))
            for tag, size in zip(KEY_TAGS, stage.storage_kinds.page_bytes, strict=False)
            if size
        }
        for stage in deployment.stages
        for _ in range(devices)
    ]
    return sizes * num_ranks


def joined_stores(
    stores: Sequence[KeyStore], stalls: Sequence[Stall], num_ranks: int
) -> tuple[list[KeyStore], list[Stall]]:
    """Return the stores of each rank as one, and their stalls: the shards of all stages."""
    each = len(stalls) // num_ranks
    parts = [slice(first, first + each) for first in range(0, len(stalls), each)]
    return [Shards(stores[part]) for part in parts], [LongestStall(stalls[part]) for part in parts]


def joined_rates(rates: dict[str, float], place: Place) -> dict[str, float]:
    """Return the links of all stages as one, on which a copy takes as long as that of stage 0.

    Stages on one host share its memory.
    """
    deployment, hardware = place.deployment, place.config.hardware
    first, whole = (each.host_kinds.page_bytes[FULL] for each in (deployment.stages[0], deployment))
    num_hosts = -(-deployment.num_devices // hardware.devices_per_host)
    hosts = num_hosts * hardware.host_bandwidth.value / len(deployment.stages)
    return {link: rate * whole / first for link, rate in (rates | {"host_memory": hosts}).items()}
