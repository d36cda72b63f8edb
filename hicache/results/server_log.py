"""Measures of a table of requests, from a run or from a server's log.

The columns are those of `requests.parquet`.
"""

from collections.abc import Callable
from math import nan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from hicache.clock import SECOND_NS, to_ns
from hicache.workload.rows import LATEST_S
from hicache.workload.trace import Count, OddRow, Seconds, Tokens, Trace

if TYPE_CHECKING:
    import pandas as pd

HITS = ("device_hit", "host_hit", "storage_hit")
HIT_COLUMNS = [f"{tier}_len" for tier in HITS]


def _hits(frame: "pd.DataFrame") -> float:
    known = frame.dropna(subset=HIT_COLUMNS)
    if known.empty:
        return nan
    return 100 * float(known[HIT_COLUMNS].to_numpy().sum() / known["prompt_len"].sum())


def _hit_count(frame: "pd.DataFrame") -> float:
    known = frame.dropna(subset=HIT_COLUMNS)
    return nan if known.empty else float((known[HIT_COLUMNS].sum(axis=1) > 0).sum())


def _ttft_s(frame: "pd.DataFrame") -> float:
    return float((frame["first_token_ns"] - frame["arrival_ns"]).mean()) / SECOND_NS


def _span_s(frame: "pd.DataFrame") -> float:
    return float(frame["finish_ns"].max() - frame["arrival_ns"].min()) / SECOND_NS


# of a table of finished requests
MEASURES: dict[str, Callable[["pd.DataFrame"], float]] = {
    "hits": _hits,  # percent of the prompt tokens
    "hit_count": _hit_count,
    "ttft_s": _ttft_s,  # mean
    "latency_s": lambda frame: float((frame["finish_ns"] - frame["arrival_ns"]).mean()) / SECOND_NS,
    "span_s": _span_s,
    "requests_per_s": lambda frame: len(frame) / _span_s(frame),
    "prompt_tokens_per_s": lambda frame: float(frame["prompt_len"].sum()) / _span_s(frame),
    "output_tokens_per_s": lambda frame: float(frame["output_len"].sum()) / _span_s(frame),
}


def measure(frame: "pd.DataFrame", name: str, *, by: str | None = None) -> dict[int, float]:
    """Compute a metric, such as the mean TTFT, over the finished requests of a table.

    Args:
        frame: a table with one row per request.
        name: the metric, a key of `MEASURES`.
        by: a column to group the requests by. None means one group of all requests.

    Returns:
        The metric of each group, by the group's value in the column. The only key is 0 if `by` is
            None.
    """
    finished = frame[frame["status"] == "finished"]
    if by is None:
        return {0: MEASURES[name](finished)}
    values = sorted(finished[by].unique().tolist())
    return {value: MEASURES[name](finished[finished[by] == value]) for value in values}


class Measured(Struct):
    """One request of a server; times in seconds, the rest in tokens."""

    arrival: Annotated[float, Meta(ge=0, le=LATEST_S)]
    ttft: Seconds
    latency: Seconds
    prompt: Tokens
    output: Tokens
    device_hit: Count | None = None
    host_hit: Count | None = None
    storage_hit: Count | None = None


def read_measured(path: Path) -> "pd.DataFrame":
    """Read the log of a real server as a table with one row per request.

    The log may be any file that a trace may be. A row has the fields of `Measured`. If it has none
    of the hits, those of the request are unknown (NaN). The table is sorted by arrival.

    Raises:
        ValueError: a row lacks a field or contradicts itself, or there are no rows.
    """
    import pandas as pd

    trace = Trace(path)
    rows = list(trace.read(Measured, _measured))
    for odd in trace.left_out:
        raise ValueError(f"{odd.where}: {odd.why}")
    if not rows:
        raise ValueError(f"{path} has no requests")
    return pd.DataFrame(rows).sort_values("arrival_ns", kind="stable", ignore_index=True)


def _measured(where: str, row: Measured) -> dict[str, str | float]:
    if not 0 < row.ttft <= row.latency:
        told = f"ttft must be above 0 and at most latency={row.latency:g}, got {row.ttft:g}"
        raise OddRow(told)
    hits = [row.device_hit, row.host_hit, row.storage_hit]
    is_known = any(each is not None for each in hits)
    if sum(each or 0 for each in hits) > row.prompt:
        raise OddRow(f"{sum(each or 0 for each in hits)} tokens hit of a prompt of {row.prompt}")
    return {
        "status": "finished",
        "arrival_ns": to_ns(row.arrival),
        "first_token_ns": to_ns(row.arrival + row.ttft),
        "finish_ns": to_ns(row.arrival + row.latency),
        "prompt_len": row.prompt,
        "output_len": row.output,
        **{name: (each or 0) if is_known else nan
           for name, each in zip(HIT_COLUMNS, hits, strict=True)},
    }  # fmt: skip


def compare_measured(simulated: "pd.DataFrame", measured: "pd.DataFrame") -> "pd.DataFrame":
    """Compare a simulated run with the log of a real server, and return the simulation errors.

    Each argument is a table with one row per request. The result has one row per metric, such as
    the mean TTFT, with the measured value, the simulated value and the error. The error of the hit
    rate is in percentage points; other errors are in percent. If both tables have equally many
    finished requests, the requests are paired by order of arrival. A last row then gives the median
    TTFT error of the pairs.
    """
    import pandas as pd

    parts = [frame[frame["status"] == "finished"] for frame in (measured, simulated)]
    rows = []
    for name in MEASURES:
        theirs, ours = (MEASURES[name](part) for part in parts)
        error = ours - theirs if name == "hits" else 100 * (ours / theirs - 1) if theirs else nan
        rows.append({"measure": name, "measured": theirs, "simulated": ours, "error": error})
    if len(parts[0]) == len(parts[1]):
        ttft = [
            (part["first_token_ns"] - part["arrival_ns"])[part["arrival_ns"].argsort()].to_numpy()
            for part in (each.reset_index(drop=True) for each in parts)
        ]
        errors = abs(ttft[1] / ttft[0] - 1)
        rows.append({"measure": "ttft of each request", "error": 100 * float(median(errors))})
    return pd.DataFrame(rows)
