"""The measurements of a run: one record per request, one row per time interval, and one summary.

The engine makes each `RequestRecord` and each `Row`, and counts events that belong to no request.
`summarize` turns them into a summary, which maps names of metrics to numbers. It also checks sums.
Every prompt token is counted once. The parts of each time to first token cover it without a gap.
Every page read from storage is counted once by its fate, such as used or evicted unused.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum

from hicache.cache.prefix_cache import HIT_TIERS
from hicache.cache.tiers.transfer import FATES
from hicache.clock import SECOND_NS
from hicache.observe.reasons import REASONS
from hicache.scheduler.queue_waits import Cause

# what a queued request waits for, other than a read from storage
QUEUE_CAUSES: dict[str, str] = {
    Cause.step: "the step that was running when it arrived",
    Cause.chunk: "earlier prompts, which filled the steps (scheduler.chunk_tokens)",
    Cause.tokens: "free KV pages on the device",
    Cause.swa_tokens: "free sliding-window pages on the device",
    Cause.slots: "free Mamba state slots on the device",
    Cause.running: "a running request to finish (scheduler.max_running)",
    Cause.prefill_oom: "pages that admission had counted as free and prefill did not find",
    Cause.scan_limit: "requests ahead that were waiting for storage (compat.rules.scan_limit)",
}
# parts of a prompt's time from admission to first token, besides waiting for load-backs
PREFILL_CAUSES = {
    "own": "computing its own tokens",
    "shared": "computing tokens of other requests in the same steps",
    "fence": "waiting, before a step, for evicted pages to be copied to the host",
    "stalled": "waiting between its steps, for lack of pages or after a retraction",
}
PERCENTILES = (50, 95, 99)
TTFT_PARTS: tuple[str, ...] = ("queue", "storage_wait", "load_back", "prefill")
HANDOVER_PARTS = ("transfer", "restore")  # after them, with separate engines

# counted by the engine only; `Result.measures` holds all of these, and may hold more
REQUIRED_MEASURES = (
    "prefetch/staged_pages",
    "prefetch/read_pages",
    *(f"prefetch/{fate}_pages" for fate in FATES),
    "prefetch/discarded_pages",
    "prefetch/cut_tokens",
    "prefetch/abandoned_count",
    "scheduler/prefill_oom_count",
    "scheduler/deferred_count",
    "scheduler/retracted_count",
    "transfer/load_back_bytes",
    "transfer/back_up_bytes",
    "transfer/storage_read_bytes",
    "transfer/storage_write_bytes",
    "request/itl_s_mean",
    *(f"request/itl_s_p{percent}" for percent in PERCENTILES),
    "load/rho_gpu",
    "load/rho_queue",
    "load/rho_read",
    "load/rho_write",
    "load/rho_workers",
    "gpu/busy_s",
    "gpu/prefill_s",
)
PEER_BYTES = "transfer/peer_bytes"  # only if engines read from each other's hosts
START_UP_NS = 60 * SECOND_NS  # time since the first counted arrival


# measurements of one time interval of a run, as a line of metrics.jsonl holds them
Row = Mapping[str, float]


class Status(StrEnum):
    finished = "finished"
    rejected = "rejected"  # never admitted: it does not fit
    aborted = "aborted"  # the user canceled it, or a request that it follows


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The outcome, timing and cache hits of one request.

    A field that ends in `_ns` is in nanoseconds, and a field that ends in `_len` is in tokens. The
    times are counted from the start of the run.

    Attributes:
        arrival_ns: when the request was submitted. This may be later than in the trace, since the
            request may wait for the answer to the previous turn of its session.
        finish_ns: when the last token was generated, or when the request was aborted. None if the
            request was rejected.
        device_hit_len, host_hit_len, storage_hit_len, peer_hit_len: prompt tokens found in each
            cache tier when the request was first admitted.
        computed_len: all other prompt tokens. The five lengths sum to `prompt_len`.
        recomputed_len: tokens computed again after the request was retracted, that is, preempted
            for lack of memory.
        queue_ns, storage_wait_ns, load_back_ns, prefill_ns, transfer_ns, restore_ns: the parts of
            the time to first token. They sum to the time from arrival to first token, or to an
            earlier abort. Engines that do both prefill and decode have no transfer and restore.
    """

    id: int
    session_id: int
    session_name: str = ""  # the trace's own id of the session
    round: int = 0  # number of earlier turns in its session
    stage: int = 0  # stage of the load, from 1; 0 without stages
    engine: int = 0
    status: Status
    reason: str = ""  # reason of a rejection or an abort
    arrival_ns: int
    first_token_ns: int | None = None
    finish_ns: int | None = None
    prompt_len: int
    output_len: int  # tokens of the answer
    device_hit_len: int = 0
    host_hit_len: int = 0
    storage_hit_len: int = 0  # read by this request's own prefetch
    peer_hit_len: int = 0  # likewise, from the host of another engine
    computed_len: int = 0
    recomputed_len: int = 0
    dropped_len: int = 0  # part of `computed_len`: cached, and computed again for the draft
    draft_cold_len: int = 0  # hit tokens without KV of the draft
    # tokens by the reason for computing and recomputing them; the parts sum to the two above
    computed_for: Mapping[str, int] = field(default_factory=dict)
    recomputed_for: Mapping[str, int] = field(default_factory=dict)
    window_missing_len: int = 0  # part of `computed_len`: full KV was held, but no window
    state_missing_len: int = 0  # likewise, but no state
    queue_ns: int = 0
    queue_for_ns: Mapping[str, int] = field(default_factory=dict)  # parts of the queue time
    storage_wait_ns: int = 0
    load_back_ns: int = 0
    prefill_ns: int = 0
    prefill_for_ns: Mapping[str, int] = field(default_factory=dict)  # parts of the prefill time
    retractions: int = 0
    num_steps: int = 0
    # with separate engines for prefill and decode
    transfer_ns: int = 0
    restore_ns: int = 0
    reused_len: int = 0  # prompt tokens that the decode engine held

    @property
    def ttft_ns(self) -> int | None:
        return None if self.first_token_ns is None else self.first_token_ns - self.arrival_ns

    @property
    def e2e_ns(self) -> int | None:
        """The end-to-end latency: the time from arrival to the last token."""
        return None if self.finish_ns is None else self.finish_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> float | None:
        """The mean time per output token after the first; None for an answer of one token."""
        if self.finish_ns is None or self.first_token_ns is None or self.output_len < 2:
            return None
        return (self.finish_ns - self.first_token_ns) / (self.output_len - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come: how many requests are done, and the time in the run.

    `row` has the measurements of a time interval that has just ended. None means that no interval
    has just ended.
    """

    done_count: int  # requests finished, rejected or aborted
    total_count: int
    time_s: float  # simulated, or real under a real executor
    row: Row | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of a run.

    Attributes:
        records: one record per request. Requests of the warm-up are left out.
        measures: metrics of the whole run that do not follow from the records, by name. The warm-up
            does not count.
        wall_s: how long the run took, in seconds of real time.
        notes: sentences for the user, such as how capacities were rounded.
    """

    records: Sequence[RequestRecord]
    measures: Mapping[str, float]
    wall_s: float
    notes: Sequence[str] = ()


def summarize(
    records: Sequence[RequestRecord], measures: Mapping[str, float]
) -> dict[str, float | int]:
    """Return all metrics of a run, by name.

    Hit and computed tokens are counted for finished requests only. The prompt tokens of other
    requests count as rejected or aborted. Percentiles are nearest-rank, so each is the value of one
    request. Names are sorted, and equal runs
    give equal bytes when written to a file.

    Args:
        records: one record per request.
        measures: metrics of the whole run that do not follow from the records.

    Raises:
        AssertionError: tokens, times or pages do not add up, or a required metric is missing.
    """
    missing = [key for key in REQUIRED_MEASURES if key not in measures]
    assert not missing, f"measures lack {', '.join(missing)}"
    for record in records:
        check(record)
    check_pages(measures)

    finished = [record for record in records if record.status is Status.finished]
    summary: dict[str, float | int] = {
        **measures,
        **request_times(records),
        **_rates(finished),
        **_sample(finished),
        **_tokens(records, finished, has_peers=PEER_BYTES in measures),
        "prefetch/unused_pages": measures["prefetch/unused_at_end_pages"]
        + measures["prefetch/evicted_unused_pages"],
        "prefetch/useful_share": _ratio(
            measures["prefetch/used_pages"], measures["prefetch/read_pages"]
        ),
        "gpu/seconds_per_request": _ratio(measures["gpu/busy_s"], len(finished)),
        "gpu/prefill_seconds_per_request": _ratio(measures["gpu/prefill_s"], len(finished)),
    }
    return dict(sorted(summary.items()))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of the values, or 0 if there are none.

    `percent` is between 0 and 100. The result is the smallest value that is at least as large as
    `percent` % of the values.
    """
    if not values:
        return 0.0
    rank = -(-len(values) * percent // 100)  # ceil
    return sorted(values)[max(int(rank), 1) - 1]


def check_pages(measures: Mapping[str, float]) -> None:
    """Check that all pages read from storage are accounted for.

    Each page counts once by its fate. For example, a request used the page, or it was evicted
    unused.

    Raises:
        AssertionError: the counts of all fates do not sum to the number of pages read.
    """
    fates = {fate: measures[f"prefetch/{fate}_pages"] for fate in FATES}
    assert sum(fates.values()) == measures["prefetch/read_pages"], (
        f"{measures['prefetch/read_pages']} pages were read from storage, and these are the fates "
        f"of {sum(fates.values())}: {fates}"
    )


def check(record: RequestRecord) -> None:
    """Check that the token counts and the waiting times of a request add up.

    Raises:
        AssertionError: hit and computed tokens do not sum to the prompt length, or the parts of the
            time to first token do not sum to that time.
    """
    hits = {tier: getattr(record, f"{tier}_hit_len") for tier in HIT_TIERS}
    split = sum(hits.values()) + record.computed_len
    # an abort may come before or after admission
    is_allowed = (split == 0 and record.status is not Status.finished) or (
        split == record.prompt_len and record.status is not Status.rejected
    )
    for what, total, told in (
        ("tokens computed", record.computed_len, record.computed_for),
        ("tokens computed again", record.recomputed_len, record.recomputed_for),
        ("ns in queue", record.queue_ns, record.queue_for_ns),
        ("ns in prefill", record.prefill_ns, record.prefill_for_ns),
    ):
        assert not told or (sum(told.values()) == total and min(told.values()) >= 0), (
            f"request {record.id} has {total} {what}, and is told of {dict(told)}"
        )
    assert is_allowed, (
        f"request {record.id} ({record.status}) has a prompt of {record.prompt_len} tokens, "
        f"and hits of {hits} + {record.computed_len} computed = {split}"
    )
    if record.status is Status.finished:
        assert record.first_token_ns is not None, f"request {record.id} finished with no token"
        assert record.finish_ns is not None, f"request {record.id} finished at no time"
    parts_ns = [record.queue_ns, record.storage_wait_ns, record.load_back_ns, record.prefill_ns]
    names = TTFT_PARTS
    if record.transfer_ns or record.restore_ns:
        parts_ns += [record.transfer_ns, record.restore_ns]
        names += HANDOVER_PARTS
    for part, part_ns in zip(names, parts_ns, strict=True):
        assert part_ns >= 0, f"request {record.id} spent {part_ns} ns in {part}"
    waited_ns = record.e2e_ns if record.ttft_ns is None else record.ttft_ns
    assert waited_ns in (None, sum(parts_ns)), (
        f"request {record.id} waited {waited_ns} ns for its first token, and the parts "
        f"{dict(zip(names, parts_ns, strict=True))} = {sum(parts_ns)}"
    )


def request_times(records: Sequence[RequestRecord]) -> dict[str, float | int]:
    finished = [record for record in records if record.status is Status.finished]
    summary: dict[str, float | int] = {
        "request/count": len(records),
        **{f"request/{each}_count": sum(r.status is each for r in records) for each in Status},
        "request/prompt_tokens": sum(record.prompt_len for record in records),
        "request/output_tokens": sum(record.output_len for record in finished),
    }
    is_handed = any(record.transfer_ns or record.restore_ns for record in records)
    for name in ("ttft", "e2e", "tpot", *TTFT_PARTS, *(HANDOVER_PARTS if is_handed else ())):
        known_ns = [getattr(record, f"{name}_ns") for record in finished]
        values_ns = sorted(ns for ns in known_ns if ns is not None)
        # exact sums, so the order of requests cannot change them
        summary[f"request/{name}_s_mean"] = _ratio(fsum(values_ns), len(values_ns)) / SECOND_NS
        for percent in PERCENTILES:
            summary[f"request/{name}_s_p{percent}"] = percentile(values_ns, percent) / SECOND_NS
    for part, known in (("queue", QUEUE_CAUSES), ("prefill", PREFILL_CAUSES)):
        total_ns = _sums(getattr(record, f"{part}_for_ns") for record in finished)
        for cause in known:
            key = f"request/{part}_{cause}_s_mean"
            summary[key] = _ratio(total_ns[cause], len(finished)) / SECOND_NS
    return summary


def _rates(finished: Sequence[RequestRecord]) -> dict[str, float]:
    begin_ns = min((record.arrival_ns for record in finished), default=0)
    end_ns = max((record.finish_ns or 0 for record in finished), default=0)
    outputs = sum(record.output_len for record in finished)
    amounts = {
        "requests": len(finished),
        "output_tokens": outputs,
        "total_tokens": outputs + sum(record.prompt_len for record in finished),
    }
    span_s = (end_ns - begin_ns) / SECOND_NS
    return {f"throughput/{name}_per_s": _ratio(each, span_s) for name, each in amounts.items()}


def _sample(finished: Sequence[RequestRecord]) -> dict[str, float | int]:
    sessions = Counter(record.session_id for record in finished)
    began_ns = min((record.arrival_ns for record in finished), default=0)
    early = [record for record in finished if record.arrival_ns < began_ns + START_UP_NS]
    waited_ns, early_ns = (sum(each.ttft_ns or 0 for each in part) for part in (finished, early))
    return {
        "request/sessions_count": len(sessions),
        "request/largest_session_share": _ratio(max(sessions.values(), default=0), len(finished)),
        "request/start_up_share": _ratio(len(early), len(finished)),
        "request/start_up_ttft_share": _ratio(early_ns, waited_ns),
    }


def _tokens(
    records: Sequence[RequestRecord], finished: Sequence[RequestRecord], *, has_peers: bool
) -> dict[str, float | int]:
    hits = {
        tier: sum(getattr(record, f"{tier}_hit_len") for record in finished)
        for tier in HIT_TIERS
        if has_peers or tier != "peer"
    }
    computed = sum(record.computed_len for record in finished)
    hit = sum(hits.values())
    return {
        **{f"cache/{tier}_hit_tokens": tokens for tier, tokens in hits.items()},
        **{
            f"cache/{status}_tokens": sum(r.prompt_len for r in records if r.status is status)
            for status in (Status.rejected, Status.aborted)
        },
        "cache/computed_tokens": computed,
        "cache/recomputed_tokens": sum(record.recomputed_len for record in records),
        "cache/token_hit_rate": _ratio(hit, hit + computed),
        **_reasons(records, finished),
    }


def _reasons(records: Sequence[RequestRecord], finished: Sequence[RequestRecord]) -> dict[str, int]:
    # no keys without recorded reasons, that is without `engine.explain`
    areas = {
        "computed": _sums(record.computed_for for record in finished),
        "recomputed": _sums(record.recomputed_for for record in records),
    }
    if not any(areas.values()):
        return {}
    return {
        "computed/window_missing_tokens": sum(record.window_missing_len for record in finished),
        "computed/state_missing_tokens": sum(record.state_missing_len for record in finished),
        **{f"{area}/{why}_tokens": sums[why] for area, sums in areas.items() for why in REASONS},
    }


def _sums(parts: Iterable[Mapping[str, int]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for part in parts:
        totals.update(part)
    return totals


def _ratio(amount: float, count: float) -> float:
    return amount / count if count else 0.0
