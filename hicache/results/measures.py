"""Metrics of a whole run that do not follow from its requests, such as GPU load and counts."""

from collections.abc import Mapping, Sequence
from math import fsum, inf

import numpy as np

from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig, StorageConfig
from hicache.engine.deployment import Deployment, Place
from hicache.models.cost import CostModel
from hicache.request import Request, TokenSpans
from hicache.results.keys import COUNTERS
from hicache.results.metrics import (
    PEER_BYTES,
    REQUIRED_MEASURES,
    RequestRecord,
    request_times,
)
from hicache.results.pipeline import pipeline_measures
from hicache.results.recorder import Tally
from hicache.results.roles import OFFERED_BATCH, role_measures
from hicache.results.speculation import speculation_measures
from hicache.workload.workload import Workload, repeat_sessions, sample_sessions

WORKER_TIMES = tuple(f"storage/{kind}_busy_ns" for kind in ("read", "write", "query"))
# for the requests of one stage of the load
STAGE_TIMES = ("request/count", "request/ttft_s_mean", "request/ttft_s_p95")
Lengths = tuple[int, int, int]  # tokens: cached, in the prompt, in the answer


def run_measures(
    config: ExperimentConfig,
    places: Sequence[Place],
    records: Sequence[RequestRecord],
    tally: Tally,
) -> dict[str, float]:
    deployment = places[0].deployment
    counters, num_devices = tally.counters, deployment.num_devices
    measures: dict[str, float] = {
        name: count
        for name, count in counters.items()
        if not (name.startswith("cache/") or name.endswith("_ns"))
    }
    span_s = _span_s([record.arrival_ns for record in records])
    measures |= {
        "prefetch/discarded_pages": sum(
            count for name, count in counters.items() if name.startswith("prefetch/discarded_")
        ),
        **tally.gaps.seconds(),
        **_load(config.storage, deployment, records, counters, span_s, tally.num_engines),
        "load/closed_loop": int(not config.workload.is_timed),
        "gpu/busy_s": counters["engine/busy_ns"] / SECOND_NS * num_devices,
        "gpu/prefill_s": counters["engine/prefill_ns"] / SECOND_NS * num_devices,
        "engine/steps_count": tally.num_steps,
        "engine/span_s": tally.now_ns / SECOND_NS,
        "tree/nodes_count": tally.num_nodes,
    }
    measures |= role_measures(config.parallel, places, records, counters, span_s)
    if config.storage.kind == "peers":  # on average over the engines
        peer_bytes = measures[PEER_BYTES] = counters[PEER_BYTES]
        rho = peer_bytes / span_s / (config.parallel.link_gbps * 1e9) / tally.num_engines
        measures["load/rho_link"] = measures.get("load/rho_link", 0) + rho
    for stage in tally.stages:
        part = [each for each in records if stage.start_ns <= each.arrival_ns < stage.end_ns]
        stage_s = (stage.end_ns - stage.start_ns) / SECOND_NS
        found = _load(config.storage, deployment, part, stage.counters, stage_s, tally.num_engines)
        found |= {key: value for key, value in request_times(part).items() if key in STAGE_TIMES}
        measures |= {f"stage_{stage.number:02d}/{key}": value for key, value in found.items()}
    if deployment.stages and config.executor.kind == "simulated":  # real ones compute in turn
        measures |= pipeline_measures(deployment, counters)
    if config.speculation.drafts:
        measures |= speculation_measures(counters)
    return dict.fromkeys((*REQUIRED_MEASURES, *COUNTERS), 0) | measures


def _load(
    storage: StorageConfig,
    deployment: Deployment,
    records: Sequence[RequestRecord],
    counters: Mapping[str, int],
    span_s: float,
    num_engines: int,
) -> dict[str, float]:
    lengths = [
        (record.prompt_len - record.computed_len, record.prompt_len, record.output_len)
        for record in records
        if record.output_len  # finished, or aborted after the answer had begun
    ]
    read, write = (counters[f"transfer/storage_{side}_bytes"] for side in ("read", "write"))
    shared = (read + write) / span_s / ((storage.shared_gbps or inf) * 1e9)
    return {
        "load/rho_gpu": _utilisation(deployment.cost, lengths, span_s, num_engines),
        "load/rho_read": max(read / span_s / (storage.read_gbps * 1e9), shared),
        "load/rho_write": max(write / span_s / (storage.write_gbps * 1e9), shared),
        "load/rho_workers": max(counters[name] for name in WORKER_TIMES) / SECOND_NS / span_s,
        # time in which a request could have started with more room in the step or in memory
        "load/rho_queue": counters["engine/backlog_ns"] / SECOND_NS / span_s / num_engines,
    }


def scaled_to_load(
    workload: Workload, target: float, config: ExperimentConfig, cost: CostModel
) -> tuple[Workload, str]:
    """Sample or repeat sessions until GPU utilization without cache hits is about `target`.

    Return the workload, and what load it has as a sentence.
    """
    num_engines = config.parallel.num_engines
    share = target / _cold_load(workload.requests, cost, num_engines)
    change = sample_sessions if share <= 1 else repeat_sessions
    workload = change(workload, share, config.seed)
    reached = _cold_load(workload.requests, cost, num_engines)
    return workload, (
        f"workload.load: target {target:g}, reached {reached:.3g} (GPU utilization without "
        f"cache hits) with {share:.3g} times the sessions"
    )


def _cold_load(requests: Sequence[Request], cost: CostModel, num_engines: int) -> float:
    lengths = [(0, request.prompt_len, request.output_len) for request in requests]
    span_s = _span_s([request.arrival_ns for request in requests])
    return _utilisation(cost, lengths, span_s, num_engines)


def working_set(
    requests: Sequence[Request], deployment: Deployment, page_size: int
) -> dict[str, float]:
    """Return the number of distinct tokens in a workload, and what part of them the host can hold.

    The part, `load/host_over_working_set`, is the capacity of the host cache in tokens divided by
    the number of distinct tokens. It is absent if the host cache has no limit. Equal tokens in two
    namespaces, such as two tenants, count twice, since namespaces share no KV cache.
    """
    parts: dict[str, list[TokenSpans]] = {}
    for each in requests:
        parts.setdefault(each.namespace, []).extend((each.prompt, each.output))
    tokens = sum(map(_num_distinct, parts.values()))
    capacity = deployment.host.full_pages
    measures: dict[str, float] = {"workload/distinct_tokens": tokens}
    if capacity is not None:
        measures["load/host_over_working_set"] = capacity * page_size / tokens
    return measures


def _num_distinct(parts: Sequence[TokenSpans]) -> int:
    starts = np.concatenate([part.starts for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    order = np.argsort(starts, kind="stable")
    firsts = starts[order].astype(np.int64)
    ends = np.maximum.accumulate(firsts + counts[order])
    before = np.concatenate(([firsts[0]], ends[:-1]))
    return int(np.maximum(ends - np.maximum(firsts, before), 0).sum())


def _utilisation(
    cost: CostModel, requests: Sequence[Lengths], span_s: float, num_engines: int
) -> float:
    offered = fsum(cost.offered_s(*lengths, OFFERED_BATCH) for lengths in requests)
    return offered / span_s / num_engines


def _span_s(arrivals_ns: Sequence[int]) -> float:
    if not arrivals_ns:
        return 1.0
    return max((max(arrivals_ns) - min(arrivals_ns)) / SECOND_NS, 1.0)
