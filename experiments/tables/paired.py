"""Two policies request by request: what changed, and how sure one may be of it.

The requests that both finished are compared under the same seed. A difference comes with a
bootstrap interval that draws whole sessions, with replacement: the requests of a session share
their prefix and their fate, and drawing them one by one would promise too much (Davison and
Hinkley, Bootstrap Methods and their Application, 1997, section 3.8). The interval speaks of this
trace with other sessions of its kind. It knows nothing of another arrival pattern, and sessions
that wait in one queue are not quite independent: `workload.start_jitter_s` with seeds shows that.

What belongs to whole runs (a load, pages written) is compared too, run by run: the mean over seeds,
with the range of the differences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from experiments.tables.groups import Group
from hicache.clock import SECOND_NS
from hicache.results.metrics import PERCENTILES, TTFT_PARTS, Status

Numbers = NDArray[np.float64]
Columns = dict[str, Numbers]  # of requests.parquet, one number a request

CONFIDENCE = 0.95
NUM_DRAWS = 2_000
DRAWS_AT_ONCE = 100  # so that the weights of 20,000 requests take megabytes
COLUMNS = (
    "id",
    "session_id",
    "status",
    "prompt_len",
    "output_len",
    "device_hit_len",
    "host_hit_len",
    "storage_hit_len",
    "computed_len",
    "recomputed_len",
    "arrival_ns",
    "first_token_ns",
    "finish_ns",
    *(f"{part}_ns" for part in TTFT_PARTS),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric that is one sum over another: `above`, `below`: [requests]."""

    above: Numbers
    below: Numbers

    def under(self, weights: Numbers) -> Numbers:
        """The metric under each row of `weights` [draws, requests]: [draws]."""
        above, below = weights @ self.above, weights @ self.below
        return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


@dataclass(frozen=True, slots=True)
class Total:
    """A metric that is a sum: `values`: [requests]."""

    values: Numbers

    def under(self, weights: Numbers) -> Numbers:
        """The metric under each row of `weights` [draws, requests]: [draws]."""
        return weights @ self.values


class Percentile:
    """A nearest-rank percentile, as `hicache.results.metrics.percentile` has it."""

    def __init__(self, values: Numbers, percent: float) -> None:
        """`values`: [requests]."""
        self._order = np.argsort(values, kind="stable")
        self._sorted = values[self._order]
        self._percent = percent

    def under(self, weights: Numbers) -> Numbers:
        """The metric under each row of `weights` [draws, requests]: [draws]."""
        counts = np.cumsum(weights[:, self._order], axis=1)
        ranks = np.maximum(np.ceil(counts[:, -1] * self._percent / 100), 1)
        places = [
            np.searchsorted(row, rank) for row, rank in zip(counts, ranks.tolist(), strict=True)
        ]
        return self._sorted[places]


def _token_hits(columns: Columns) -> Ratio:
    return Ratio(columns["prompt_len"] - columns["computed_len"], columns["prompt_len"])


def _time_per_token(columns: Columns) -> Ratio:
    long = columns["output_len"] > 1
    gaps = np.where(long, columns["output_len"] - 1, 1)
    times = (columns["finish_ns"] - columns["first_token_ns"]) / gaps / SECOND_NS
    return Ratio(np.where(long, times, 0.0), long.astype(float))


def _times(columns: Columns, name: str) -> Numbers:
    if name == "ttft":
        return (columns["first_token_ns"] - columns["arrival_ns"]) / SECOND_NS
    return columns[f"{name}_ns"] / SECOND_NS


def _total(name: str) -> Callable[[Columns], Total]:
    return lambda columns: Total(columns[name])


def _mean_time(name: str) -> Callable[[Columns], Ratio]:
    return lambda columns: Ratio(_times(columns, name), np.ones(len(columns["id"])))


def _percentile_time(name: str, percent: int) -> Callable[[Columns], Percentile]:
    return lambda columns: Percentile(_times(columns, name), percent)


# keys of summary.json that requests can be compared by
METRICS: dict[str, Callable[[Columns], Ratio | Total | Percentile]] = {
    "cache/token_hit_rate": _token_hits,
    "request/prompt_tokens": _total("prompt_len"),
    "request/output_tokens": _total("output_len"),
    "request/tpot_s_mean": _time_per_token,
}
for _name in ("device_hit", "host_hit", "storage_hit", "computed", "recomputed"):
    METRICS[f"cache/{_name}_tokens"] = _total(f"{_name}_len")
for _name in ("ttft", *TTFT_PARTS):
    METRICS[f"request/{_name}_s_mean"] = _mean_time(_name)
    for _percent in PERCENTILES:
        METRICS[f"request/{_name}_s_p{_percent}"] = _percentile_time(_name, _percent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A metric of one group less the same of another, over the requests that both finished.

    `is_of_runs`: it belongs to no request, and `low` and `high` are the range over seeds.
    """

    baseline: float
    other: float
    low: float
    high: float
    is_of_runs: bool = False

    @property
    def middle(self) -> float:
        """What was measured; `low` and `high` are the ends of its interval."""
        return self.other - self.baseline


class Pairs:
    """The requests that two groups of runs both finished, seed by seed."""

    def __init__(self, baseline: Group, other: Group) -> None:
        """Read `requests.parquet` of all runs.

        Raises:
            ValueError: they share no seed, served other requests, or finished none in common.
        """
        bases = {run.config["seed"]: run for run in baseline.runs}
        self._runs = [
            (bases[run.config["seed"]], run) for run in other.runs if run.config["seed"] in bases
        ]
        if not self._runs:
            raise ValueError(f"{baseline.settings} and {other.settings} share no seed")
        parts = [_joined(base.path, run.path) for base, run in self._runs]
        self.num_seeds = len(self._runs)
        self.num_unpaired = sum(unpaired for _, _, unpaired in parts)
        self.baseline = _stacked([part[0] for part in parts])
        self.other = _stacked([part[1] for part in parts])
        sessions, self._places = np.unique(self.baseline["session_id"], return_inverse=True)
        self.num_sessions = len(sessions)

    def __len__(self) -> int:
        """Pairs of requests."""
        return len(self.baseline["id"])

    def sooner(self) -> float:
        """The share of requests whose first token came sooner than under the baseline."""
        return float(np.mean(_times(self.other, "ttft") < _times(self.baseline, "ttft")))

    def later(self) -> float:
        """The share of requests whose first token came later than under the baseline."""
        return float(np.mean(_times(self.other, "ttft") > _times(self.baseline, "ttft")))

    def differences(self, metrics: Sequence[str]) -> dict[str, Difference]:
        """Each metric's difference, with the same draws of sessions for all that requests have.

        Raises:
            ValueError: a run has no such metric.
        """
        found = self._of_requests([metric for metric in metrics if metric in METRICS])
        return {metric: found.get(metric) or self._of_runs(metric) for metric in metrics}

    def _of_runs(self, metric: str) -> Difference:
        for run in chain.from_iterable(self._runs):
            if metric not in run.summary:
                raise ValueError(f"{run.path} has no metric {metric}")
        sides = [(base.summary[metric], other.summary[metric]) for base, other in self._runs]
        differences = [other - base for base, other in sides]
        return Difference(
            baseline=fmean(base for base, _ in sides),
            other=fmean(other for _, other in sides),
            low=min(differences),
            high=max(differences),
            is_of_runs=True,
        )

    def _of_requests(self, metrics: Sequence[str]) -> dict[str, Difference]:
        makers = [METRICS[metric] for metric in metrics]
        sides = [(make(self.baseline), make(self.other)) for make in makers]
        once = np.ones((1, len(self)))
        drawn: list[list[Numbers]] = [[] for _ in metrics]
        for weights in self._draws():
            for place, (base, other) in enumerate(sides):
                drawn[place].append(other.under(weights) - base.under(weights))
        tail = 50 * (1 - CONFIDENCE)
        found = {}
        for metric, (base, other), draws in zip(metrics, sides, drawn, strict=True):
            low, high = np.percentile(np.concatenate(draws), [tail, 100 - tail])
            found[metric] = Difference(
                baseline=float(base.under(once)[0]),
                other=float(other.under(once)[0]),
                low=float(low),
                high=float(high),
            )
        return found

    def _draws(self) -> Iterator[Numbers]:
        # how often each request is drawn, with all others of its session: [draws, requests] each
        random = np.random.default_rng(0)
        shares = np.full(self.num_sessions, 1 / self.num_sessions)
        for _ in range(NUM_DRAWS // DRAWS_AT_ONCE):
            counts = random.multinomial(self.num_sessions, shares, size=DRAWS_AT_ONCE)
            yield counts[:, self._places].astype(float)


def _joined(baseline: Path, other: Path) -> tuple[Columns, Columns, int]:
    """The rows of two runs for the requests that both finished, and how many one of them did."""
    first, second = _finished(baseline), _finished(other)
    ids, in_first, in_second = np.intersect1d(first["id"], second["id"], return_indices=True)
    if not len(ids):
        raise ValueError(f"{baseline} and {other} finished no request in common")
    rows = [
        {name: column[places] for name, column in columns.items()}
        for columns, places in ((first, in_first), (second, in_second))
    ]
    for name in ("session_id", "prompt_len"):
        if not np.array_equal(rows[0][name], rows[1][name]):
            raise ValueError(f"{baseline} and {other} did not serve the same requests")
    return rows[0], rows[1], len(first["id"]) + len(second["id"]) - 2 * len(ids)


def _finished(run: Path) -> Columns:
    table = pq.read_table(run / "requests.parquet", columns=list(COLUMNS))
    finished = table.filter(pc.equal(table["status"], Status.finished.value)).drop(["status"])
    return {name: finished[name].to_numpy().astype(float) for name in finished.column_names}


def _stacked(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
