"""Metrics of `summary.json`, computed from the rows of some requests."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hicache.cache.prefix_cache import HIT_TIERS
from hicache.clock import SECOND_NS
from hicache.results.metrics import PERCENTILES, TTFT_PARTS

Numbers = NDArray[np.float64]
Columns = pd.DataFrame  # of requests.parquet, one row per request
Metric = Callable[[Columns], float]


def _token_hits(columns: Columns) -> float:
    prompt_len = columns["prompt_len"].sum()
    return float((prompt_len - columns["computed_len"].sum()) / prompt_len)


def times(columns: Columns, name: str) -> Numbers:
    if name == "ttft":
        return (columns["first_token_ns"] - columns["arrival_ns"]).to_numpy() / SECOND_NS
    if name == "e2e":
        return (columns["finish_ns"] - columns["arrival_ns"]).to_numpy() / SECOND_NS
    if name == "tpot":
        long = columns[columns["output_len"] > 1]
        steps = long["output_len"] - 1
        return ((long["finish_ns"] - long["first_token_ns"]) / steps).to_numpy() / SECOND_NS
    return columns[f"{name}_ns"].to_numpy() / SECOND_NS


def _total(name: str) -> Metric:
    return lambda columns: float(columns[name].sum())


def _mean_time(name: str) -> Metric:
    return lambda columns: float(times(columns, name).mean())


def _percentile_time(name: str, percent: int) -> Metric:
    # nearest rank, so the value of one of the requests
    def metric(columns: Columns) -> float:
        return float(np.percentile(times(columns, name), percent, method="inverted_cdf"))

    return metric


# keys of summary.json that can be compared request by request
METRICS: dict[str, Metric] = {
    "cache/token_hit_rate": _token_hits,
    "request/prompt_tokens": _total("prompt_len"),
    "request/output_tokens": _total("output_len"),
}
for _name in (*(f"{tier}_hit" for tier in HIT_TIERS), "computed", "recomputed"):
    METRICS[f"cache/{_name}_tokens"] = _total(f"{_name}_len")
for _name in ("ttft", "tpot", "e2e", *TTFT_PARTS):
    METRICS[f"request/{_name}_s_mean"] = _mean_time(_name)
    for _percent in PERCENTILES:
        METRICS[f"request/{_name}_s_p{_percent}"] = _percentile_time(_name, _percent)
