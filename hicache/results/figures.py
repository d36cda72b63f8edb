"""The figures of a run, `tokens.png` and `ttft.png`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

from hicache.clock import SECOND_NS
from hicache.results.metrics import TTFT_PARTS, RequestRecord, Status
from hicache.results.pages import ALARM
from hicache.results.report import PART_COLORS, QUEUE_COLORS, TIER_COLORS, hit_share, merged_rows
from hicache.results.verdict import CLEAN, in_short, objections

DPI = 150
SIZE = (5, 6.4)  # inches; a narrow figure stays readable on a phone
VERDICT_LETTERS = 66  # letters per line of a figure
SECONDS, COUNTS = EngFormatter("s"), EngFormatter(sep="")

literal = rc_context({"text.parse_math": False})  # a name with $ is no formula


def write_figures(
    run_dir: Path, *, title: str, summary: Mapping[str, float], records: Sequence[RequestRecord]
) -> None:
    """Draw the figures of a run into its directory, which must hold `metrics.jsonl`."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    verdict = in_short(objections([summary]))
    save(draw_tokens(rows, run=title, verdict=verdict), run_dir / "tokens.png")
    save(draw_ttft(records, run=title, verdict=verdict), run_dir / "ttft.png")


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
    merged = merged_rows(rows)
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
        c=[hit_share(record) for record in finished],
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
