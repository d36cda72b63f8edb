"""Metrics of `summary.json` as weighted sums over requests, for the bootstrap."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hicache.clock import SECOND_NS
from hicache.results.metrics import PERCENTILES, TTFT_PARTS

Numbers = NDArray[np.float64]
Columns = pd.DataFrame  # of requests.parquet, one row per request


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric that divides one sum over requests by another, such as the token hit rate.

    Attributes:
        above: [requests], the contribution of each request to the numerator.
        below: [requests], the contribution of each request to the denominator.
    """

    above: Numbers
    below: Numbers

    def under(self, weights: Numbers) -> Numbers:
        """Return the ratio of two sums over requests, for several weightings of the requests.

        Args:
            weights: [draws, requests], the weight of each request in each bootstrap draw.

        Returns:
            [draws], the ratio in each draw. The ratio is 0 where the denominator is 0.
        """
        above, below = weights @ self.above, weights @ self.below
        return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


@dataclass(frozen=True, slots=True)
class Total:
    values: Numbers

    def under(self, weights: Numbers) -> Numbers:
        return weights @ self.values


class Percentile:
    """A percentile of one value per request, such as the p99 of TTFT.

    The percentile is nearest-rank, so it is always the value of one of the requests.
    """

    def __init__(self, values: Numbers, percent: float) -> None:
        self._order = np.argsort(values, kind="stable")
        self._sorted = values[self._order]
        self._percent = percent

    def under(self, weights: Numbers) -> Numbers:
        counts = np.cumsum(weights[:, self._order], axis=1)
        ranks = np.maximum(np.ceil(counts[:, -1] * self._percent / 100), 1)
        places = [
            np.searchsorted(row, rank) for row, rank in zip(counts, ranks.tolist(), strict=True)
        ]
        return self._sorted[places]


Statistic = Ratio | Total | Percentile


def _token_hits(columns: Columns) -> Ratio:
    prompt_len = columns["prompt_len"].to_numpy()
    return Ratio(prompt_len - columns["computed_len"].to_numpy(), prompt_len)


def _time_per_token(columns: Columns) -> Ratio:
    long = columns["output_len"].to_numpy() > 1
    gaps = np.where(long, columns["output_len"] - 1, 1)
    times = (columns["finish_ns"] - columns["first_token_ns"]) / gaps / SECOND_NS
    return Ratio(np.where(long, times, 0.0), long.astype(float))


def times(columns: Columns, name: str) -> Numbers:
    if name == "ttft":
        return (columns["first_token_ns"] - columns["arrival_ns"]).to_numpy() / SECOND_NS
    return columns[f"{name}_ns"].to_numpy() / SECOND_NS


def _total(name: str) -> Callable[[Columns], Total]:
    return lambda columns: Total(columns[name].to_numpy())


def _mean_time(name: str) -> Callable[[Columns], Ratio]:
    return lambda columns: Ratio(times(columns, name), np.ones(len(columns)))


def _percentile_time(name: str, percent: int) -> Callable[[Columns], Percentile]:
    return lambda columns: Percentile(times(columns, name), percent)


# keys of summary.json that can be compared request by request
METRICS: dict[str, Callable[[Columns], Statistic]] = {
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
