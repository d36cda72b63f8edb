"""The pictures and the page of a run, made from the files it left.

The page shows the summary and the config, and reads `metrics.jsonl` and `config.yaml`.
"""

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from hicache.cache.reasons.table import REASONS
from hicache.config import ExperimentConfig
from hicache.results.metrics import PREFILL_CAUSES, TTFT_PARTS, RequestRecord
from hicache.results.tracking import plain
from hicache.results.verdict import CLEAN, Objection, in_short, loads, objections, stage_lines
from hicache.scheduler.queue_waits import CAUSES

DPI = 120
# Okabe and Ito's palette: told apart by colour-blind readers too
TIER_COLOURS = {
    "device hit": "#009E73",
    "host hit": "#56B4E9",
    "storage hit": "#E69F00",
    "computed": "#B8B8B8",
}
PART_COLOURS = {
    "queue": "#999999",
    "storage wait": "#E69F00",
    "load-back": "#56B4E9",
    "prefill": "#CC79A7",
}
ALARM = "#B00020"
VERDICT_LETTERS = 120  # on a line of a figure
MAX_BARS = 160  # intervals drawn; neighbours are added up beyond that
# units that an axis may have, each with what it is of the plain one
TIMES = ((" s", 1.0), (" ms", 1e-3), (" µs", 1e-6))
COUNTS = (("M", 1e6), ("k", 1e3), ("", 1.0))
# columns of a field that has parts
PARTS: dict[str, Iterable[str]] = {
    "computed_for": REASONS,
    "recomputed_for": REASONS,
    "queue_for_ns": CAUSES,
    "prefill_for_ns": PREFILL_CAUSES,
}
# what stands at the top of the page, where the run's config has it
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
    "cache.eviction": "eviction",
    "cache.host_gib": "host GiB",
    "cache.write_policy": "write policy",
    "prefetch.stop": "prefetch stop policy",
    "seed": "seed",
}


def write_requests(path: Path, records: Sequence[RequestRecord]) -> None:
    """One row a request, one column a field of `RequestRecord`, or a part of one."""
    columns: dict[str, list[Any]] = {}
    for item in fields(RequestRecord):
        values = [getattr(record, item.name) for record in records]
        if item.name not in PARTS:
            columns[item.name] = values
            continue
        for part in PARTS[item.name]:
            columns[f"{item.name}_{part}"] = [value.get(part, 0) for value in values]
    kinds = {"status": pa.string(), "reason": pa.string()}
    schema = pa.schema([(name, kinds.get(name, pa.int64())) for name in columns])
    pq.write_table(pa.table(columns, schema=schema), path)


def write_report(
    run_dir: Path, *, title: str, summary: Mapping[str, float], config: ExperimentConfig
) -> Path:
    """Draw the figures of a run and the page that shows them; return the page."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    tokens_path, ttft_path = run_dir / "tokens.png", run_dir / "ttft.png"
    found = objections([summary])
    save(draw_tokens(rows, run=title, verdict=in_short(found)), tokens_path)
    save(draw_ttft(summary, run=title, verdict=in_short(found)), ttft_path)
    knobs = {name: plain(attrgetter(key)(config)) for key, name in KNOBS.items()}
    page = run_dir / "report.html"
    page.write_text(
        _page(
            title=title,
            summary=summary,
            told=", ".join(f"{name} {value}" for name, value in knobs.items() if value is not None),
            config=(run_dir / "config.yaml").read_text(),
            figures=(tokens_path, ttft_path),
            found=found,
        )
    )
    return page


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or PDF, without the date, so that equal runs give equal bytes."""
    FigureCanvasAgg(figure)
    make_literal(figure)
    unwanted = "CreationDate" if path.suffix == ".pdf" else "Software"
    figure.savefig(path, dpi=DPI, metadata={unwanted: None})


def make_literal(figure: Figure) -> None:
    """Have a figure draw all its text as it stands; a name may look like mathematics."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)


def draw_tokens(rows: Sequence[Mapping[str, float]], *, run: str = "", verdict: str = "") -> Figure:
    """Tokens admitted in each interval, by where they came from; and the queue below.

    Where intervals are drawn together, `waiting` is the longest queue at the end of one of them.
    """
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    _name(figure, run, verdict)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
    merged = _merge(rows)
    if not merged:
        top.set_title("No interval of tracker.interval_s ended in this run", loc="left")
        return figure
    ends = [row["time_s"] / 60 for row in merged]
    edges = [0.0, *ends]
    seconds = np.maximum(np.diff(edges), 1e-9) * 60
    floor = np.zeros(len(merged))
    for name, colour in TIER_COLOURS.items():
        key = f"interval/{name.replace(' ', '_')}_tokens"
        ceiling = floor + np.array([row[key] for row in merged]) / seconds
        top.stairs(ceiling, edges, baseline=floor, fill=True, color=colour, label=name)
        floor = ceiling
    top.set_ylabel("prompt tokens a second")
    top.set_ylim(bottom=0)
    _in_one_unit(COUNTS, top)
    top.set_title("Where prompt tokens came from", loc="left")
    top.legend(ncols=4, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
    waiting = "waiting" if len(merged) == len(rows) else "waiting (most)"
    for key, colour, name in (("waiting", "#D55E00", waiting), ("running", "#0072B2", "running")):
        counts = [row[f"queue/{key}_count"] for row in merged]
        bottom.plot(ends, counts, color=colour, label=name, lw=1.4)
    bottom.set_ylabel("requests")
    bottom.set_xlabel("time in the run (min)")
    bottom.set_ylim(bottom=0)
    bottom.legend(ncols=2, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.95))
    _plain_axes(top, bottom)
    return figure


def draw_ttft(summary: Mapping[str, float], *, run: str = "", verdict: str = "") -> Figure:
    """The mean TTFT by part, and the percentiles of each part beside it.

    Percentiles of parts do not add up to the percentile of the sum, so only the mean is stacked.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    _name(figure, run, verdict)
    left, right = figure.subplots(1, 2, width_ratios=(1, 2.4))
    parts = list(zip(TTFT_PARTS, PART_COLOURS.items(), strict=True))
    low = 0.0
    for key, (name, colour) in parts:
        height = summary[f"request/{key}_s_mean"]
        left.bar(["mean"], [height], bottom=low, color=colour, label=name, width=0.5)
        low += height
    left.set_xlim(-0.75, 0.75)
    groups = ("p50", "p95", "p99")
    series = [("ttft", ("TTFT", "#222222")), *parts]
    width = 0.8 / len(series)
    for index, (key, (name, colour)) in enumerate(series):
        heights = [summary[f"request/{key}_s_{group}"] for group in groups]
        places = [group + (index - (len(series) - 1) / 2) * width for group in range(len(groups))]
        right.bar(places, heights, width * 0.92, color=colour, label=name)
    right.set_xticks(range(len(groups)), groups)
    right.set_title("Percentiles of TTFT and of each part", loc="left")
    right.legend(frameon=False, loc="upper left")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    name, unit = _in_one_unit(TIMES, left, right)
    left.set_title(f"Mean TTFT, {low / unit:.3g}{name}, by part", loc="left")
    left.set_ylabel("time")
    _plain_axes(left, right)
    return figure


def _merge(rows: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    step = -(-len(rows) // MAX_BARS) or 1
    merged = []
    for first in range(0, len(rows), step):
        group = rows[first : first + step]
        row = dict(group[-1])  # gauges as they stood at the end
        for key in row:
            if key.startswith("interval/"):
                row[key] = sum(each[key] for each in group)
        # a queue that came and went between two ends is what such a figure is looked at for
        row["queue/waiting_count"] = max(each["queue/waiting_count"] for each in group)
        merged.append(row)
    return merged


def _name(figure: Figure, run: str, verdict: str) -> None:
    lines = [run, *wrap(verdict and f"verdict: {verdict}", VERDICT_LETTERS)]
    told = "\n".join(filter(None, lines))
    if told:
        colour = "#555555" if verdict in ("", CLEAN) else ALARM
        figure.suptitle(told, x=0.01, ha="left", fontsize="medium", color=colour)


def _in_one_unit(units: Sequence[tuple[str, float]], *all_axes: Axes) -> tuple[str, float]:
    """Write all numbers of the y-axes in the largest unit of which the highest top holds one."""
    top = max(axes.get_ylim()[1] for axes in all_axes)
    name, unit = next((each for each in units if top >= each[1]), units[-1])
    for axes in all_axes:
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: "0" if value == 0 else f"{value / unit:,.6g}{name}")
        )
    return name, unit


def _plain_axes(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", lw=0.8)
        axes.set_axisbelow(True)


def _page(
    *,
    title: str,
    summary: Mapping[str, float],
    told: str,
    config: str,
    figures: Sequence[Path],
    found: Sequence[Objection],
) -> str:
    images = "\n".join(
        f'<img alt="{path.stem}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}">'
        for path in figures
    )
    areas: dict[str, list[str]] = {}
    for key, value in summary.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
        areas.setdefault(key.partition("/")[0], []).append(
            f"<tr><td>{html.escape(key)}</td><td class=number>{shown}</td></tr>"
        )
    ends = ", ".join(
        f"{summary[f'request/{end}_count']:,} {end}" for end in ("finished", "rejected", "aborted")
    )
    colour = ALARM if found else "#222"
    sentences = "".join(f"<li>{html.escape(each.sentence)}</li>" for each in found)
    tables = "\n".join(f"<table>{''.join(lines)}</table>" for lines in areas.values())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }}
img {{ max-width: 100%; display: block; margin: 1.2rem 0; }}
.tables {{ columns: 2 24rem; }}
table {{ border-collapse: collapse; width: 100%; break-inside: avoid; margin-bottom: 1rem;
        font-size: 13px; }}
td {{ padding: 2px 6px; border-bottom: 1px solid #eee; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
pre {{ background: #f6f6f6; padding: 1rem; overflow: auto; font-size: 12px; }}
</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(told)}</p>
<p>{summary["request/count"]:,} requests: {ends}</p>
<p>{"<br>".join(map(html.escape, [f"Load: {loads(summary)}", *stage_lines(summary)]))}</p>
<div style="color: {colour}">Verdict: {"" if found else CLEAN}<ul>{sentences}</ul></div>
{images}
<h2>Summary</h2>
<div class="tables">{tables}</div>
<h2>Configuration</h2>
<pre>{html.escape(config)}</pre>
</body></html>
"""
