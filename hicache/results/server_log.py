"""Measures of a table of requests, from a run or from a server's log.

The columns are those of `requests.parquet`.
"""

import json
from collections.abc import Callable, Mapping
from math import nan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hicache.clock import SECOND_NS, to_ns

if TYPE_CHECKING:
    import pandas as pd

MOST_S, MOST_TOKENS = 1e9, 10**8  # of an arrival or latency, and of a prompt or answer
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


def read_measured(path: Path) -> "pd.DataFrame":
    """Read the log of a real server as a table with one row per request.

    Each line of the log is a JSON object about one request. The keys `arrival`, `ttft` and
    `latency` are in seconds. The keys `prompt` and `output` are in tokens, and so are the optional
    keys `device_hit`, `host_hit` and `storage_hit`; without any of them, the hits of the request
    are unknown (NaN). The table is sorted by arrival.

    Raises:
        ValueError: a line is not a JSON object, lacks a key or contradicts itself, or the log is
            empty.
    """
    import pandas as pd

    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error})") from error
    rows = [_measured(f"{path}, line {each}", text) for each, text in enumerate(lines, start=1)]
    if not rows:
        raise ValueError(f"{path} has no requests")
    return pd.DataFrame(rows).sort_values("arrival_ns", kind="stable", ignore_index=True)


def _measured(where: str, text: str) -> dict[str, str | float]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(line, dict):
        raise ValueError(f"{where}: must be a JSON object, got {type(line).__name__}")
    arrival_s, ttft_s, latency_s = (
        _number(where, line, name, MOST_S) for name in ("arrival", "ttft", "latency")
    )
    if not 0 < ttft_s <= latency_s:
        raise ValueError(
            f"{where}: ttft must be above 0 and at most latency={latency_s:g}, got {ttft_s:g}"
        )
    prompt_len, output_len = (_count(where, line, name, 1) for name in ("prompt", "output"))
    hits = [nan] * len(HITS)
    if any(tier in line for tier in HITS):
        hits = [_count(where, {tier: 0} | line, tier, 0) for tier in HITS]
        if sum(hits) > prompt_len:
            raise ValueError(f"{where}: {sum(hits)} tokens hit of a prompt of {prompt_len}")
    return {
        "status": "finished",
        "arrival_ns": to_ns(arrival_s),
        "first_token_ns": to_ns(arrival_s + ttft_s),
        "finish_ns": to_ns(arrival_s + latency_s),
        "prompt_len": prompt_len,
        "output_len": output_len,
        **dict(zip(HIT_COLUMNS, hits, strict=True)),
    }


def _number(where: str, line: Mapping[str, object], name: str, most: float) -> float:
    value = line.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most:  # type: ignore[operator]
        told = "nothing" if value is None else f"{value!r:.40}"
        raise ValueError(f"{where}: {name} must be a number from 0 to {most:,.0f}, got {told}")
    return float(value)  # type: ignore[arg-type]


def _count(where: str, line: Mapping[str, object], name: str, least: int) -> int:
    value = _number(where, line, name, MOST_TOKENS)
    if value < least or value != int(value):
        raise ValueError(f"{where}: {name} must be an integer of at least {least}, got {value:g}")
    return int(value)


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
