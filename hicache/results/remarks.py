"""Sentences about a run's requests, model, machine and memory, for its user."""

from hicache.config import ExperimentConfig
from hicache.engine.deployment import Deployment
from hicache.models import GIB, PLAIN
from hicache.models.shapes import LayerKind
from hicache.models.shapes import describe as describe_shape
from hicache.results.pipeline import stage_remarks
from hicache.results.speculation import expectation
from hicache.workload.workload import Workload


def remarks(config: ExperimentConfig, deployment: Deployment, workload: Workload) -> list[str]:
    notes = []
    max_len = config.model.max_len
    too_long = sum(each.prompt_len + each.output_len > max_len for each in workload.requests)
    if too_long:
        notes.append(
            f"{too_long:,} requests are longer than model.max_len={max_len:,}: they are rejected, "
            f"and so are the later turns of their sessions"
        )
    if config.model.from_hf is not None:
        notes.append(describe_shape(config.model))
    if config.hardware.table is not None:
        notes.append(f"{config.hardware.name}, with the measurements of {config.hardware.table}")
    if config.speculation.drafts:
        notes.append(expectation(config))
    return notes + pool_remarks(config, deployment)


def pool_remarks(config: ExperimentConfig, deployment: Deployment) -> list[str]:
    model, devices = config.model.name, f"{deployment.num_devices} device(s)"
    copies = config.model.kv_copies(LayerKind.full, deployment.tp)
    if copies > 1:
        devices += f" ({copies} copies of the KV)"
    if config.cache.unlimited:
        return [f"{model} on {devices}: pools of unlimited size"]
    notes = []
    for word, capacity in (("device", deployment.device), ("host", deployment.host)):
        kinds, parts = deployment.kinds, []
        for kind in kinds.numbers:
            number = capacity.counts[kind] or 0
            unit = "states" if kind in kinds.points else f"{kinds.names[kind]} tokens"
            parts.append(f"{number * kinds.units[kind]:,} {unit}")
        pools = config.cache.pools
        is_shared = pools == "shared_both" or (word == "host" and pools == "shared")
        held = (" or " if is_shared else " + ").join(parts)
        notes.append(f"{model} on {devices}, {word}: {_gib(capacity.total_bytes)} = {held}")
        notes += [
            f"the {word} has no room for data of {kinds.names[kind]}, so prompts cannot resume: "
            f"set cache.{word}.share.{kinds.names[kind]}"
            for kind in kinds.numbers
            if capacity.total_bytes and capacity.counts[kind] == 0
            if kind not in dict(kinds.replayed)
        ]
    notes += stage_remarks(config, deployment)
    forms = {"host": config.cache.host_format}
    if config.storage.kind != "none":
        forms["storage"] = config.storage_format
    coded = ", ".join(f"{tier} {form}" for tier, form in forms.items() if form != PLAIN)
    if coded:
        notes.append(
            f"pages are kept in fewer bytes ({coded}): what comes back differs from what was "
            f"computed (lossy; executor.verify measures it in a real run)"
        )
    return notes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
