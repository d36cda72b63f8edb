"""Two policies compared request by request: the differences and their confidence intervals.

The comparison covers the requests that both policies finished, for each window and seed. The
bootstrap draws windows and sessions (`hicache.cli.tables.intervals`), so an interval is valid for
this trace with other windows and sessions of its kind. Seeds are no replicates of a trace: they
shift the same sessions by seconds and change storage delays. A drawn session counts under all its
seeds.

Metrics of whole runs (a load, pages written) are compared window by window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from hicache.cli.tables.groups import Group
from hicache.cli.tables.intervals import Places, draws, ends, lacking
from hicache.cli.tables.request_metrics import METRICS, Columns, Numbers, Ratio, Statistic, times
from hicache.results.metrics import Status
from hicache.results.requests_file import read_requests

ASKED = ["session_id", "prompt_len"]
BLOCK = 50  # consecutive requests per block, if there is only one window


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of a metric between two groups of runs, over requests that both finished.

    Attributes:
        baseline: the metric of the baseline runs.
        other: the metric of the other runs.
        interval: the ends of the confidence interval. None if there are too few sessions or too few
            parts of the trace.
        largest_share: the fraction of the difference that comes from the two parts of the trace
            with the largest contributions. It is above 1 if other parts contribute with the
            opposite sign. None if contributions cannot be added, as for a percentile.
        is_of_runs: True if the metric describes whole runs, such as GPU load, and not requests.
    """

    baseline: float
    other: float
    interval: tuple[float, float] | None
    largest_share: float | None
    is_of_runs: bool

    @property
    def middle(self) -> float:
        return self.other - self.baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    # units that the bootstrap draws; a row is a request, or a run
    session_of: Places  # [rows]
    window_of: Places  # [sessions]
    block_of: Places  # [rows]


Sides = dict[str, tuple[Statistic, Statistic]]  # by metric


class Pairs:
    """Two groups of runs, joined request by request.

    Two runs are joined if they have the same random seed and replay the same part of the trace.
    Only requests that finished in both runs are kept.

    Args:
        baseline: the runs of the baseline configuration.
        other: the runs of the configuration to compare with the baseline.

    Raises:
        ValueError: no two runs can be joined, two such runs served different requests, or no
            request finished in both.
    """

    def __init__(self, baseline: Group, other: Group) -> None:
        bases = {run.served: run for run in baseline.runs}
        runs = tuple(run for run in other.runs if run.served in bases)
        if not runs:
            raise ValueError(
                f"runs {baseline.settings} and {other.settings} have no window and seed in common"
            )
        self._runs = (
            replace(baseline, runs=tuple(bases[run.served] for run in runs)),
            replace(other, runs=runs),
        )
        parts = [_joined(bases[run.served].path, run.path) for run in runs]
        self.num_unpaired = sum(unpaired for _, _, unpaired in parts)
        self.baseline = pd.concat([part[0] for part in parts])
        self.other = pd.concat([part[1] for part in parts])
        replicates = [run.replicate for run in runs]
        names = list(dict.fromkeys(replicates))
        numbers = np.array([names.index(name) for name in replicates])
        self.num_windows = len(names)
        windows = np.repeat(numbers, [len(part[0]) for part in parts])
        self._requests = self._drawn(windows)
        self._whole_runs = Drawn(
            session_of=numbers, window_of=np.arange(self.num_windows), block_of=numbers
        )
        self.num_sessions = len(self._requests.window_of)

    def __len__(self) -> int:
        return len(self.baseline)

    @property
    def lacks(self) -> str | None:
        return lacking(self.num_windows, self.num_sessions)

    @property
    def blocks(self) -> str:  # the two largest hold `Difference.largest_share`
        count = int(self._requests.block_of.max()) + 1
        what = "windows" if self.num_windows > 1 else f"blocks of {BLOCK} requests in time"
        return f"{count} {what}"

    def sooner(self) -> float:
        return float(np.mean(times(self.other, "ttft") < times(self.baseline, "ttft")))

    def later(self) -> float:
        return float(np.mean(times(self.other, "ttft") > times(self.baseline, "ttft")))

    def differences(self, metrics: Sequence[str]) -> dict[str, Difference]:
        """Compare the two groups of runs: return the difference of each metric.

        Raises:
            ValueError: a run lacks one of the metrics.
        """
        of_requests: Sides = {
            metric: (METRICS[metric](self.baseline), METRICS[metric](self.other))
            for metric in metrics
            if metric in METRICS
        }
        of_runs: Sides = {}
        for metric in [metric for metric in metrics if metric not in METRICS]:
            base, other = (np.array(group.values(metric), float) for group in self._runs)
            of_runs[metric] = Ratio(base, np.ones(len(base))), Ratio(other, np.ones(len(base)))
        found = self._compared(of_requests, self._requests)
        found |= self._compared(of_runs, self._whole_runs)
        return {metric: found[metric] for metric in metrics}

    def _compared(self, sides: Sides, drawn: Drawn) -> dict[str, Difference]:
        once = np.ones((1, len(drawn.session_of)))
        values: dict[str, list[Numbers]] = {metric: [] for metric in sides}
        if sides and self.lacks is None:
            for counts in draws(drawn.window_of):
                weights = counts[:, drawn.session_of]
                for metric, (base, other) in sides.items():
                    values[metric].append(other.under(weights) - base.under(weights))
        return {
            metric: Difference(
                baseline=float(base.under(once)[0]),
                other=float(other.under(once)[0]),
                interval=ends(np.concatenate(found), self.num_windows) if found else None,
                largest_share=_largest_share(base.parts(), other.parts(), drawn.block_of),
                is_of_runs=drawn is self._whole_runs,
            )
            for (metric, (base, other)), found in zip(sides.items(), values.values(), strict=True)
        }

    def _drawn(self, windows: Places) -> Drawn:
        names = np.stack([windows, self.baseline["session_id"].astype(np.int64)], axis=1)
        sessions, session_of = np.unique(names, axis=0, return_inverse=True)
        block_of = windows
        if self.num_windows == 1:
            block_of = np.empty(len(self), np.int64)
            in_time = np.argsort(self.baseline["arrival_ns"], kind="stable")
            block_of[in_time] = np.arange(len(self)) // (BLOCK * len(self._runs[0].runs))
        return Drawn(session_of=session_of, window_of=sessions[:, 0], block_of=block_of)


def _largest_share(
    baseline: Numbers | None, other: Numbers | None, block_of: Places
) -> float | None:
    if baseline is None or other is None:
        return None
    parts = np.bincount(block_of, other - baseline)
    if not parts.sum() or len(parts) <= 2:
        return None
    return float(np.sort(parts / parts.sum())[-2:].sum())


def _joined(baseline: Path, other: Path) -> tuple[Columns, Columns, int]:
    first, second = _finished(baseline), _finished(other)
    both = first.index.intersection(second.index)
    if both.empty:
        raise ValueError(f"no request finished in both {baseline} and {other}")
    rows, others = first.loc[both], second.loc[both]
    if not rows[ASKED].equals(others[ASKED]):
        raise ValueError(f"{baseline} and {other} served different requests")
    return rows, others, len(first) + len(second) - 2 * len(both)


def _finished(run: Path) -> Columns:
    rows = read_requests(run)
    rows = rows[rows["status"] == Status.finished.value]
    return rows.set_index("id").sort_index().select_dtypes("number").astype(float)
