"""Jobs: each session with its sub-agents, from its first arrival to its last answer.

The critical path of a job runs backwards from the answer that ended last: to the request's arrival,
then to the last answer that this request waited for. So the parts of a completion time cover it
without a gap: the parts of each request on the path, and the tool times between them.
"""

from collections.abc import Mapping, Sequence
from math import fsum
from typing import NamedTuple

from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig
from hicache.models.cost import CostModel
from hicache.request import Request
from hicache.results.metrics import RequestRecord, Status, percentile
from hicache.workload.reuse import reuse
from hicache.workload.windows import trees

PARTS = ("tool", "queue", "storage", "prefill", "decode", "transfer")
ENDS = ("finished", "aborted", "rejected", "unfinished", "not_begun")
HOUR_S = 3600
INFINITE = 1 << 60  # pages
KEYS = (
    *(f"jobs/{end}_count" for end in ENDS),
    *(f"jobs/completion_s_{each}" for each in ("mean", "p50", "p95")),
    *(f"jobs/slowdown_{each}" for each in ("mean", "p50", "p95")),
    *("jobs/per_hour", "jobs/in_time_per_hour"),
    *(f"jobs/{part}_s_mean" for part in PARTS),
)


class Job(NamedTuple):
    """A job that has finished: its critical path in ns, by part, and its time on an idle server."""

    parts_ns: Mapping[str, int]
    idle_ns: float

    @property
    def completion_ns(self) -> int:
        return sum(self.parts_ns.values())

    @property
    def slowdown(self) -> float:
        return self.completion_ns / self.idle_ns


def job_measures(
    config: ExperimentConfig,
    cost: CostModel,
    requests: Sequence[Request],
    records: Sequence[RequestRecord],
) -> dict[str, float]:
    """Return the metrics of the jobs whose first request was recorded."""
    ends, jobs = jobs_of(config, cost, requests, records)
    begun_ns = min((each.arrival_ns for each in records), default=0)
    hours = (max((each.finish_ns or 0 for each in records), default=0) - begun_ns) / SECOND_NS
    hours = max(hours, 1.0) / HOUR_S
    measures: dict[str, float] = {f"jobs/{end}_count": ends.count(end) for end in ENDS}
    in_time = sum(job.slowdown <= config.goodput.job_slowdown for job in jobs)
    measures |= {
        "jobs/per_hour": len(jobs) / hours,
        "jobs/in_time_per_hour": in_time / hours,
    }
    completions = [job.completion_ns / SECOND_NS for job in jobs]
    for name, values in (
        ("completion_s", completions),
        ("slowdown", [job.slowdown for job in jobs]),
    ):
        measures[f"jobs/{name}_mean"] = fsum(values) / max(len(values), 1)
        for percent in (50, 95):
            measures[f"jobs/{name}_p{percent}"] = percentile(values, percent)
    for part in PARTS:
        total_ns = sum(job.parts_ns[part] for job in jobs)
        measures[f"jobs/{part}_s_mean"] = total_ns / SECOND_NS / max(len(jobs), 1)
    return measures


def jobs_of(
    config: ExperimentConfig,
    cost: CostModel,
    requests: Sequence[Request],
    records: Sequence[RequestRecord],
) -> tuple[list[str], list[Job]]:
    """Return how each job ended (`ENDS`), and the jobs that finished, in order of their starts.

    A job without any record has not begun when the run ended. A job whose first request is missing
    began in the warm-up and is left out.
    """
    by_id = {record.id: record for record in records}
    tree_of, idle_ns = trees(requests), _idle_ends_ns(config, cost, requests)
    members: dict[int, list[Request]] = {}
    for request in requests:
        members.setdefault(tree_of[request.id], []).append(request)
    ends, jobs = [], []
    for job in members.values():
        statuses = [by_id[each.id].status if each.id in by_id else None for each in job]
        if statuses[0] is None:
            ends += ["not_begun"] if not any(statuses) else []
        elif set(statuses) == {Status.finished}:
            ends.append("finished")
            idle = max(idle_ns[each.id] for each in job)
            jobs.append(Job(parts_ns=_critical_path(job, by_id), idle_ns=idle))
        else:
            stops = [each.value for each in statuses if each not in (None, Status.finished)]
            ends.append(stops[0] if stops else "unfinished")
    return ends, jobs


def counts(summary: Mapping[str, float]) -> tuple[int, int]:
    """Return how many jobs finished within the limit on slowdown, and how many there were."""
    finished, per_hour = summary["jobs/finished_count"], summary["jobs/per_hour"]
    in_time = finished * summary["jobs/in_time_per_hour"] / per_hour if per_hour else 0
    return round(in_time), int(sum(summary[f"jobs/{end}_count"] for end in ENDS))


def outcome(summary: Mapping[str, float]) -> str | None:
    """Return what became of the jobs of a run in one sentence, or None without jobs."""
    if "jobs/per_hour" not in summary:
        return None
    ends = ", ".join(
        f"{summary[f'jobs/{end}_count']:,} {end.replace('_', ' ')}"
        for end in ENDS
        if summary[f"jobs/{end}_count"]
    )
    if not summary["jobs/finished_count"]:
        return ends or "none"
    parts = ", ".join(
        f"{part} {summary[f'jobs/{part}_s_mean']:.3g}"
        for part in PARTS
        if summary[f"jobs/{part}_s_mean"]
    )
    completion, slowdown = (
        " / ".join(f"{summary[f'jobs/{name}_{each}']:.4g}" for each in ("mean", "p50", "p95"))
        for name in ("completion_s", "slowdown")
    )
    return (
        f"{ends}; completion mean / p50 / p95 {completion} s ({parts}), slowdown "
        f"{slowdown}; {summary['jobs/per_hour']:.4g} per hour, "
        f"{summary['jobs/in_time_per_hour']:.4g} within the limit on slowdown"
    )


def _critical_path(job: Sequence[Request], by_id: Mapping[int, RequestRecord]) -> dict[str, int]:
    waits_for = {each.id: (each.parent_id, *each.joins) for each in job}
    parts = dict.fromkeys(PARTS, 0)
    record: RequestRecord | None = max((by_id[each.id] for each in job), key=_end_ns)
    while record is not None:
        parts["queue"] += record.queue_ns
        parts["storage"] += record.storage_wait_ns + record.load_back_ns
        parts["prefill"] += record.prefill_ns
        parts["transfer"] += record.transfer_ns + record.restore_ns
        parts["decode"] += _end_ns(record) - record.arrival_ns - (record.ttft_ns or 0)
        before = [by_id[each] for each in waits_for[record.id] if each is not None]
        last = max(before, key=_end_ns, default=None)
        if last is not None:
            parts["tool"] += record.arrival_ns - _end_ns(last)
        record = last
    return parts


def _end_ns(record: RequestRecord) -> int:
    assert record.finish_ns is not None
    return record.finish_ns


def _idle_ends_ns(
    config: ExperimentConfig, cost: CostModel, requests: Sequence[Request]
) -> dict[int, float]:
    # when each request would end, in ns after the start of its job, if it had an engine to itself
    # whose cache holds all that earlier requests of the workload computed
    page_size, is_timed = config.cache.page_size, config.workload.is_timed
    hits = reuse(requests, page_size).lru(INFINITE).tolist()
    begun_ns: dict[int, int] = {}
    tree_of, ends_ns = trees(requests), dict[int, float]()
    for request, num_pages in zip(requests, hits, strict=True):
        first_ns = begun_ns.setdefault(tree_of[request.id], request.arrival_ns)
        start_ns = float(request.arrival_ns - first_ns) if is_timed else 0.0
        if request.parent_id is not None:
            answered_ns = max(ends_ns[each] for each in (request.parent_id, *request.joins))
            gap_ns = 0 if is_timed else request.think_ns
            start_ns = max(start_ns, answered_ns + gap_ns)
        cost_s = cost.offered_s(num_pages * page_size, request.prompt_len, request.output_len, 1)
        ends_ns[request.id] = start_ns + cost_s * SECOND_NS
    return ends_ns
