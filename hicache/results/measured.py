"""Numbers about a table of requests, of a run or of somebody's own server log.

The columns are those of `requests.parquet`. `validate` compares a run with a log.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hicache.clock import SECOND_NS

if TYPE_CHECKING:
    import pandas as pd

HIT_COLUMNS = ("device_hit_len", "host_hit_len", "storage_hit_len")


def _hits(frame: "pd.DataFrame") -> float:
    return 100 * float(frame[list(HIT_COLUMNS)].to_numpy().sum() / frame["prompt_len"].sum())


def _ttft_s(frame: "pd.DataFrame") -> float:
    return float((frame["first_token_ns"] - frame["arrival_ns"]).mean()) / SECOND_NS


def _span_s(frame: "pd.DataFrame") -> float:
    return float(frame["finish_ns"].max() - frame["arrival_ns"].min()) / SECOND_NS


# of a table of finished requests
MEASURES: dict[str, Callable[["pd.DataFrame"], float]] = {
    "hits": _hits,  # percent of the prompt tokens
    "hit_count": lambda frame: float((frame[list(HIT_COLUMNS)].sum(axis=1) > 0).sum()),
    "ttft_s": _ttft_s,  # mean
    "latency_s": lambda frame: float((frame["finish_ns"] - frame["arrival_ns"]).mean()) / SECOND_NS,
    "requests_per_s": lambda frame: len(frame) / _span_s(frame),
    "prompt_tokens_per_s": lambda frame: float(frame["prompt_len"].sum()) / _span_s(frame),
    "output_tokens_per_s": lambda frame: float(frame["output_len"].sum()) / _span_s(frame),
}


def measure(frame: "pd.DataFrame", name: str, *, by: str | None = None) -> dict[int, float]:
    """Return a measure of the finished requests, by the values of a column; None: of all, at 0."""
    finished = frame[frame["status"] == "finished"]
    if by is None:
        return {0: MEASURES[name](finished)}
    values = sorted(finished[by].unique().tolist())
    return {value: MEASURES[name](finished[finished[by] == value]) for value in values}
