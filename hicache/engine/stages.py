"""Pipeline stages of an engine: their links, and their shards of storage."""

from hicache.cache.kinds import FULL, KEY_TAGS
from hicache.engine.deployment import Deployment, Place


def shard_sizes(deployment: Deployment) -> list[dict[int, int]]:
    """Return the bytes of a page, by kind, in the storage of each device of each stage."""
    return [
        {
            tag: -(-size // deployment.tp)
            for tag, size in zip(KEY_TAGS, stage.storage_kinds.page_bytes, strict=False)
            if size
        }
        for stage in deployment.stages
        for _ in range(deployment.tp)
    ]


def joined_rates(rates: dict[str, float], place: Place) -> dict[str, float]:
    """Return the links of all stages as one, on which a copy takes as long as that of stage 0.

    Stages on one host share its memory.
    """
    deployment, hardware = place.deployment, place.config.hardware
    first, whole = (each.host_kinds.page_bytes[FULL] for each in (deployment.stages[0], deployment))
    num_hosts = -(-deployment.num_devices // hardware.devices_per_host)
    hosts = num_hosts * hardware.host_bandwidth.value / len(deployment.stages)
    return {link: rate * whole / first for link, rate in (rates | {"host_memory": hosts}).items()}
