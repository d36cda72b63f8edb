"""When to stop waiting for storage, over the load of storage and the load of the GPU.

python -m experiments.run experiment=stop_phase

The same requests on fewer or more devices, after a restart, with storage that is slower or faster:
the loads are those of `best_effort` computing all it can, and of `wait_complete` reading all there
is. Ours is held against the best stock arm of the cell (`stop_arms`), by three metrics at once.
Leaves the tables of the cells and `stop_phase.png`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.studies.stop_arms import (
    OURS,
    Row,
    best_of,
    best_stock,
    is_bound,
    measure,
    report,
    value_of,
)
from hicache.config import ExperimentConfig
from hicache.results.report import save

DEVICES = (2, 4, 8)
READ_GBPS = (2.0, 6.0, 12.0, 24.0)
PANELS = {
    "ttft_s": ("mean TTFT", -1),
    "goodput": ("goodput", 1),
    "gpu_s": ("prefill GPU-seconds, of the arm best by TTFT", -1),
}
SHORT = {"best_effort": "best effort", "wait_complete": "wait", "timeout": "timeout"}


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Measure every cell, draw them, leave the tables and print them."""
    cells = {
        name_of(tp, read_gbps): replace(
            config,
            parallel=replace(config.parallel, tp=tp),
            storage=replace(config.storage, read_gbps=read_gbps),
        )
        for tp in DEVICES
        for read_gbps in READ_GBPS
    }
    rows = [row for name, each in cells.items() for row in measure(name, each)]
    out_dir.mkdir(parents=True, exist_ok=True)
    save(draw(rows), out_dir / "stop_phase.png")
    report(rows, out_dir)


def name_of(tp: int, read_gbps: float) -> str:
    """A cell."""
    return f"{tp} devices, {read_gbps:g} GB/s"


def draw(rows: Sequence[Row]) -> Figure:
    """A panel a metric; a cell says what ours is over the best stock arm, and which that is."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 3), PANELS, strict=True):
        _draw_panel(axes, rows, metric)
    figure.suptitle(
        "marginal ÷ the best stock arm of the cell, timeout tuned: simulated time on modelled H200s"
        "\nblue: ours is better; !: the best stock arm is overloaded; one window, so no interval",
        x=0.01,
        ha="left",
    )
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Row], metric: str) -> None:
    title, sign = PANELS[metric]
    ratios = np.ones((len(DEVICES), len(READ_GBPS)))
    for y, tp in enumerate(DEVICES):
        for x, read_gbps in enumerate(READ_GBPS):
            here = [row for row in rows if row.cell == name_of(tp, read_gbps)]
            ours = best_of(here, OURS, "ttft_s")
            # the least GPU time is always that of whoever waits for everything
            stock = best_stock(here, "goodput" if metric == "goodput" else "ttft_s")
            below = value_of(stock, metric)
            ratios[y, x] = value_of(ours, metric) / below if below else np.nan
            mark = " !" if stock.is_overloaded else ""
            told = f"{ratios[y, x]:.2f}\n{SHORT[stock.arm.policy]}{mark}"
            if metric == "goodput" and is_bound(ours) and is_bound(stock):
                told = "above all rates\ntried, both"
            axes.text(
                x,
                y,
                told,
                ha="center",
                va="center",
                fontsize="small",
                color="white" if abs(np.log(ratios[y, x])) > 0.6 else "black",
            )
    axes.imshow(sign * np.log(ratios), cmap="RdBu", vmin=-1, vmax=1, aspect="auto", origin="lower")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xticks(range(len(READ_GBPS)), _loads(rows, READ_GBPS, "rho_read"))
    axes.set_yticks(range(len(DEVICES)), _loads(rows, DEVICES, "rho_gpu"))
    axes.set_xlabel("storage, GB/s (ρ read of waiting for all of it)")
    axes.set_ylabel("devices (ρ GPU of never waiting)")


def _loads(rows: Sequence[Row], values: Sequence[float], metric: str) -> list[str]:
    """What was varied, each with the load that it makes on the mean of the other's values."""
    policy = "wait_complete" if metric == "rho_read" else "best_effort"
    labels = []
    for value in values:
        part = f"{value:g} devices," if metric == "rho_gpu" else f" {value:g} GB/s"
        loads = [
            value_of(best_of([row], policy, metric), metric)
            for row in rows
            if row.arm.policy == policy and part in row.cell
        ]
        labels.append(f"{value:g}\n({np.mean(loads):.2f})")
    return labels
