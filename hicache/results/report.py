"""The figures and the page that a run leaves in its directory.

The page (`report.html.jinja`) shows the verdict, tables, figures and the slowest requests; all
other metrics and the configuration are folded.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

from hicache.clock import SECOND_NS
from hicache.observe.reasons import REASONS
from hicache.results.metrics import (
    PERCENTILES,
    PREFILL_CAUSES,
    QUEUE_CAUSES,
    TTFT_PARTS,
    RequestRecord,
    Status,
)
from hicache.results.pages import ALARM, SHARE, chart, distribution, series, write_page
from hicache.results.speculation import outcome as speculation_outcome
from hicache.results.verdict import CLEAN, in_short, loads, objections, stage_lines

DPI = 150
SIZE = (5, 6.4)  # inches; a narrow figure stays readable on a phone
# Okabe and Ito's palette, which color-blind readers can distinguish
TIER_COLORS = {
    "device hit": "#009E73",
    "host hit": "#56B4E9",
    "storage hit": "#E69F00",
    "computed": "#B8B8B8",
}
PART_COLORS = {
    "queue": "#999999",
    "storage wait": "#E69F00",
    "load-back": "#56B4E9",
    "prefill": "#CC79A7",
}
QUEUE_COLORS = {"waiting": "#D55E00", "running": "#0072B2"}
# by the share of the prompt that hit, from the first number up to the second
HIT_COLORS = (
    ("hit below 10 %", "#D55E00", 0, 0.1),
    ("10 to 50 %", "#E69F00", 0.1, 0.5),
    ("50 % and more", "#0072B2", 0.5, 1.1),
)
VERDICT_LETTERS = 66  # letters per line of a figure
MAX_BARS = 160  # most intervals drawn; neighbors are merged beyond that
MAX_DOTS = 10_000
NUM_SLOWEST = 10
SECONDS, COUNTS = EngFormatter("s"), EngFormatter(sep="")
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


literal = rc_context({"text.parse_math": False})  # a name with $ is no formula


def _value_of(values: Mapping[str, Any], key: str) -> Any:
    group, _, name = key.rpartition(".")
    return (values[group] if group else values).get(name)


def write_report(
    run_dir: Path,
    *,
    title: str,
    summary: Mapping[str, float],
    config: Mapping[str, Any],
    records: Sequence[RequestRecord],
) -> Path:
    """Write the figures and the HTML page of a run into its directory, and return the page's path.

    The files are `tokens.png`, `ttft.png` and `report.html`. The directory must already hold
    `metrics.jsonl` and `config.yaml`. `config` has the settings by group.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = objections([summary])
    paths = run_dir / "tokens.png", run_dir / "ttft.png"
    save(draw_tokens(rows, run=title, verdict=in_short(found)), paths[0])
    save(draw_ttft(records, run=title, verdict=in_short(found)), paths[1])
    knobs = {name: _value_of(config, key) for key, name in KNOBS.items()}
    return write_page(
        run_dir / "report.html",
        "report.html.jinja",
        filters={"time": _time, "number": _number},
        title=title,
        found=found,
        clean=CLEAN,
        knobs=", ".join(f"{name} {value}" for name, value in knobs.items() if value is not None),
        summary=summary,
        load=loads(summary),
        stages=[*filter(None, [speculation_outcome(summary)]), *stage_lines(summary)],
        colors=TIER_COLORS,
        times=dict(zip(("ttft", *TTFT_PARTS), ("TTFT", *PART_COLORS), strict=True)),
        statistics=["mean", *(f"p{percent}" for percent in PERCENTILES)],
        charts=[*_charts_over_time(rows), *_charts_of_requests(records)],
        slowest=list(_slowest(records)),
        reasons=_reasons(summary),
        explaining=_explaining(run_dir),
        metrics=[(key.partition("/")[0], key) for key, value in summary.items() if value],
        config=(run_dir / "config.yaml").read_text(),
    )


@literal
def save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    unwanted = "CreationDate" if path.suffix == ".pdf" else "Software"
    figure.savefig(path, dpi=DPI, metadata={unwanted: None})


@literal
def draw_tokens(rows: Sequence[Mapping[str, float]], *, run: str = "", verdict: str = "") -> Figure:
    """Plot the hit rate of each cache tier over time, and the request queue.

    Long runs have too many time intervals for one plot, so neighboring intervals are merged. The
    plot then shows the longest queue of each merged interval.

    Args:
        rows: measurements of time intervals, in the form of the lines of `metrics.jsonl`.
        run: the name of the run, for the title.
        verdict: reasons to distrust the results, for the title.
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    _name(figure, run, verdict)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.set_title("Hit rate over time, by tier", loc="left")
    bottom.set_title("Requests", loc="left")
    merged = _merge(rows)
    if not merged:
        top.text(0.02, 0.9, "No interval of tracker.interval_s ended.", transform=top.transAxes)
        return figure
    ends = [row["time_s"] / 60 for row in merged]
    keys = [f"interval/{name.replace(' ', '_')}_tokens" for name in TIER_COLORS]
    tokens = np.array([[row[key] for row in merged] for key in keys])
    totals = tokens.sum(axis=0)
    # an interval without tokens has no shares, and leaves a gap
    shares = np.divide(tokens, totals, out=np.full(tokens.shape, np.nan), where=totals > 0)
    floor = np.zeros(len(merged))
    for (name, color), share in zip(TIER_COLORS.items(), shares, strict=True):
        top.stairs(floor + share, [0, *ends], baseline=floor, fill=True, color=color, label=name)
        floor = floor + share
    top.set_ylabel("share of prompt tokens")
    top.set_ylim(0, 1)
    top.yaxis.set_major_formatter(PercentFormatter(1))
    waiting = "waiting" if len(merged) == len(rows) else "waiting (most)"
    for (key, color), name in zip(QUEUE_COLORS.items(), (waiting, "running"), strict=True):
        counts = [row[f"queue/{key}_count"] for row in merged]
        bottom.plot(ends, counts, color=color, label=name, lw=1.2)
    bottom.set_xlabel("time in the run (min)")
    bottom.set_ylim(0, max(1, bottom.get_ylim()[1]))
    bottom.yaxis.set_major_formatter(COUNTS)
    _legend_below(top, columns=4)
    bottom.legend(frameon=False, loc="upper left", fontsize="small")
    _finish(top, bottom)
    return figure


@literal
def draw_ttft(records: Sequence[RequestRecord], *, run: str = "", verdict: str = "") -> Figure:
    figure = Figure(figsize=SIZE, layout="constrained")
    _name(figure, run, verdict)
    top, bottom = figure.subplots(2, 1)
    top.set_title("Share of requests with at most this time", loc="left")
    bottom.set_title("TTFT by prompt length", loc="left")
    finished = [record for record in records if record.status is Status.finished]
    if not finished:
        top.text(0.02, 0.9, "No request finished.", transform=top.transAxes)
        return figure
    ttft_s = np.array([record.ttft_ns for record in finished]) / SECOND_NS
    top.ecdf(ttft_s, color="#222222", lw=2, label="TTFT")
    for part, (name, color) in zip(TTFT_PARTS, PART_COLORS.items(), strict=True):
        values = np.array([getattr(record, f"{part}_ns") for record in finished]) / SECOND_NS
        if values.any():
            top.ecdf(values, color=color, lw=1.2, label=name)
    top.set_xscale("log")
    top.set_xlim(left=ttft_s.min() / 100)  # shorter parts do not matter
    top.set_ylim(0, 1.01)
    top.yaxis.set_major_formatter(PercentFormatter(1))
    label_log_axis(top.xaxis, SECONDS)
    points = bottom.scatter(
        [record.prompt_len for record in finished],
        ttft_s,
        c=[_hit_share(record) for record in finished],
        cmap="viridis",
        vmin=0,
        vmax=1,
        s=6,
        linewidths=0,
    )
    bar = figure.colorbar(points, ax=bottom, label="prompt hit", format=PercentFormatter(1))
    bar.outline.set_visible(False)
    bottom.loglog()
    bottom.set_xlabel("prompt tokens")
    label_log_axis(bottom.xaxis, COUNTS)
    label_log_axis(bottom.yaxis, SECONDS)
    _legend_below(top, columns=3)
    _finish(top, bottom)
    return figure


def _charts_over_time(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    merged = _merge(rows)
    if not merged:
        return []
    x, minutes = {"label": "time in the run, min"}, [row["time_s"] / 60 for row in merged]

    def column(key: str) -> NDArray[np.float64]:
        return np.array([row[key] for row in merged], float)

    tokens = {name: column(f"interval/{name.replace(' ', '_')}_tokens") for name in TIER_COLORS}
    total = np.sum(list(tokens.values()), axis=0)
    total[total == 0] = np.nan  # an interval without tokens has no shares
    tiers = [series(name, TIER_COLORS[name], minutes, tokens[name] / total) for name in tokens]
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
        for part, name in zip(("ttft", *TTFT_PARTS), ("TTFT", *PART_COLORS), strict=True)
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
    told = [each if each[0] in "'\"" else quote(each) for each in typed]
    return " ".join(["hicache run", *told, "engine.explain=true"])


def _merge(rows: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
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


def _name(figure: Figure, run: str, verdict: str) -> None:
    lines = "\n".join(
        filter(None, [run, *wrap(verdict and f"verdict: {verdict}", VERDICT_LETTERS)])
    )
    if lines:
        color = "#555555" if verdict in ("", CLEAN) else ALARM
        figure.suptitle(lines, x=0.01, ha="left", fontsize="small", color=color)


def _finish(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E5E5E5", lw=0.8)
        axes.set_axisbelow(True)


def _legend_below(axes: Axes, columns: int) -> None:
    axes.legend(
        ncols=columns,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(0, -0.12),
        fontsize="small",
        borderaxespad=0,
    )


def label_log_axis(axis: Axis, formatter: EngFormatter | str, *, most: float = 30) -> None:
    """Label powers of 10 and, if the axis spans at most a ratio of `most`, 2 and 5 times these."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1,) if high / low > most else (1, 2, 5)))
    axis.set_major_formatter(formatter)
    axis.set_minor_formatter(NullFormatter())


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
    return SECONDS(float(f"{seconds:.3g}"))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
