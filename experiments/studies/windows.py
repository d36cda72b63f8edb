"""The same windows of a trace at any rate, and how much less one policy has than another in them.

A `Rung` is what came of all windows at one rate, as sums of sessions; two policies at one rate have
the same sessions. Where sessions are repeated to raise the rate, a copy counts to the session that
it repeats, and is drawn with it. The interval of a difference draws windows and of each its
sessions, the same ones for both sides (`hicache.cli.tables.intervals`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hicache.cli.goodput import SPAN, Floats, Ladder, is_in_time, replay, span_s
from hicache.cli.tables.intervals import Places, draws, ends, lacking
from hicache.clock import SECOND_NS, to_ns
from hicache.config import ExperimentConfig
from hicache.results.metrics import RequestRecord
from hicache.results.verdict import is_overloaded
from hicache.workload.build import NAME_BITS, load_workload

STEP = 1.3  # from one rate to the next
SUMS = ("served", "in_time", "finished", "ttft_s")  # of a session
LOADS = ("load/rho_gpu", "load/rho_queue", "load/rho_read", "load/rho_write")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What came of W windows with S sessions at one rate. `loads`: means over windows."""

    served: Floats  # [S], requests
    in_time: Floats  # [S], requests
    finished: Floats  # [S], requests
    ttft_s: Floats  # [S], sums over the finished
    gpu_s: Floats  # [W], sums of prefill
    loads: Mapping[str, float]

    @property
    def share(self) -> float:
        """Of all requests, those in time."""
        return float(self.in_time.sum() / self.served.sum())

    @property
    def is_overloaded(self) -> bool:
        """Whether a latency says no more than how long a window is."""
        return is_overloaded(self.loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A metric of two sides, and the interval of the first less the second."""

    ours: float
    other: float
    low: float
    high: float

    @property
    def is_told(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


Metric = Callable[[Floats], float]  # of sessions that count so often: [S]


class Windows:
    """Some windows of a trace, read once, replayed under many configurations."""

    def __init__(self, config: ExperimentConfig, numbers: Iterable[int]) -> None:
        """`numbers`: which of `workload.windows`."""
        self._wholes = {
            number: load_workload(
                replace(config.workload, window=number), data_dir=config.data_dir, seed=config.seed
            )
            for number in numbers
        }
        warm_up_s = config.workload.warm_up_s
        self._span_s = sum(span_s(whole, warm_up_s) for whole in self._wholes.values())
        names = [
            (place, session)
            for place, whole in enumerate(self._wholes.values())
            for session in dict.fromkeys(request.session_id for request in whole.requests)
        ]
        self._place_of = {name: place for place, name in enumerate(names)}
        self.window_of: Places = np.array([window for window, _ in names], np.int64)
        counted = sum(
            request.arrival_ns >= to_ns(warm_up_s)
            for whole in self._wholes.values()
            for request in whole.requests
        )
        self.own_rate = counted / self._span_s  # requests a second

    def replay(self, config: ExperimentConfig, times: float) -> Rung:
        """All windows at so many times their own rate."""
        sums = np.zeros((len(SUMS), len(self._place_of)))
        gpu_s, loads = [], []
        for place, (number, whole) in enumerate(self._wholes.items()):
            here = replace(config, workload=replace(config.workload, window=number))
            result = replay(here, whole, times)
            for record in result.records:
                session = record.session_id % (1 << NAME_BITS)
                sums[:, self._place_of[place, session]] += _counted(record, config)
            gpu_s.append(result.measures["gpu/prefill_s"])
            loads.append([result.measures[name] for name in LOADS])
        return Rung(
            **dict(zip(SUMS, sums, strict=True)),
            gpu_s=np.array(gpu_s),
            loads=dict(zip(LOADS, np.mean(loads, axis=0).tolist(), strict=True)),
        )

    def ladder(self, rungs: Sequence[Rung]) -> Ladder:
        """Rungs in rising order of their rates."""
        served = np.stack([rung.served for rung in rungs])
        return Ladder(
            rates=served.sum(1) / self._span_s,
            in_time=np.stack([rung.in_time for rung in rungs]),
            served=served,
        )

    def bracket(self, config: ExperimentConfig, times: float, first: Rung | None = None) -> Ladder:
        """Rates from `times` on, by `STEP`, until one is in time and its neighbour is not.

        `first`: what came of `times`, if that is known.
        """
        found = {times: first or self.replay(config, times)}
        is_enough = found[times].share >= config.goodput.share
        while 1 / SPAN <= times <= config.goodput.times:
            times = times * STEP if is_enough else times / STEP
            found[times] = self.replay(config, times)
            if (found[times].share >= config.goodput.share) != is_enough:
                break
        return self.ladder([found[times] for times in sorted(found)])

    def mean_ttft_s(self, rung: Rung) -> Metric:
        """Of the finished requests."""
        return lambda weights: float(rung.ttft_s @ weights / (rung.finished @ weights))

    def share_in_time(self, rung: Rung) -> Metric:
        """Of all requests."""
        return lambda weights: float(rung.in_time @ weights / (rung.served @ weights))

    def gpu_s_per_request(self, rung: Rung) -> Metric:
        """Prefill GPU-seconds; a window counts as often as its sessions do on the mean."""
        counts = np.bincount(self.window_of, rung.finished)

        def metric(weights: Floats) -> float:
            times = np.bincount(self.window_of, weights) / np.bincount(self.window_of)
            return float(rung.gpu_s @ times / (counts @ times))

        return metric

    def difference(self, ours: Metric, other: Metric) -> Difference:
        """Both sides, with the interval of a paired difference."""
        drawn = [
            ours(weights) - other(weights) for counts in draws(self.window_of) for weights in counts
        ]
        lacks = lacking(len(self._wholes), len(self.window_of))
        if lacks is not None:
            raise ValueError(lacks)
        low, high = ends(np.array(drawn), len(self._wholes))
        once = np.ones(len(self.window_of))
        return Difference(ours=ours(once), other=other(once), low=low, high=high)


def _counted(record: RequestRecord, config: ExperimentConfig) -> tuple[float, float, float, float]:
    ttft_ns = record.ttft_ns
    if ttft_ns is None:
        return 1.0, 0.0, 0.0, 0.0
    return 1.0, float(is_in_time(record, config.goodput)), 1.0, ttft_ns / SECOND_NS
