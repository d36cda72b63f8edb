"""Goodput: the highest request rate at which a given share of requests is served in time.

hicache run experiment=goodput
hicache run goodput.num_rates=16 goodput.ttft_s=1 prefetch.stop=best_effort

A request is in time if its TTFT and its mean time per further token meet their limits. With
`workload.jobs=true`, jobs count instead of requests: a job is in time if it finishes with a
slowdown of at most `goodput.job_slowdown`. The workload is replayed at rates that grow by a
constant factor. For a lower rate, the program leaves sessions out. For a higher rate, it repeats
sessions with new tokens. It does not stretch time. Every session of one rate is also part of every
higher rate. The share in time is made monotone over the rates by isotonic regression, weighted by
requests. The goodput is interpolated between the two rates around the wanted share. One replay
gives no confidence interval: for that, use windows (`hicache compare --paired`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hicache import experiment
from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig, GoodputConfig
from hicache.results.jobs import HOUR_S, counts
from hicache.results.metrics import Progress, RequestRecord, Result, Status
from hicache.workload.workload import Workload, load_workload, repeat_sessions, sample_sessions

SPAN = 24.0  # ratio of the highest rate to the lowest
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    rates: Floats  # requests, or jobs, per second
    in_time: Floats  # number of them served in time
    served: Floats  # number of them served

    def shares(self) -> Floats:
        return np.asarray(self.in_time / self.served)

    def goodput(self, share: float) -> float:
        """Return the highest request rate at which at least `share` of the requests are in time.

        Rates are in requests per second. `share` is a fraction from 0 to 1. A request is in time if
        it meets its limits on TTFT and on time per output token. The result is 0 if even the lowest
        tried rate misses `share`. It is the highest tried rate if no tried rate misses `share`.
        """
        return crossing(self.rates, falling(self.shares(), self.served), share)


def run(config: ExperimentConfig, *, progress: Callable[[Progress], None] | None = None) -> Result:
    if config.parallel.workers is not None:
        from hicache import fleet  # joblib only if needed

        return fleet.run(config, progress=progress)
    result = experiment.run(config, progress=progress)
    if not config.goodput.num_rates:
        return result
    ladder = climb(config)
    shares = ladder.shares()
    unit, factor = ("jobs_per_hour", HOUR_S) if config.workload.jobs else ("requests_per_s", 1)
    measures = {
        f"goodput/{unit}": ladder.goodput(config.goodput.share) * factor,
        f"goodput/tried_{unit}": float(ladder.rates[-1]) * factor,
        "goodput/mended_share": float(np.max(shares - np.minimum.accumulate(shares))),
    }
    return replace(result, measures={**result.measures, **measures})


def climb(config: ExperimentConfig) -> Ladder:
    """Replay the workload at several request rates, and count the requests, or jobs, in time.

    Raises:
        ValueError: the arrivals depend on earlier answers, so the request rate cannot be changed.
    """
    if not config.workload.is_timed:
        raise ValueError(
            "goodput.num_rates needs a workload with fixed arrival times, got "
            f"workload.arrivals={config.workload.arrivals.name} of workload={config.workload.kind}"
        )
    whole = load_workload(config.workload, data_dir=config.data_dir, seed=config.seed)
    highest = config.goodput.times
    rates = np.geomspace(highest / SPAN, highest, config.goodput.num_rates)
    found = [replay(config, whole, times) for times in rates.tolist()]
    in_time = [in_time_of(config, result) for result in found]
    return ladder_of(in_time, span_s(whole, config.workload.warm_up_s))


def replay(config: ExperimentConfig, whole: Workload, times: float) -> Result:
    change = sample_sessions if times <= 1 else repeat_sessions
    part: Workload = change(whole, times, config.seed)
    return experiment.run(
        replace(config, workload=replace(config.workload, load=None)), workload=part
    )


def in_time_of(config: ExperimentConfig, result: Result) -> tuple[int, int]:
    """Return how many requests, or jobs, were in time, and how many there were."""
    if config.workload.jobs:
        return counts(result.measures)
    in_time = sum(is_in_time(each, config.goodput) for each in result.records)
    return in_time, len(result.records)


def ladder_of(found: Sequence[tuple[int, int]], span_s: float) -> Ladder:
    in_time, served = np.array(found, float).T
    kept = np.flatnonzero(np.diff(served, prepend=0))  # two shares may keep the same sessions
    return Ladder(rates=served[kept] / span_s, in_time=in_time[kept], served=served[kept])


def is_in_time(record: RequestRecord, wanted: GoodputConfig) -> bool:
    ttft_ns, finish_ns, first_ns = record.ttft_ns, record.finish_ns, record.first_token_ns
    if record.status is not Status.finished or ttft_ns is None or finish_ns is None:
        return False
    assert first_ns is not None
    tpot_ns = (finish_ns - first_ns) / max(record.output_len - 1, 1)
    return ttft_ns <= wanted.ttft_s * SECOND_NS and tpot_ns <= wanted.tpot_s * SECOND_NS


def falling(shares: Floats, weights: Floats) -> Floats:
    """Return the sequence that never rises and is closest to `shares`.

    Closeness is the sum of squared differences, weighted by `weights`. This is isotonic regression,
    computed by pooling adjacent violators.
    """
    pools: list[tuple[float, float, int]] = []  # (mean, weight, number of rates)
    for share, weight in zip(shares.tolist(), weights.tolist(), strict=True):
        pool = (share, weight, 1)
        while pools and pools[-1][0] < pool[0]:
            mean, other, count = pools.pop()
            total = other + pool[1]
            mean = (mean * other + pool[0] * pool[1]) / total if total else pool[0]
            pool = (mean, total, count + pool[2])
        pools.append(pool)
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


def crossing(rates: Floats, shares: Floats, wanted: float) -> float:
    above = int(np.count_nonzero(shares >= wanted))
    if above == 0:
        return 0.0
    if above == len(rates):
        return float(rates[-1])
    (low, high), (more, less) = rates[above - 1 : above + 1], shares[above - 1 : above + 1]
    return float(low + (high - low) * (more - wanted) / (more - less))


def span_s(workload: Workload, warm_up_s: float) -> float:
    arrivals = [request.arrival_ns / SECOND_NS for request in workload.requests]
    return max(max(arrivals) - max(min(arrivals), warm_up_s), 1.0)
