"""When to stop waiting for storage, over the load of storage and the load of the GPU.

python -m experiments.studies.stop_phase

The same requests on fewer or more devices, after a restart, with storage that is slower or faster:
the loads are those of `best_effort` computing all it can, and of `wait_complete` reading all there
is. In each cell the stock arms (`stop_arms`) are tuned on some windows of the trace, and the best
by TTFT and the best by goodput are held against ours, which is not tuned, on others: a difference
is told where its interval leaves out zero. A goodput of few windows hangs on the busiest of them,
so which one is higher is told by the share in time at the rate that the stock arm just serves:
there both have the same requests. Leaves `stop_phase.png`, `table.md`, `tuning.md`, `cells.json`.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.studies.command import run_study
from experiments.studies.stop_arms import ARMS, Arm
from experiments.studies.stop_cells import Cell, measure, tune
from experiments.studies.windows import Windows
from hicache.config import ExperimentConfig
from hicache.results.report import save
from hicache.results.tracking import write_json

DEVICES = (2, 4, 8)
READ_GBPS = (2.0, 6.0, 18.0)
NUM_TUNING = 3  # windows
NUM_COMPARED = 16  # others, of which every second one is replayed at other rates too
PANELS = {
    "ttft_s": ("mean TTFT, of the arm best by TTFT", -1),
    "gpu_s": ("prefill GPU-seconds, of the arm best by TTFT", -1),
    "goodput": ("goodput, of the arm best by goodput", 1),
}
TUNING = ("cell", "ttft_s", "gpu_s", "rho_gpu", "rho_read", "is_overloaded", "goodput")
SHORT = {"best_effort": "best effort", "wait_complete": "wait", "timeout": "timeout"}


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Measure every cell, draw them, leave the tables and print them.

    Raises:
        ValueError: there are too few windows.
    """
    count = NUM_TUNING + NUM_COMPARED
    if config.workload.windows is None or config.workload.windows < count:
        raise ValueError(
            f"experiments.studies.stop_phase needs {count} windows, {NUM_TUNING} to tune in and "
            f"{NUM_COMPARED} to compare in, got workload.windows={config.workload.windows}"
        )
    places = np.linspace(0, config.workload.windows - 1, count).round().astype(int).tolist()
    for_tuning = places[count // NUM_TUNING // 2 :: count // NUM_TUNING + 1]
    others = [place for place in places if place not in for_tuning]
    tuning, at_its_rate, at_others = (
        Windows(config, numbers) for numbers in (for_tuning, others, others[::2])
    )
    cells = []
    for tp, read_gbps in product(DEVICES, READ_GBPS):
        here = replace(
            config,
            parallel=replace(config.parallel, tp=tp),
            storage=replace(config.storage, read_gbps=read_gbps),
        )
        cells.append(measure(here, at_its_rate, at_others, tune(here, tuning)))
        print(table(cells[-1:]).splitlines()[-1], flush=True)
    save(draw(cells), out_dir / "stop_phase.png")
    (out_dir / "table.md").write_text(table(cells) + "\n")
    (out_dir / "tuning.md").write_text(tuning_table(cells) + "\n")
    write_json(out_dir / "cells.json", {cell.name: described(cell) for cell in cells})
    write_json(out_dir / "summary.json", summary_of(cells))
    print(table(cells), tuning_table(cells), sep="\n\n")


def draw(cells: Sequence[Cell]) -> Figure:
    """A panel a metric; a cell says what ours is over the best stock arm, and which that is."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    grid = np.array(cells, object).reshape(len(DEVICES), len(READ_GBPS))
    for axes, metric in zip(figure.subplots(1, 3), PANELS, strict=True):
        _draw_panel(axes, grid, metric)
    figure.suptitle(
        "marginal ÷ the best other policy of the cell, tuned on other windows: simulated time on "
        "modeled H200s\nblue: marginal is better, red: worse, white and ≈: no clear difference "
        f"({NUM_COMPARED} windows, 95 %); dash: overloaded, no latency claim",
        x=0.01,
        ha="left",
    )
    return figure


def _draw_panel(axes: Axes, grid: NDArray[np.object_], metric: str) -> None:
    title, sign = PANELS[metric]
    shades = np.zeros(grid.shape)
    for (y, x), cell in np.ndenumerate(grid):
        found = cell.differences[metric]
        if cell.is_told(metric):
            shades[y, x] = sign * np.log(found.ours / found.other)
        axes.text(
            x,
            y,
            f"{_ratio(cell, metric)}\n{_short(cell.arm(metric))}",
            ha="center",
            va="center",
            fontsize="small",
            color="white" if abs(shades[y, x]) > 0.6 else "black",
        )
    axes.imshow(shades, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", origin="lower")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xticks(range(len(READ_GBPS)), _loads(READ_GBPS, grid.T, "wait_complete", "rho_read"))
    axes.set_yticks(range(len(DEVICES)), _loads(DEVICES, grid, "best_effort", "rho_gpu"))
    axes.set_xlabel("storage, GB/s (ρ read of waiting for all of it)")
    axes.set_ylabel("devices (ρ GPU of never waiting)")


def _loads(
    values: Sequence[float], lines: NDArray[np.object_], policy: str, metric: str
) -> list[str]:
    """What was varied, each with the load that it makes over the values of the other."""
    labels = []
    for value, cells in zip(values, lines, strict=True):
        rows = [row for cell in cells for row in cell.tuned.rows if row.arm.policy == policy]
        loads = sorted(getattr(row, metric) for row in rows)
        ends = dict.fromkeys(f"{load:.2f}" for load in (loads[0], loads[-1]))
        labels.append(f"{value:g}\n({'–'.join(ends)})")
    return labels


def _short(arm: Arm) -> str:
    return SHORT[arm.policy] if arm.timeout_s is None else str(arm)


def _ratio(cell: Cell, metric: str) -> str:
    """Ours over the best stock arm; `≈` where no difference can be told."""
    if metric == "ttft_s" and cell.overloaded:
        return "–"
    found = cell.differences[metric]
    told = f"{found.ours / found.other:.2f}"
    if metric == "goodput" and cell.bounds:
        told += " (bound)"
    return told if cell.is_told(metric) else f"≈ {told}"


def table(cells: Sequence[Cell]) -> str:
    """Both sides of every cell, as Markdown."""
    lines = [
        "| cell | best by TTFT | TTFT mean, s | prefill GPU-s per request | best by goodput "
        "| goodput, requests/s | in time at the former's |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for cell in cells:
        ttft, gpu, goodput, in_time = (_told(cell, name) for name in (*PANELS, "in_time"))
        lines.append(
            f"| {cell.name} | {cell.tuned.by_ttft} | {ttft} | {gpu} | {cell.tuned.by_goodput} "
            f"| {goodput} | {in_time} |"
        )
    return "\n".join(lines)


def _told(cell: Cell, metric: str) -> str:
    """The stock arm's, ours, and the interval of their difference."""
    found = cell.differences[metric]
    both = f"{found.other:.3g} → {found.ours:.3g}"
    if metric == "ttft_s" and cell.overloaded:
        return f"{both} !"
    return f"{both} [{found.low:+.2g}, {found.high:+.2g}]"


def tuning_table(cells: Sequence[Cell]) -> str:
    """Mean TTFT of every arm in the windows for tuning, as Markdown.

    The last column: how far it is from the best stock arm where it is farthest, of the cells in
    which neither is overloaded.
    """
    lines = [
        f"| TTFT mean, s | {' | '.join(cell.name for cell in cells)} | ÷ the best, at worst |",
        "| --- |" + " ---: |" * (len(cells) + 1),
    ]
    for arm in ARMS:
        texts, apart = [], []
        for cell in cells:
            rows = {row.arm: row for row in cell.tuned.rows}
            own, best = rows[arm], rows[cell.tuned.by_ttft]
            texts.append(f"{own.ttft_s:.3g}{' !' if own.is_overloaded else ''}")
            if not own.is_overloaded and not best.is_overloaded:
                apart.append(own.ttft_s / best.ttft_s)
        lines.append(f"| {arm} | {' | '.join(texts)} | {max(apart, default=np.nan):.2f} |")
    return "\n".join(lines)


def described(cell: Cell) -> dict[str, object]:
    """All that was found in a cell, as plain values."""
    return {
        "overloaded": list(cell.overloaded),
        "bounds": list(cell.bounds),
        "stock": {metric: str(cell.arm(metric)) for metric in PANELS},
        "differences": {metric: asdict(found) for metric, found in cell.differences.items()},
        "tuning_times": {str(arm): times for arm, times in cell.tuned.times.items()},
        "tuning": [
            {"arm": str(row.arm)} | {key: getattr(row, key) for key in TUNING}
            for row in cell.tuned.rows
        ],
    }


def summary_of(cells: Sequence[Cell]) -> dict[str, float]:
    """Ours over the best stock arm of every cell, by every metric."""
    return {
        f"{cell.name}/{metric}_over_stock": found.ours / found.other
        for cell in cells
        for metric, found in cell.differences.items()
    }


if __name__ == "__main__":
    run_study("stop_phase", carry_out)
