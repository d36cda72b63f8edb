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
from typing import NamedTuple

import numpy as np
import pandas as pd

from hicache.cli.tables.groups import Group
from hicache.cli.tables.intervals import Places, draws, ends, lacking
from hicache.cli.tables.request_metrics import METRICS, Columns, Numbers, Ratio, Statistic
from hicache.results.metrics import Status
from hicache.results.requests_file import read_requests

ASKED = ["session_id", "prompt_len"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of a metric between two groups of runs, over requests that both finished.

    Attributes:
        baseline: the metric of the baseline runs.
        other: the metric of the other runs.
        interval: the ends of the confidence interval. None if there are too few sessions or too few
            parts of the trace.
    """

    baseline: float
    other: float
    interval: tuple[float, float] | None

    @property
    def middle(self) -> float:
        return self.other - self.baseline


class Drawn(NamedTuple):
    # units that the bootstrap draws; a row is a request, or a run
    session_of: Places  # [rows]
    window_of: Places  # [sessions]


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
        self.sides = (baseline, other)
        self._runs = (
            replace(baseline, runs=tuple(bases[run.served] for run in runs)),
            replace(other, runs=runs),
        )
        parts = [_joined(bases[run.served].path, run.path) for run in runs]
        self.num_unpaired = sum(unpaired for _, _, unpaired in parts)
        self.baseline = pd.concat([part[0] for part in parts])
        self.other = pd.concat([part[1] for part in parts])
        replicates = [run.replicate for run in runs]
        places = {name: place for place, name in enumerate(dict.fromkeys(replicates))}
        numbers = np.array([places[name] for name in replicates])
        self.num_windows = len(places)
        windows = np.repeat(numbers, [len(part[0]) for part in parts])
        names = np.stack([windows, self.baseline["session_id"].astype(np.int64)], axis=1)
        sessions, session_of = np.unique(names, axis=0, return_inverse=True)
        self._requests = Drawn(session_of, window_of=sessions[:, 0])
        self._whole_runs = Drawn(numbers, window_of=np.arange(self.num_windows))
        self.num_sessions = len(self._requests.window_of)

    def __len__(self) -> int:
        return len(self.baseline)

    @property
    def lacks(self) -> str | None:
        return lacking(self.num_windows, self.num_sessions)

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
            )
            for (metric, (base, other)), found in zip(sides.items(), values.values(), strict=True)
        }


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
