"""What each copy path buys in TTFT and goodput, regime by regime, and which conclusions it turns.

python -m experiments.run experiment=kernel_to_ttft

Every path (`conf/arm/copy_*.yaml`) serves every regime with three seeds, and with the first one so
many sessions at once as it can serve in time (`max_rate`): its goodput. Leaves `rows.csv` with all
runs, `table.md` and `kernel_to_ttft.png`. A conclusion is asked of each path by itself: does the
host tier pay, and which page size is best? Where the answers differ, the path decides.
"""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.launch import schema
from experiments.studies.max_rate import Objective, max_rate
from experiments.tables.sweep_figure import COLOURS
from hicache import experiment
from hicache.config import ExperimentConfig
from hicache.executor.simulated.links import CopyPath, pcie_rate
from hicache.results.metrics import summarize
from hicache.results.tracking import write_json

NUM_SEEDS = 3
PATHS = {
    "copy_memcpy": "batched memcpy",
    "copy_triton12": "Triton, 12 SMs",
    "copy_sglang": "SGLang's registers or TMA",
    "copy_sglang_unified": "SGLang's page-unified",
    "copy_ours": "ours",
    "copy_ours_35": "ours, link of 35 GB/s",
}
NO_HOST = "no host tier"
CONVERSATION = ("workload=mooncake_conversation", "parallel.tp=4")
AGENTS = ("workload=agents", "cache.device_gib=24")
TOLERANCE = 0.05  # of the share of sessions that are served in time


class Regime(NamedTuple):
    """A workload on pools and devices, and what is promised to its requests."""

    name: str
    overrides: tuple[str, ...]
    objective: Objective
    crowd: int = 1  # times as many sessions, as much denser, are more than can be served in time


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


SLOW = Objective(ttft_s=2.0, tpot_s=0.05, share=0.9)
QUICK = Objective(ttft_s=0.2, tpot_s=0.02, share=0.9)
DISTURBED = "hardware.copy_slowdown.value=2.8"
REGIMES = (
    Regime("conversation, pages of 64", (*CONVERSATION, "cache.page_size=64"), SLOW),
    Regime("conversation, pages of 16", (*CONVERSATION, "cache.page_size=16"), SLOW),
    Regime(
        "conversation, pages of 64, steps beside copies 2.8×",
        (*CONVERSATION, "cache.page_size=64", DISTURBED),
        SLOW,
    ),
    Regime("agents, pages of 64", (*AGENTS, "parallel.tp=4", "cache.page_size=64"), QUICK, 4),
    Regime("agents, pages of 16", (*AGENTS, "parallel.tp=4", "cache.page_size=16"), QUICK, 4),
    Regime(
        "agents, pages of 16 in slices of 8 ranks",
        (*AGENTS, "parallel.tp=8", "cache.page_size=16"),
        QUICK,
        8,
    ),
    Regime("agents, token pages", (*AGENTS, "parallel.tp=4", "cache.page_size=1"), QUICK, 4),
    Regime(
        "agents, pages of 16, steps beside copies 2.8×",
        (*AGENTS, "parallel.tp=4", "cache.page_size=16", DISTURBED),
        QUICK,
        4,
    ),
)
# the same workload and devices in pages of three sizes: which is best?
PAGE_SIZES = ("agents, pages of 64", "agents, pages of 16", "agents, token pages")


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Run all, write the table and the figure, print the table."""
    jobs = [
        (regime, path, seed, seed == config.seed)
        for regime in REGIMES
        for path in (*PATHS, NO_HOST)
        for seed in range(config.seed, config.seed + NUM_SEEDS)
    ]
    # the longest first
    jobs.sort(key=lambda job: (not job[3], -job[0].crowd, job[0].name != "agents, token pages"))
    num_jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    shared = _shared(config)
    with ProcessPoolExecutor(min(num_jobs, len(jobs)), mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(partial(_measure, shared), jobs))
    names = [regime.name for regime in REGIMES]
    rows.sort(key=lambda row: (names.index(row.regime), row.seed))
    out_dir.mkdir(parents=True, exist_ok=True)
    with (out_dir / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([Row._fields, *rows])
    text = table(rows) + "\n\n" + "\n".join(f"- {line}" for line in conclusions(rows)) + "\n"
    (out_dir / "table.md").write_text(text)
    write_json(out_dir / "summary.json", summary_of(rows))
    draw(rows).savefig(out_dir / "kernel_to_ttft.png", dpi=150)
    print(text)


def measure(
    shared: Sequence[str], regime: Regime, path: str, seed: int, *, seeks_goodput: bool
) -> Row:
    """One run, in any process, and a search for the highest rate if it `seeks_goodput`."""
    arm = "cache.host_gib=0" if path == NO_HOST else f"arm={path}"
    # what a regime says comes after what a path says: hydra takes overrides by group, then by value
    config = composed([*shared, arm, *regime.overrides, f"seed={seed}"])
    result = experiment.run(config)
    summary = summarize(result.records, result.measures)
    tp = config.parallel.tp or config.model.default_tp
    piece = config.model.full_layer_token_bytes * config.cache.page_size // tp
    goodput_per_s, goodput_share = _goodput(config, regime) if seeks_goodput else (None, None)
    return Row(
        regime=regime.name,
        path=path,
        seed=seed,
        status="" if path == NO_HOST else _status(config, piece),
        piece_bytes=piece,
        rate_gbps=_rate_gbps(config, piece),
        ttft_s=summary["request/ttft_s_mean"],
        ttft_p95_s=summary["request/ttft_s_p95"],
        load_back_s=summary["request/load_back_s_mean"],
        tpot_s=summary["request/tpot_s_mean"],
        goodput_per_s=goodput_per_s,
        goodput_share=goodput_share,
        gpu_s=summary["gpu/seconds_per_request"],
        rho=summary["load/rho_gpu"],
        host_hit_tokens=int(summary["cache/host_hit_tokens"]),
        load_back_bytes=int(summary["transfer/load_back_bytes"]),
    )


def _measure(shared: Sequence[str], job: tuple[Regime, str, int, bool]) -> Row:
    regime, path, seed, seeks_goodput = job
    return measure(shared, regime, path, seed, seeks_goodput=seeks_goodput)


def _goodput(config: ExperimentConfig, regime: Regime) -> tuple[float, float]:
    """The highest rate that the regime's crowd may come at, and the share of it that comes so."""
    crowd = replace(
        config.workload,
        num_sessions=regime.crowd * config.workload.num_sessions,
        session_rate=regime.crowd * config.workload.session_rate,
    )
    return max_rate(replace(config, workload=crowd), regime.objective, tolerance=TOLERANCE)


def composed(overrides: Sequence[str]) -> ExperimentConfig:
    """The config that a command line with these overrides would have."""
    schema.register()
    ready = GlobalHydra.instance().is_initialized()  # inside `experiments.run` it is
    with nullcontext() if ready else initialize_config_dir(str(schema.CONF), version_base="1.3"):
        return schema.to_config(compose("config", list(overrides)))


def _shared(config: ExperimentConfig) -> list[str]:
    """What all runs take over from the experiment's own config."""
    shared = ["storage=none", f"model={config.model.name}", f"hardware={config.hardware.name}"]
    if config.data_dir is not None:
        shared.append(f"data_dir={config.data_dir}")
    if config.workload.limit is not None:
        shared.append(f"workload.limit={config.workload.limit}")
    return [*shared, f"workload.num_sessions={config.workload.num_sessions}"]


def _status(config: ExperimentConfig, piece_bytes: int) -> str:
    curve = config.hardware.kernel_to_device
    # below its first point a curve has the same time a piece
    is_beyond = curve.status == "measured" and piece_bytes < curve.size[0]
    return f"{curve.status}, extrapolated" if is_beyond else curve.status


def _rate_gbps(config: ExperimentConfig, piece_bytes: int) -> float:
    return pcie_rate(config.hardware, piece_bytes, CopyPath(config.executor.copy_path)) / 1e9


def spread(rows: Iterable[Row], field: str) -> tuple[float, float, float]:
    """Median, lowest and highest of a field over the seeds that have it."""
    values = [value for row in rows if (value := getattr(row, field)) is not None]
    return median(values), min(values), max(values)


def of(rows: Iterable[Row], regime: str, path: str) -> list[Row]:
    """The runs of a path in a regime, by seed."""
    return [row for row in rows if row.regime == regime and row.path == path]


def gains(rows: Sequence[Row], regime: str, path: str, over: str) -> tuple[float, float, float]:
    """Mean TTFT of `over` ÷ that of `path`, seed by seed: median, lowest, highest."""
    pairs = zip(of(rows, regime, over), of(rows, regime, path), strict=True)
    ratios = [mine.ttft_s / other.ttft_s for mine, other in pairs]
    return median(ratios), min(ratios), max(ratios)


def table(rows: Sequence[Row]) -> str:
    """A row a regime and path, in Markdown: medians over the seeds, lowest and highest after."""
    lines = [
        "| regime | path | curve | pieces | GB/s a device | TTFT mean, ms | … its load-back | "
        "TTFT p95, ms | TPOT, ms | goodput, requests/s | no host tier ÷ this |",
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
                ("≥ " if first.goodput_share == 1 else "")
                + _told(spread(these, "goodput_per_s"), 1),
                _told(gains(rows, regime, path, NO_HOST), 1),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
            name = path.replace(" ", "_")
            summary[f"regime_{number}/{name}_ttft_s_mean"] = spread(
                of(rows, regime, path), "ttft_s"
            )[0]
        ratios = [gains(rows, regime, "copy_ours", path)[0] for path in PATHS]
        summary[f"regime_{number}/slowest_over_ours"] = max(ratios)
    return summary


def draw(rows: Sequence[Row]) -> Figure:
    """TTFT above, goodput below; a group a regime, a bar a path, whiskers over seeds."""
    regimes = list(dict.fromkeys(row.regime for row in rows))
    figure = Figure(figsize=(1.9 * len(regimes) + 2, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    statuses = {row.path: row.status.partition(",")[0] for row in rows}
    for axes, field, factor in ((above, "ttft_s", 1e3), (below, "goodput_per_s", 1)):
        for number, path in enumerate(PATHS):
            _draw_bars(axes, rows, regimes, path, number, field, factor, statuses[path])
        for place, regime in enumerate(regimes):
            height = spread(of(rows, regime, NO_HOST), field)[0] * factor
            label = NO_HOST if place == 0 else None
            axes.hlines(height, place - 0.45, place + 0.45, color="black", lw=1.5, label=label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yscale("symlog", linthresh=0.01)  # there may be no rate at all
        axes.yaxis.set_major_formatter("{x:g}")
    above.set_ylabel("mean TTFT, ms")
    below.set_ylabel("goodput, requests a second")
    names = [regime.replace(", ", ",\n") for regime in regimes]
    below.set_xticks(range(len(regimes)), names, fontsize="small")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.suptitle(
        "What the copy path buys: simulated time on modelled H200s, medians and range of "
        f"{NUM_SEEDS} seeds, goodput of the first\nhatched: the path's curve is modelled; pieces "
        "below the smallest that was measured take as long as that one",
        x=0.01,
        ha="left",
    )
    return figure


def _draw_bars(
    axes: Axes,
    rows: Sequence[Row],
    regimes: Sequence[str],
    path: str,
    number: int,
    field: str,
    factor: float,
    status: str,
) -> None:
    spreads = np.array([spread(of(rows, regime, path), field) for regime in regimes]) * factor
    places = np.arange(len(regimes)) + (number - (len(PATHS) - 1) / 2) * 0.14
    axes.bar(
        places,
        spreads[:, 0],
        width=0.13,
        yerr=[spreads[:, 0] - spreads[:, 1], spreads[:, 2] - spreads[:, 0]],
        error_kw={"lw": 0.8},
        color=COLOURS[number],
        hatch="//" if status == "modelled" else None,
        edgecolor="white",
        label=f"{PATHS[path]} ({status})",
    )


def _told(values: tuple[float, float, float], factor: float) -> str:
    middle, low, high = (_number(value * factor) for value in values)
    return middle if low == high else f"{middle} ({low}–{high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _verdict(gain: tuple[float, float, float]) -> str:
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
