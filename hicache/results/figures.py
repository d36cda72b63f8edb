"""The figure of a run, and what figures have in common."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter

from hicache.results.report import QUEUE_COLORS, merged_rows, tier_colors

DPI = 150
SIZE = (5, 6.4)  # inches; a narrow figure stays readable on a phone

literal = rc_context({"text.parse_math": False})  # a name with $ is no formula


@literal
def save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    unwanted = "CreationDate" if path.suffix == ".pdf" else "Software"
    kind = path.suffix[1:] or "png"  # without a format, the file would get another name
    figure.savefig(path, format=kind, dpi=DPI, metadata={unwanted: None})


@literal
def draw_tokens(rows: Sequence[Mapping[str, float]], *, run: str = "") -> Figure:
    """Plot the hit rate of each cache tier over time, and the request queue.

    Long runs have too many time intervals for one plot, so neighboring intervals are merged. The
    plot then shows the longest queue of each merged interval.

    Args:
        rows: measurements of time intervals, in the form of the lines of `metrics.jsonl`.
        run: the name of the run, for the title.
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    figure.suptitle(run, x=0.01, ha="left", fontsize="small", color="#555555")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.set_title("Hit rate over time, by tier", loc="left")
    bottom.set_title("Requests", loc="left")
    merged = merged_rows(rows)
    if not merged:
        top.text(0.02, 0.9, "No interval of tracker.interval_s ended.", transform=top.transAxes)
        return figure
    ends = [row["time_s"] / 60 for row in merged]
    colors = tier_colors("interval", merged[0])
    keys = [f"interval/{name.replace(' ', '_')}_tokens" for name in colors]
    tokens = np.array([[row[key] for row in merged] for key in keys])
    totals = tokens.sum(axis=0)
    # an interval without tokens has no shares, and leaves a gap
    shares = np.divide(tokens, totals, out=np.full(tokens.shape, np.nan), where=totals > 0)
    floor = np.zeros(len(merged))
    for (name, color), share in zip(colors.items(), shares, strict=True):
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
    bottom.yaxis.set_major_formatter(EngFormatter(sep=""))
    top.legend(
        frameon=False, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=5, fontsize="small"
    )
    bottom.legend(frameon=False, loc="upper left", fontsize="small")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E5E5E5", lw=0.8)
        axes.set_axisbelow(True)
    return figure


def label_log_axis(axis: Axis, formatter: EngFormatter | str, *, most: float = 30) -> None:
    """Label powers of 10 and, if the axis spans at most a ratio of `most`, 2 and 5 times these."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1,) if high / low > most else (1, 2, 5)))
    axis.set_major_formatter(formatter)
    axis.set_minor_formatter(NullFormatter())
