"""The study of copy paths, told: its rows, their table, the conclusions they allow, a figure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from hicache.cli.tables.groups import Spread
from hicache.cli.tables.sweep_figure import COLOURS
from hicache.results.verdict import CLEAN

PATHS = {
    "copy_memcpy": "batched memcpy",
    "copy_triton12": "Triton, 12 SMs",
    "copy_sglang": "SGLang's registers or TMA",
    "copy_sglang_unified": "SGLang's page-unified",
    "copy_ours": "ours",
    "copy_ours_35": "ours, link of 35 GB/s",
}
NO_HOST = "no host tier"
# the same workload and devices in pages of three sizes: which is best?
PAGE_SIZES = ("agents, pages of 64", "agents, pages of 16", "agents, token pages")


class Row(NamedTuple):
    """One run. `path` is a key of PATHS, or NO_HOST."""

    regime: str
    path: str
    seed: int
    status: str  # of the curve at these pieces: measured, modelled or measured, extrapolated
    piece_bytes: int
    rate_gbps: float  # to one device, in such pieces
    ttft_s: float
    ttft_p95_s: float
    load_back_s: float
    tpot_s: float
    goodput_per_s: float | None  # highest rate at which the promise is kept; of the first seed
    goodput_share: float | None  # of the crowd; 1: all of it was served in time
    gpu_s: float  # of a request
    rho: float
    host_hit_tokens: int
    load_back_bytes: int
    verdict: str  # the conditions that speak against this run


def spread(rows: Iterable[Row], field: str) -> Spread:
    """Median, lowest and highest of a field over the seeds that have it."""
    values = [value for row in rows if (value := getattr(row, field)) is not None]
    return Spread.of(values)


def of(rows: Iterable[Row], regime: str, path: str) -> list[Row]:
    """The runs of a path in a regime, by seed."""
    return [row for row in rows if row.regime == regime and row.path == path]


def gains(rows: Sequence[Row], regime: str, path: str, over: str) -> Spread:
    """Mean TTFT of `over` ÷ that of `path`, seed by seed: median, lowest, highest."""
    pairs = zip(of(rows, regime, over), of(rows, regime, path), strict=True)
    return Spread.of([mine.ttft_s / other.ttft_s for mine, other in pairs])


def table(rows: Sequence[Row]) -> str:
    """A row a regime and path, in Markdown: medians over the seeds, lowest and highest after."""
    lines = [
        "| regime | path | curve | pieces | GB/s a device | TTFT mean, ms | … its load-back | "
        "TTFT p95, ms | TPOT, ms | goodput, requests/s (of the crowd) | no host tier ÷ this |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for regime in dict.fromkeys(row.regime for row in rows):
        for path in (*PATHS, NO_HOST):
            these = of(rows, regime, path)
            first = these[0]
            cells = [regime, PATHS.get(path, path), first.status or "–"]
            if path == NO_HOST:
                cells += ["–", "–"]
            else:
                cells += [f"{first.piece_bytes / 1024:g} KiB", f"{first.rate_gbps:.1f}"]
            cells += [
                _told(spread(these, "ttft_s"), 1e3),
                f"{spread(these, 'load_back_s')[0] * 1e3:.1f}",
                _told(spread(these, "ttft_p95_s"), 1e3),
                f"{spread(these, 'tpot_s')[0] * 1e3:.2f}",
                _goodput(first),
                _told(gains(rows, regime, path, NO_HOST), 1),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict_on(rows: Sequence[Row]) -> str:
    """What speaks against these runs, and against how many of them."""
    counts = Counter(name for row in rows for name in row.verdict.split(", ") if name)
    told = "; ".join(f"{name} ({count} of {len(rows)} runs)" for name, count in counts.items())
    return f"verdict: {told or CLEAN}"


def conclusions(rows: Sequence[Row]) -> list[str]:
    """What each path alone would make one believe, and whether they agree."""
    told = []
    for regime in dict.fromkeys(row.regime for row in rows):
        verdicts = {path: _verdict(gains(rows, regime, path, NO_HOST)) for path in PATHS}
        told.append(f"{regime}: a host tier {_answers(verdicts)}")
    if all(of(rows, regime, "copy_ours") for regime in PAGE_SIZES):
        best = {}
        for path in PATHS:
            means = {name: spread(of(rows, name, path), "ttft_s")[0] for name in PAGE_SIZES}
            least = min(means.values())
            near = [name for name in PAGE_SIZES if means[name] <= 1.05 * least]
            best[path] = "have their lowest TTFT with " + " or ".join(
                name.removeprefix("agents, ") for name in near
            )
        told.append(f"page size (within 5 %): agents {_answers(best)}")
    return told


def summary_of(rows: Sequence[Row]) -> dict[str, float]:
    """Flat keys: medians of mean TTFT, and the ratio of the slowest path to ours."""
    summary: dict[str, float] = {}
    for number, regime in enumerate(dict.fromkeys(row.regime for row in rows)):
        for path in (*PATHS, NO_HOST):
            middle, _, _ = spread(of(rows, regime, path), "ttft_s")
            summary[f"regime_{number}/{path.replace(' ', '_')}_ttft_s_mean"] = middle
        ratios = [gains(rows, regime, "copy_ours", path)[0] for path in PATHS]
        summary[f"regime_{number}/slowest_over_ours"] = max(ratios)
    return summary


def draw(rows: Sequence[Row]) -> Figure:
    """TTFT above, goodput below; a group a regime, a bar a path, whiskers over seeds."""
    regimes = list(dict.fromkeys(row.regime for row in rows))
    figure = Figure(figsize=(1.9 * len(regimes) + 2, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    statuses = {row.path: row.status.partition(",")[0] for row in rows}
    num_seeds = len({row.seed for row in rows})
    for axes, field, factor in ((above, "ttft_s", 1e3), (below, "goodput_per_s", 1)):
        for number, path in enumerate(PATHS):
            told = [spread(of(rows, regime, path), field) for regime in regimes]
            middles, lows, highs = factor * np.array(told).T
            axes.bar(
                np.arange(len(regimes)) + (number - (len(PATHS) - 1) / 2) * 0.14,
                middles,
                width=0.13,
                yerr=[middles - lows, highs - middles],
                error_kw={"lw": 0.8},
                color=COLOURS[number],
                hatch="//" if statuses[path] == "modelled" else None,
                edgecolor="white",
                label=f"{PATHS[path]} ({statuses[path]})",
            )
        for place, regime in enumerate(regimes):
            height = spread(of(rows, regime, NO_HOST), field)[0] * factor
            label = NO_HOST if place == 0 else None
            axes.hlines(height, place - 0.45, place + 0.45, color="black", lw=1.5, label=label)
        axes.spines[["top", "right"]].set_visible(False)
    above.set_yscale("log")
    below.set_yscale("symlog", linthresh=0.1)  # there may be no rate at all
    for axes in (above, below):
        axes.yaxis.set_major_formatter("{x:g}")
    above.set_ylabel("mean TTFT, ms")
    below.set_ylabel("goodput, requests a second")
    names = [regime.replace(", ", ",\n") for regime in regimes]
    below.set_xticks(range(len(regimes)), names, fontsize="small")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.suptitle(
        "Effect of the copy path: simulated time on modeled H200s, median and range over "
        f"{num_seeds} seeds, goodput of the first\nhatched: the rates of the path are modeled; "
        f"pieces smaller than the smallest measured one take as long as it\n{verdict_on(rows)}",
        x=0.01,
        ha="left",
    )
    return figure


def _goodput(row: Row) -> str:
    """A rate, and the share of the crowd that came at it; a bound, if all of it did."""
    assert row.goodput_per_s is not None, "only the first seed has it"
    assert row.goodput_share is not None
    bound = "≥ " if row.goodput_share == 1 else ""
    return f"{bound}{_number(row.goodput_per_s)} ({row.goodput_share:.0%})"


def _told(values: Spread, factor: float) -> str:
    middle, low, high = (_number(value * factor) for value in values)
    return middle if low == high else f"{middle} ({low}–{high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _verdict(gain: Spread) -> str:
    _, low, high = gain
    if low > 1.05:
        return "pays"
    return "costs more than it brings" if high < 0.95 else "makes no clear difference"


def _answers(verdicts: Mapping[str, str]) -> str:
    """One answer if all agree, else who says what."""
    by_verdict: dict[str, list[str]] = {}
    for path, verdict in verdicts.items():
        by_verdict.setdefault(verdict, []).append(PATHS[path])
    if len(by_verdict) == 1:
        return f"{next(iter(by_verdict))}, whatever the path"
    parts = [f"{verdict} with {', '.join(paths)}" for verdict, paths in by_verdict.items()]
    return "; ".join(parts) + ": THE PATH DECIDES"
