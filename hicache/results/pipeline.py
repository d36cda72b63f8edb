"""What pipeline stages leave unused: time between batches, and memory of smaller stages."""

from collections.abc import Mapping

from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig
from hicache.engine.deployment import Deployment

TIERS = ("device", "host")
KEYS = (
    "pipeline/bubble_share",
    "pipeline/late_copies_s",
    *(f"pipeline/unused_{tier}_bytes" for tier in TIERS),
)


def unused_bytes(deployment: Deployment, tier: str) -> list[int]:
    """Return the bytes of a tier that each stage has room for, and that no stage may use."""
    used = getattr(deployment, tier).counts
    return [
        sum(
            ((own or 0) - (shared or 0)) * size
            for own, shared, size in zip(
                getattr(stage, tier).counts, used, kinds.page_bytes, strict=True
            )
        )
        for stage in deployment.stages
        for kinds in [stage.host_kinds if tier == "host" else stage.kinds]
    ]


def pipeline_measures(deployment: Deployment, counters: Mapping[str, int]) -> dict[str, float]:
    """Return what the stages of a run left unused.

    The bubble share is the part of the time of all stages, while the engine was busy, in which they
    computed nothing. Late copies are those that end later than on stage 0; their time is that in
    which batches waited for them.
    """
    busy_ns = counters["engine/busy_ns"] * len(deployment.stages)
    idle = 1 - counters["pipeline/computing_ns"] / busy_ns if busy_ns else 0.0
    return {
        "pipeline/bubble_share": idle,
        "pipeline/late_copies_s": counters["pipeline/late_copies_ns"] / SECOND_NS,
    } | {f"pipeline/unused_{tier}_bytes": sum(unused_bytes(deployment, tier)) for tier in TIERS}


def outcome(summary: Mapping[str, float]) -> str | None:
    """Return what the stages of a run left unused, or None if it had none."""
    if "pipeline/bubble_share" not in summary:
        return None
    return (
        f"stages compute nothing in {summary['pipeline/bubble_share']:.0%} of the time of steps, "
        f"and wait {summary['pipeline/late_copies_s']:.3g} s for copies that stage 0 has finished"
    )


def stage_remarks(config: ExperimentConfig, deployment: Deployment) -> list[str]:
    """Return a sentence on the layers of the stages, and on the memory that they leave unused."""
    if not deployment.stages:
        return []
    layers = [len(each.cost.model.layer_words) for each in deployment.stages]
    parts = []
    for tier in TIERS:
        shares = [
            lost / max(getattr(stage, tier).total_bytes, 1)
            for stage, lost in zip(deployment.stages, unused_bytes(deployment, tier), strict=True)
        ]
        parts.append(f"{', '.join(f'{each:.2%}' for each in shares)} of the {tier}")
    return [
        f"{len(layers)} pipeline stages of {', '.join(map(str, layers))} layers, on {config.tp} "
        f"device(s) each; all hold as many tokens as the smallest, which leaves unused "
        f"{' and '.join(parts)} memory"
    ]
