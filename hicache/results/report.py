"""The page that a run leaves in its directory.

The page (`report.html.jinja`) shows the verdict, tables, figures and the slowest requests; all
other metrics and the configuration are folded.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hicache.clock import SECOND_NS
from hicache.observe.reasons import REASONS
from hicache.results.jobs import outcome as job_outcome
from hicache.results.metrics import (
    HANDOVER_PARTS,
    PERCENTILES,
    PREFILL_CAUSES,
    QUEUE_CAUSES,
    TTFT_PARTS,
    RequestRecord,
    Status,
)
from hicache.results.pages import SHARE, chart, distribution, series, write_page
from hicache.results.pipeline import outcome as pipeline_outcome
from hicache.results.speculation import outcome as speculation_outcome
from hicache.results.verdict import CLEAN, loads, objections, stage_lines

# Okabe and Ito's palette, which color-blind readers can distinguish
TIER_COLORS = {
    "device hit": "#009E73",
    "host hit": "#56B4E9",
    "storage hit": "#E69F00",
    "peer hit": "#F0E442",
    "computed": "#B8B8B8",
}
PART_COLORS = {
    "queue": "#999999",
    "storage wait": "#E69F00",
    "load-back": "#56B4E9",
    "prefill": "#CC79A7",
    "transfer": "#009E73",
    "restore": "#F0E442",
}
TIMES = dict(zip(("ttft", *TTFT_PARTS, *HANDOVER_PARTS), ("TTFT", *PART_COLORS), strict=True))
QUEUE_COLORS = {"waiting": "#D55E00", "running": "#0072B2"}
# by the share of the prompt that hit, from the first number up to the second
HIT_COLORS = (
    ("hit below 10 %", "#D55E00", 0, 0.1),
    ("10 to 50 %", "#E69F00", 0.1, 0.5),
    ("50 % and more", "#0072B2", 0.5, 1.1),
)
OUTCOMES = (speculation_outcome, pipeline_outcome, job_outcome)  # None without the feature
MAX_BARS = 160  # most intervals drawn; neighbors are merged beyond that
MAX_DOTS = 10_000
NUM_SLOWEST = 10
UNITS = {1: "s", 1000: "ms", 10**6: "µs", 10**9: "ns"}  # by how many make a second
# knobs named at the top of the page; None values are left out
KNOBS = {
    "workload.kind": "workload",
    "workload.path": "trace",
    "workload.limit": "first requests",
    "workload.load": "load",
    "model.name": "model",
    "hardware.name": "hardware",
    "parallel.tp": "devices",
    "parallel.replicas": "replicas",
    "executor.kind": "executor",
    "storage.kind": "storage",
    "cache.host_gib": "host GiB",
    "cache.policy": "cache policy",
    "cache.write_policy": "write policy",
    "prefetch.stop": "prefetch stop policy",
    "seed": "seed",
}


def tier_colors(area: str, counted: Mapping[str, float]) -> dict[str, str]:
    """Return the colors of those tiers of which `counted` has the tokens, as keys of `area`."""
    names = {name: f"{area}/{name.replace(' ', '_')}_tokens" for name in TIER_COLORS}
    return {name: TIER_COLORS[name] for name, key in names.items() if key in counted}


def write_report(
    run_dir: Path,
    *,
    title: str,
    summary: Mapping[str, float],
    rows: Sequence[Mapping[str, float]],
    knobs: Mapping[str, Any],
    records: Sequence[RequestRecord],
) -> Path:
    """Write `report.html` into the directory of a run, and return its path.

    The directory must already hold `config.yaml`. `rows` are those of `metrics.jsonl`; `knobs` has
    the settings by their full names.
    """
    shown = {name: knobs.get(key) for key, name in KNOBS.items()}
    return write_page(
        run_dir / "report.html",
        "report.html.jinja",
        filters={"time": _time, "number": _number},
        title=title,
        found=objections([summary]),
        clean=CLEAN,
        knobs=", ".join(f"{name} {value}" for name, value in shown.items() if value is not None),
        summary=summary,
        load=loads(summary),
        stages=[
            *filter(None, [each(summary) for each in OUTCOMES]),
            *stage_lines(summary),
        ],
        colors=tier_colors("cache", summary),
        times={key: name for key, name in TIMES.items() if f"request/{key}_s_mean" in summary},
        statistics=["mean", *(f"p{percent}" for percent in PERCENTILES)],
        charts=[*_charts_over_time(rows), *_charts_of_requests(records)],
        slowest=list(_slowest(records)),
        reasons=_reasons(summary),
        explaining=_explaining(run_dir),
        metrics=[(key.partition("/")[0], key) for key, value in summary.items() if value],
        config=(run_dir / "config.yaml").read_text(),
    )


def _charts_over_time(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    merged = merged_rows(rows)
    if not merged:
        return []
    x, minutes = {"label": "time in the run, min"}, [row["time_s"] / 60 for row in merged]

    def column(key: str) -> NDArray[np.float64]:
        return np.array([row[key] for row in merged], float)

    colors = tier_colors("interval", merged[0])
    tokens = {name: column(f"interval/{name.replace(' ', '_')}_tokens") for name in colors}
    total = np.sum(list(tokens.values()), axis=0)
    total[total == 0] = np.nan  # an interval without tokens has no shares
    tiers = [series(name, colors[name], minutes, tokens[name] / total) for name in tokens]
    counts = [
        series(name, color, minutes, column(f"queue/{name}_count"))
        for name, color in QUEUE_COLORS.items()
    ]
    return [
        chart("Prompt tokens over time, by tier", x, {"label": "share", **SHARE}, tiers),
        chart("Requests over time", x, {"label": "requests", "whole": True, "from": 0}, counts),
    ]


def _charts_of_requests(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    finished = [record for record in records if record.status is Status.finished]
    if not finished:
        return []
    samples = {
        name: np.array([getattr(record, f"{part}_ns") for record in finished]) / SECOND_NS
        for part, name in TIMES.items()
    }
    ttfts, hits = samples["TTFT"], np.array([_hit_share(record) for record in finished])
    known = {name: values for name, values in samples.items() if values.any()}
    low = ttfts.min() / 100  # shorter parts do not matter
    step = -(-len(finished) // MAX_DOTS)
    lengths = np.array([record.prompt_len for record in finished])
    dots = []
    for name, color, least, most in HIT_COLORS:
        among = np.flatnonzero((hits >= least) & (hits < most))[::step]
        if among.size:
            dots.append(series(name, color, lengths[among], ttfts[among], dots=4))
    x, y = ({"label": label, "log": True} for label in ("prompt tokens", "TTFT, s"))
    colors = {"TTFT": "#222222", **PART_COLORS}
    return [
        distribution("Requests with at most this time", "time, s", known, colors, float(low)),
        chart("TTFT by prompt length" + (f", 1 of {step}" if step > 1 else ""), x, y, dots),
    ]


def _explaining(run_dir: Path) -> str:
    # the command that repeats a run and records why tokens are computed
    file = run_dir / ".hydra" / "overrides.yaml"
    lines = file.read_text().splitlines() if file.is_file() else ["- …"]
    typed = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    # a scalar that YAML quotes is quoted for a shell as well
    told = [each if each.startswith(("'", '"')) else quote(each) for each in typed]
    return " ".join(["hicache run", *told, "engine.explain=true"])


def merged_rows(rows: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    step = -(-len(rows) // MAX_BARS) or 1
    merged = []
    for first in range(0, len(rows), step):
        group = rows[first : first + step]
        row = dict(group[-1])  # gauges as of the last interval's end
        for key in row:
            if key.startswith("interval/") and key.endswith(("_tokens", "_count")):
                row[key] = sum(each[key] for each in group)
        # the longest queue, since readers look for peaks in this figure
        row["queue/waiting_count"] = max(each["queue/waiting_count"] for each in group)
        merged.append(row)
    return merged


def _reasons(summary: Mapping[str, float]) -> list[tuple[str, float, float]]:
    tokens = {text: summary.get(f"computed/{reason}_tokens", 0) for reason, text in REASONS.items()}
    total = sum(tokens.values())
    return [
        (text, count, count / total)
        for text, count in sorted(tokens.items(), key=lambda each: -each[1])
        if count
    ]


def _slowest(records: Sequence[RequestRecord]) -> Iterator[dict[str, Any]]:
    finished = [record for record in records if record.ttft_ns is not None]
    for record in sorted(finished, key=lambda each: (-(each.ttft_ns or 0), each.id))[:NUM_SLOWEST]:
        ttft_ns = record.ttft_ns or 0
        waits = {
            **{f"waiting for {QUEUE_CAUSES[key]}": ns for key, ns in record.queue_for_ns.items()},
            "waiting for its prefetch": record.storage_wait_ns,
            "waiting for load-backs": record.load_back_ns,
            **{PREFILL_CAUSES[cause]: ns for cause, ns in record.prefill_for_ns.items()},
        }
        yield {
            "id": record.id,
            "prompt_len": record.prompt_len,
            "hit_share": _hit_share(record),
            "ttft_s": ttft_ns / SECOND_NS,
            "waits": [
                f"{ns / ttft_ns:.0%} {what.partition(' (')[0]}"  # without the knob's name
                for what, ns in sorted(waits.items(), key=lambda each: -each[1])
                if ns * 10 >= ttft_ns > 0
            ],
        }


def _hit_share(record: RequestRecord) -> float:
    return 1 - record.computed_len / record.prompt_len


def _time(seconds: float) -> str:
    scale, unit = next((each for each in UNITS.items() if seconds * each[0] >= 1), (1, "s"))
    return f"{float(f'{seconds * scale:.3g}'):g} {unit}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
