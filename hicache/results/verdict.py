"""The verdict on a run: whether its results are misleading, for example because of an overload.

The verdict depends only on `summary.json`, so stored and new runs are judged alike. Only the
condition `SURVIVORS` needs several runs to compare. docs/verdict.md gives the origin of each
threshold.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hicache.cache.prefix_cache import HIT_TIERS

Summary = Mapping[str, float]

# a start-up dominates the waiting with at least this share of it, or with this more than its share
# of the requests
MOST, MORE = 0.5, 0.1
IDLE = 0.2  # lowest ρ of a busy resource
RHOS = ("gpu", "prefill", "decode", "link", "queue", "read", "write", "workers")
# rate-limited prefetches are left out: they pile up because storage is slow
FOR_HOST_ROOM = ("cut", "abandoned_host_room", "abandoned_sidecar_room")
CLEAN = "no objection"
TIMES = ("queue", "prefill")
CLOSED = "load/closed_loop"
STAGE = "stage_"  # prefix of the keys of one stage of a load


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A rule that detects misleading results, such as those of an overloaded GPU.

    Attributes:
        name: a short name of the rule.
        threshold: results are misleading from this number on, or below it if `is_below`.
        number: a function of the metrics of a run. It returns the number to compare and to report;
            None means that the rule does not apply.
        phrase: a description of the problem, in which `{}` stands for the number.
        means: the consequence of the problem for the results.
        is_share: True if the number is a fraction, which is shown in percent.
    """

    name: str
    threshold: float
    number: Callable[[Summary], float | None]
    phrase: str
    means: str
    is_share: bool = True
    is_below: bool = False

    def holds(self, number: float) -> bool:
        return number < self.threshold if self.is_below else number >= self.threshold

    def told(self, low: float, high: float) -> str:
        if self.is_share:
            texts = [_percent(value) for value in (low, high)]
        else:
            texts = [f"{value:.2f}".removesuffix(".00") for value in (low, high)]
        return self.phrase.format(" to ".join(dict.fromkeys(texts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """A reason to distrust the results of one or more runs, such as an overloaded GPU.

    Attributes:
        condition: the rule that detected the problem.
        low, high: the lowest and the highest number that the rule returned for these runs.
        where: the number of affected runs if it is not all of them, such as " in 2 of 9 runs".
    """

    condition: Condition
    low: float
    high: float
    where: str = ""

    @property
    def name(self) -> str:
        return self.condition.name

    @property
    def short(self) -> str:
        return self.condition.told(self.low, self.high)

    @property
    def sentence(self) -> str:
        return f"{self.short}{self.where}: {self.condition.means}"


def objections(summaries: Sequence[Summary]) -> list[Objection]:
    return [each for condition in CONDITIONS for each in _raised(condition, summaries)]


def objection(condition: Condition, numbers: Iterable[float], where: str = "") -> list[Objection]:
    found = list(numbers)
    if not found:
        return []
    return [Objection(condition=condition, low=min(found), high=max(found), where=where)]


def in_short(found: Sequence[Objection]) -> str:
    return "; ".join(each.short for each in found) or CLEAN


def stages(summary: Summary) -> dict[int, Summary]:
    """Return the metrics of each stage of a workload, by the number of the stage.

    A workload with stages changes its request rate at the start of each stage. The metrics of a
    stage have the same names as those of a whole run. The result is empty if the workload has no
    stages.
    """
    parts: dict[int, dict[str, float]] = {}
    for key in summary:
        if key.startswith(STAGE):
            stage, _, inner = key.partition("/")
            parts.setdefault(int(stage.removeprefix(STAGE)), {})[inner] = summary[key]
    # the stages of a closed loop count as closed loops
    is_closed = {key: summary[key] for key in (CLOSED,) if key in summary}
    return {number: {**part, **is_closed} for number, part in sorted(parts.items())}


def stage_lines(summary: Summary) -> list[str]:
    return [
        f"stage {number}: {loads(part)}; {part['request/count']:,} request(s), TTFT mean "
        f"{part['request/ttft_s_mean']:.3g} s, p95 {part['request/ttft_s_p95']:.3g} s; "
        f"{in_short(objections([part]))}"
        for number, part in stages(summary).items()
    ]


def loads(summary: Summary) -> str:
    known = [rho for rho in RHOS if _rho(rho) in summary]
    return ", ".join(f"ρ {rho} {summary[_rho(rho)]:.2f}" for rho in known)


def is_overloaded(summary: Summary) -> bool:
    return any(_raised(condition, [summary]) for condition in OVERLOADS)


def _raised(condition: Condition, summaries: Sequence[Summary]) -> list[Objection]:
    numbers = map(condition.number, summaries)
    found = [n for n in numbers if n is not None and condition.holds(n)]
    is_all = len(found) == len(summaries)
    where = "" if is_all else f" in {len(found)} of {len(summaries)} runs"
    return objection(condition, found, where)


def _rho(name: str) -> str:
    return f"load/rho_{name}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 or 0.99 <= share < 1 else f"{share:.0%}"


def _share(summary: Summary, part: str, whole: str) -> float | None:
    total = summary.get(whole)
    return summary.get(part, 0) / total if total else None


def _dropped_writes(summary: Summary) -> float | None:
    dropped = summary.get("storage/dropped_write_pages", 0)
    wanted = dropped + summary.get("storage/queued_write_pages", 0)
    return dropped / wanted if dropped else None


def _small_host(summary: Summary) -> float | None:
    dropped = sum(summary.get(f"prefetch/{key}_tokens", 0) for key in FOR_HOST_ROOM)
    prompts = summary.get("request/prompt_tokens")
    if not dropped or not prompts:
        return None
    # storage may not have what was asked for: count the share that it had of other prefetches
    had = summary.get("prefetch/read_pages", 0)
    staged = had + summary.get("prefetch/discarded_miss_pages", 0)
    share = had / staged if staged else 1
    return min(dropped, summary.get("cache/computed_tokens", 0)) * share / prompts


def _unread_storage(summary: Summary, reason: str) -> float | None:
    # the number of requests, if each was refused a prefetch, and most tokens for this reason
    refused = {
        key: tokens
        for key, tokens in summary.items()
        if key.startswith("prefetch/declined_") and key.endswith("_tokens")
    }
    if summary.get("prefetch/started_count") or not any(refused.values()):
        return None
    is_main = max(refused, key=lambda key: refused[key]) == f"prefetch/declined_{reason}_tokens"
    return summary["prefetch/declined_count"] if is_main else None


def _inert_host(summary: Summary) -> float | None:
    prompts = summary.get("request/prompt_tokens")
    if not prompts or not summary.get("transfer/back_up_bytes"):
        return None
    return sum(summary.get(f"cache/{tier}_hit_tokens", 0) for tier in HIT_TIERS[1:]) / prompts


def _start_up(summary: Summary) -> float | None:
    waiting = summary.get("request/start_up_ttft_share", 0.0)
    requests = summary.get("request/start_up_share", 0.0)
    return waiting if waiting >= MOST or waiting - requests >= MORE else None


def _busiest(summary: Summary, rhos: Sequence[str]) -> float | None:
    parts = list(stages(summary).values()) or [summary]
    return max(
        (part[_rho(rho)] for part in parts for rho in rhos if _rho(rho) in part), default=None
    )


def _idle(summary: Summary) -> float | None:
    # an M/M/1 queue at ρ waits ρ / (1 - ρ) service times; a load with pauses waits longer
    most_s = IDLE / (1 - IDLE) * summary.get("request/prefill_s_mean", 0.0)
    is_waiting = summary.get("request/queue_s_mean", 0.0) > most_s
    return None if is_waiting else _busiest(summary, RHOS)


def _mostly_hits(summary: Summary) -> float | None:
    has_jobs = "jobs/per_hour" in summary
    return summary.get("cache/token_hit_rate") if has_jobs else None


def _overloaded(what: str, *rhos: str) -> Condition:
    def number(summary: Summary) -> float | None:
        if summary.get(CLOSED):  # a closed loop is as full as its user configured it
            return None
        busiest = _busiest(summary, rhos)
        return None if busiest is None else round(busiest, 2)  # as it is shown

    return Condition(
        name=f"overloaded {what}",
        threshold=0.9,
        number=number,
        phrase=f"{what} overloaded, ρ {{}}",
        means="queues grow until the trace ends, so do not compare latencies",
        is_share=False,
    )


def _growing_queue(summary: Summary) -> float | None:
    waits_s, span_s = summary.get("request/queue_s_mean", 0.0), summary.get("engine/span_s")
    prefill_s = summary.get("request/prefill_s_mean", 0.0)
    # 9: what an M/M/1 queue waits at ρ = 0.9, in service times
    if summary.get(CLOSED) or not span_s or waits_s < 9 * prefill_s:
        return None
    return waits_s / span_s


def _near_knee(summary: Summary) -> float | None:
    waits_s, prefill_s = (summary.get(f"request/{part}_s_mean", 0.0) for part in TIMES)
    if summary.get(CLOSED) or not prefill_s or waits_s >= 9 * prefill_s:
        return None
    return waits_s / prefill_s


OVERLOADS = (
    _overloaded("GPU", "gpu"),
    _overloaded("queue", "queue"),
    Condition(
        name="growing queue",
        threshold=0.01,
        number=_growing_queue,
        phrase="requests queue for {} of the run on average",
        means="they arrive faster than they are served, so do not compare latencies",
    ),
    _overloaded("storage", "read", "write", "workers"),
    _overloaded("prefill engines", "prefill"),
    _overloaded("decode engines", "decode"),
    _overloaded("transfer link", "link"),
)

CONDITIONS = (
    Condition(
        name="rejected",
        threshold=0.01,
        number=partial(_share, part="cache/rejected_tokens", whole="request/prompt_tokens"),
        phrase="{} of the prompt tokens rejected",
        means="the remaining requests are not representative of the workload (model.max_len or "
        "a pool is too small)",
    ),
    Condition(
        name="aborted",
        threshold=0.01,
        number=partial(_share, part="request/aborted_count", whole="request/count"),
        phrase="{} of the requests aborted",
        means="latencies cover only answered requests, so the longest waits are missing "
        "(workload.abort_share)",
    ),
    Condition(
        name="dropped writes",
        threshold=0.01,
        number=_dropped_writes,
        phrase="{} of the writes to storage dropped",
        means="storage lacks pages that the policies chose to write (storage.write_queue_gib)",
    ),
    Condition(
        name="small host",
        threshold=0.01,
        number=_small_host,
        phrase="{} of the prompt tokens not prefetched for lack of host memory",
        means="storage has them (an estimate), but they are computed again (cache.host_gib is too "
        "small)",
    ),
    Condition(
        name="inert host",
        threshold=0.001,
        number=_inert_host,
        is_below=True,
        phrase="inert host tier: pages are backed up, but {} of the prompt tokens hit them",
        means="back-ups use the link and save nothing (prefixes come back while the device still "
        "holds them, or cache.host_gib is too small)",
    ),
    Condition(
        name="storage without host",
        threshold=1,
        number=partial(_unread_storage, reason="no_host"),
        phrase="inert storage tier: none of {} request(s) read it, because the host has no page",
        means="data reaches storage and comes back through the host only (raise cache.host_gib)",
        is_share=False,
    ),
    Condition(
        name="unread storage",
        threshold=1,
        number=partial(_unread_storage, reason="too_short"),
        phrase="inert storage tier: none of {} request(s) lacked prefetch.threshold tokens",
        means="writes use storage and save nothing (lower prefetch.threshold)",
        is_share=False,
    ),
    Condition(
        name="start-up",
        threshold=MORE,
        number=_start_up,
        phrase="{} of the total TTFT comes from requests of the first minute",
        means="means and percentiles describe the start-up (workload.start_jitter_s and "
        "workload.stagger_s spread the first arrivals, raise workload.warm_up_s to leave them out)",
    ),
    Condition(
        name="idle",
        threshold=IDLE,
        number=_idle,
        is_below=True,
        phrase="idle, highest ρ {}",
        means="no resource is contended, so policies hardly change latencies (raise workload.load "
        "or workload.session_rate)",
        is_share=False,
    ),
    *OVERLOADS,
    Condition(
        name="near a knee",
        threshold=1,
        number=_near_knee,
        phrase="requests queue {} times as long as they are computed",
        means="the load is near saturation, where TTFT differs several times between seeds: quote "
        "the throughput at saturation over five seeds or more, not TTFT",
        is_share=False,
    ),
    Condition(
        name="mostly hits",
        threshold=0.9,
        number=_mostly_hits,
        phrase="{} of the prompt tokens of jobs are hits",
        means="total tokens per second count them, so compare latencies at the slow end (p95 of "
        "TTFT and completion time), not total throughput",
    ),
    Condition(
        name="few sessions",
        threshold=20,
        number=lambda summary: summary.get("request/sessions_count"),
        is_below=True,
        phrase="only {} session(s)",
        means="confidence intervals over sessions are too narrow",
        is_share=False,
    ),
    Condition(
        name="collapsed sessions",
        threshold=0.25,
        number=lambda summary: summary.get("request/largest_session_share"),
        phrase="one session holds {} of the requests",
        means="it dominates every mean; a prompt shared by many sessions may have merged them",
    ),
    Condition(
        name="not verified",
        threshold=1,
        number=lambda summary: summary.get("verify/untested_count"),
        phrase="not verified: {} tier(s) in use without a hit",
        means="equal logits say nothing about their data (lower workload.token_stride, raise "
        "workload.limit)",
        is_share=False,
    ),
)
SURVIVORS = Condition(
    name="other survivors",
    threshold=0.01,
    number=lambda _: None,  # it needs several runs
    phrase="{} of the requests finished in some rows but not in others",
    means="the rows cover different requests, so means and hit rates are not comparable",
)
