"""The verdict on a run: whether its results are misleading, for example because of an overload.

The verdict depends only on `summary.json`, so stored and new runs are judged alike. Only the
condition `SURVIVORS` needs several runs to compare. docs/verdict.md gives the origin of each
threshold.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Summary = Mapping[str, float]

MOST = 0.5  # a start-up with at least this share of the waiting dominates it
RHOS = ("gpu", "queue", "read", "write", "workers")
CLEAN = "no objection"
CLOSED = "load/closed_loop"
STAGE = "stage_"  # prefix of the keys of one stage of a load


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A rule that detects misleading results, such as those of an overloaded GPU.

    Attributes:
        name: a short name of the rule.
        threshold: the limit that `number` compares with.
        number: a function of the metrics of a run and the threshold. It returns a number to report
            if the results are misleading, otherwise None.
        phrase: a description of the problem, in which `{}` stands for the number.
        means: the consequence of the problem for the results.
        is_share: True if the number is a fraction, which is shown in percent.
    """

    name: str
    threshold: float
    number: Callable[[Summary, float], float | None]
    phrase: str
    means: str
    is_share: bool = True

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
    """

    condition: Condition
    low: float
    high: float

    @property
    def name(self) -> str:
        return self.condition.name

    @property
    def short(self) -> str:
        return self.condition.told(self.low, self.high)

    @property
    def sentence(self) -> str:
        return f"{self.short}: {self.condition.means}"


def objections(summaries: Sequence[Summary]) -> list[Objection]:
    return [each for condition in CONDITIONS for each in _raised(condition, summaries)]


def objection(condition: Condition, numbers: Iterable[float]) -> list[Objection]:
    found = list(numbers)
    if not found:
        return []
    return [Objection(condition=condition, low=min(found), high=max(found))]


def in_short(found: Sequence[Objection]) -> str:
    return "; ".join(each.short for each in found) or CLEAN


def stages(summary: Summary) -> dict[int, Summary]:
    """Return the metrics of each stage of a workload, by the number of the stage.

    A workload with stages changes its request rate at the start of each stage. The metrics of a
    stage have the same names as those of a whole run. The result is empty if the workload has no
    stages.
    """
    parts: dict[int, dict[str, float]] = {}
    for key, value in summary.items():
        stage, _, inner = key.partition("/")
        if stage.startswith(STAGE):
            parts.setdefault(int(stage.removeprefix(STAGE)), {})[inner] = value
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
    numbers = [condition.number(summary, condition.threshold) for summary in summaries]
    return objection(condition, [number for number in numbers if number is not None])


def _rho(name: str) -> str:
    return f"load/rho_{name}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 or 0.99 <= share < 1 else f"{share:.0%}"


def _above(value: float | None, threshold: float) -> float | None:
    return None if value is None or value < threshold else value


def _rejected(summary: Summary, threshold: float) -> float | None:
    all_tokens = summary.get("request/prompt_tokens")
    return _above(summary["cache/rejected_tokens"] / all_tokens, threshold) if all_tokens else None


def _aborted(summary: Summary, threshold: float) -> float | None:
    count = summary.get("request/count")
    return _above(summary.get("request/aborted_count", 0) / count, threshold) if count else None


def _dropped_writes(summary: Summary, threshold: float) -> float | None:
    dropped = summary.get("storage/dropped_write_pages", 0)
    wanted = dropped + summary.get("storage/queued_write_pages", 0)
    return _above(dropped / wanted, threshold) if dropped else None


def _inert_host(summary: Summary, threshold: float) -> float | None:
    prompts = summary.get("request/prompt_tokens")
    if not prompts or not summary.get("transfer/back_up_bytes"):
        return None
    share = sum(summary[f"cache/{tier}_hit_tokens"] for tier in ("host", "storage")) / prompts
    return share if share < threshold else None


def _start_up(summary: Summary, threshold: float) -> float | None:
    waiting = summary.get("request/start_up_ttft_share", 0.0)
    requests = summary.get("request/start_up_share", 0.0)
    return waiting if waiting >= MOST or waiting - requests >= threshold else None


def _busiest(summary: Summary, rhos: Sequence[str]) -> float | None:
    parts = list(stages(summary).values()) or [summary]
    return max(
        (part[_rho(rho)] for part in parts for rho in rhos if _rho(rho) in part), default=None
    )


def _idle(summary: Summary, threshold: float) -> float | None:
    busiest = _busiest(summary, RHOS)
    # an M/M/1 queue at ρ waits ρ / (1 - ρ) service times; a load with pauses waits longer
    most_s = threshold / (1 - threshold) * summary.get("request/prefill_s_mean", 0.0)
    if busiest is None or summary.get("request/queue_s_mean", 0.0) > most_s:
        return None
    return busiest if busiest < threshold else None


def _few_sessions(summary: Summary, threshold: float) -> float | None:
    count = summary.get("request/sessions_count")
    return None if count is None or count >= threshold else count


def _collapsed(summary: Summary, threshold: float) -> float | None:
    return _above(summary.get("request/largest_session_share"), threshold)


def _overloaded(what: str, *rhos: str) -> Condition:
    def number(summary: Summary, threshold: float) -> float | None:
        if summary.get(CLOSED):  # a closed loop is as full as its user configured it
            return None
        busiest = _busiest(summary, rhos)
        return None if busiest is None else _above(round(busiest, 2), threshold)  # as it is shown

    return Condition(
        name=f"overloaded {what}",
        threshold=0.9,
        number=number,
        phrase=f"{what} overloaded, ρ {{}}",
        means="queues grow until the trace ends, so do not compare latencies",
        is_share=False,
    )


def _growing_queue(summary: Summary, threshold: float) -> float | None:
    waits_s, span_s = summary.get("request/queue_s_mean", 0.0), summary.get("engine/span_s")
    prefill_s = summary.get("request/prefill_s_mean", 0.0)
    # 9: what an M/M/1 queue waits at ρ = 0.9, in service times
    if summary.get(CLOSED) or not span_s or waits_s < 9 * prefill_s:
        return None
    return _above(waits_s / span_s, threshold)


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
)

CONDITIONS = (
    Condition(
        name="rejected",
        threshold=0.01,
        number=_rejected,
        phrase="{} of the prompt tokens rejected",
        means="the remaining requests are not representative of the workload (model.max_len or "
        "a pool is too small)",
    ),
    Condition(
        name="aborted",
        threshold=0.01,
        number=_aborted,
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
        name="inert host",
        threshold=0.001,
        number=_inert_host,
        phrase="inert host tier: pages are backed up, but {} of the prompt tokens hit them",
        means="back-ups use the link and save nothing (prefixes come back while the device still "
        "holds them, or cache.host_gib is too small)",
    ),
    Condition(
        name="start-up",
        threshold=0.1,
        number=_start_up,
        phrase="{} of the total TTFT comes from requests of the first minute",
        means="means and percentiles describe the start-up (workload.start_jitter_s and "
        "workload.stagger_s spread the first arrivals, workload.warm_up_s leaves them out)",
    ),
    Condition(
        name="idle",
        threshold=0.2,
        number=_idle,
        phrase="idle, highest ρ {}",
        means="no resource is contended, so policies hardly change latencies (raise workload.load "
        "or workload.session_rate)",
        is_share=False,
    ),
    *OVERLOADS,
    Condition(
        name="few sessions",
        threshold=20,
        number=_few_sessions,
        phrase="only {} session(s)",
        means="confidence intervals over sessions are too narrow",
        is_share=False,
    ),
    Condition(
        name="collapsed sessions",
        threshold=0.25,
        number=_collapsed,
        phrase="one session holds {} of the requests",
        means="it dominates every mean; a prompt shared by many sessions may have merged them",
    ),
)
SURVIVORS = Condition(
    name="other survivors",
    threshold=0.01,
    number=lambda _summary, _threshold: None,  # it needs several runs
    phrase="{} of the requests finished in some rows but not in others",
    means="the rows cover different requests, so means and hit rates are not comparable",
)
