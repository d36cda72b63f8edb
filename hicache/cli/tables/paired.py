"""Two configurations compared request by request, with confidence intervals over blocks.

The comparison covers the requests that both finished. Requests are matched within a block: a window
of a trace with all its seeds, or a seed of a generated workload. With one window of a trace, its
seeds are the blocks. They shift the same sessions by seconds and change storage delays, so such an
interval holds for this window only.

Metrics of whole runs (a load, pages written) have one value per run; a block has their mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from hicache.cli.tables.groups import Group
from hicache.cli.tables.intervals import LEAST_BLOCKS, Estimate, difference, ratio
from hicache.cli.tables.request_metrics import METRICS, Columns
from hicache.results.metrics import Status
from hicache.results.requests_file import read_requests

ASKED = ["session_id", "prompt_len"]
RATES = ("_rate", "_share")  # ends of the names of metrics that are compared by differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of a metric between two groups of runs, over requests that both finished.

    Attributes:
        baseline: the metric of the baseline runs.
        other: the metric of the other runs.
        absolute: the mean difference over blocks.
        relative: the mean ratio over blocks, less 1. None for rates, and if a value is not
            positive.
    """

    baseline: float
    other: float
    absolute: Estimate
    relative: Estimate | None

    @property
    def middle(self) -> float:
        return self.other - self.baseline

    @property
    def judged(self) -> Estimate:
        """The estimate that a table shows and that decides whether the effect is significant."""
        return self.relative or self.absolute


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

    Attributes:
        blocks: name of the blocks: "window" or "seed".
        num_blocks: how many blocks both groups have in common.
        is_one_trace: whether the blocks are seeds of one window of a trace.
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
        names: list[tuple[object, ...]] = [run.replicate for run in runs]
        self.is_one_trace = len(set(names)) == 1 and len(runs) > 1
        if self.is_one_trace:
            names = [run.served for run in runs]
        self.blocks = "seed" if len({name[0] for name in names}) == 1 else "window"
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        self._block_of_run = np.array([places[name] for name in names])
        self._block_of = np.repeat(self._block_of_run, [len(part[0]) for part in parts])
        self.num_blocks = len(places)

    def __len__(self) -> int:
        return len(self.baseline)

    @property
    def lacks(self) -> str | None:
        if self.num_blocks >= LEAST_BLOCKS:
            return None
        return (
            f"{self.num_blocks} slice(s) or seed(s) (workload.slice, seed), at least "
            f"{LEAST_BLOCKS} are needed"
        )

    def differences(self, metrics: Sequence[str]) -> dict[str, Difference]:
        """Compare the two groups of runs: return the difference of each metric.

        Raises:
            ValueError: a run lacks one of the metrics.
        """
        return {metric: self._difference(metric) for metric in metrics}

    def _difference(self, metric: str) -> Difference:
        blocks = range(self.num_blocks)
        if metric in METRICS:
            value, sides = METRICS[metric], (self.baseline, self.other)
            whole = [value(side) for side in sides]
            values = [[value(side[self._block_of == block]) for block in blocks] for side in sides]
        else:
            of_runs = [np.array(group.values(metric), float) for group in self._runs]
            whole = [float(each.mean()) for each in of_runs]
            values = [
                [float(each[self._block_of_run == block].mean()) for block in blocks]
                for each in of_runs
            ]
        return Difference(
            baseline=whole[0],
            other=whole[1],
            absolute=difference(*values),
            relative=None if metric.endswith(RATES) else ratio(*values),
        )


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
