"""Metrics of runs in which separate engines compute prompts and decode."""

from collections.abc import Mapping, Sequence

from hicache.cache.prefix_cache import HIT_TIERS
from hicache.clock import SECOND_NS
from hicache.config import ParallelConfig
from hicache.engine.deployment import Place
from hicache.models.cost import CostModel
from hicache.results.metrics import RequestRecord

OFFERED_BATCH = 32  # assumed decode batch size, to price the decode steps of an isolated request
ROLES = ("prefill", "decode")
# counted by decode engines
COUNTERS = (
    *(f"decode/{tier}_reused_tokens" for tier in HIT_TIERS),
    "decode/failed_handovers_count",
    "decode/offloaded_pages",
    "transfer/link_bytes",
)
MEASURES = (
    *(f"{role}/{key}" for role in ROLES for key in ("busy_s", "gpu_share", "backlog_share")),
    *(f"load/rho_{what}" for what in (*ROLES, "link")),
    "decode/reused_share",
    "decode/sglang_cached_tokens",
)


def as_sglang_reports(record: RequestRecord) -> tuple[int, int]:
    """Return the hits of a request as SGLang's decode engine adds them up: all, and on the device.

    Those that only the decode engine held count as device hits.
    """
    hits = record.prompt_len - record.computed_len
    more = max(record.reused_len - hits, 0)
    return hits + more, record.device_hit_len + more


def role_measures(
    parallel: ParallelConfig,
    places: Sequence[Place],
    records: Sequence[RequestRecord],
    counters: Mapping[str, int],
    span_s: float,
) -> dict[str, float]:
    """Return the load of the engines of each role; nothing if all engines do both.

    `counters` are those of all engines, and `span_s` is the time in which requests arrived, in s.
    """
    if not parallel.prefill:
        return {}
    measures: dict[str, float] = {key: counters[key] for key in COUNTERS}
    answered = [record for record in records if record.output_len]
    for role in ROLES:
        own = [place.deployment for place in places if place.role == role]
        share = _offered_s(role, own[0].cost, answered) / span_s / len(own)
        backlog = counters[f"{role}/backlog_ns"] / SECOND_NS / span_s / len(own)
        measures[f"{role}/busy_s"] = counters[f"{role}/busy_ns"] / SECOND_NS * own[0].tp
        measures[f"{role}/gpu_share"], measures[f"{role}/backlog_share"] = share, backlog
        measures[f"load/rho_{role}"] = max(share, backlog)
    link_bytes_per_s = parallel.link_gbps * 1e9 * min(parallel.prefill, parallel.decode)
    reused = sum(record.reused_len for record in answered)
    return measures | {
        "load/rho_link": counters["transfer/link_bytes"] / span_s / link_bytes_per_s,
        "decode/sglang_cached_tokens": sum(as_sglang_reports(record)[0] for record in answered),
        "decode/reused_share": reused / max(sum(each.prompt_len for each in answered), 1),
        "gpu/busy_s": measures["prefill/busy_s"] + measures["decode/busy_s"],
        "gpu/prefill_s": measures["prefill/busy_s"],
    }


def _offered_s(role: str, cost: CostModel, answered: Sequence[RequestRecord]) -> float:
    # seconds for which the requests occupy the engines of a role
    if role == "prefill":
        parts = [(each.prompt_len - each.computed_len, each.prompt_len) for each in answered]
        return sum(cost.prefill_s(cached_len, length) for cached_len, length in parts)
    lengths = [(each.prompt_len, each.output_len) for each in answered if each.output_len > 1]
    # the prompts count for the other role
    return sum(cost.offered_s(each, each, output, OFFERED_BATCH) for each, output in lengths)
