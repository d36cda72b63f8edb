"""When to stop waiting for storage, over the load of storage and the load of the GPU.

python -m experiments.run experiment=stop_phase

The same requests on fewer or more devices, after a restart, with storage that is slower or faster:
the loads are those of `best_effort` computing all it can, and of `wait_complete` reading all there
is. In each cell the stock arms (`stop_arms`) are tuned on some windows of the trace, and the best
by TTFT and the best by goodput are held against ours, which is not tuned, on others: a difference
is told where its interval leaves out zero. A goodput of few windows hangs on the busiest of them,
so which one is higher is told by the share in time at the rate that the stock arm just serves:
there both have the same requests. Leaves `stop_phase.png`, `table.md`, `tuning.md`, `cells.json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.studies.goodput import Ladder
from experiments.studies.stop_arms import ARMS, OURS, Arm, Row, value_of
from experiments.studies.windows import STEP, Difference, Rung, Windows
from hicache.config import ExperimentConfig
from hicache.results.report import save
from hicache.results.tracking import write_json

DEVICES = (2, 4, 8)
READ_GBPS = (2.0, 6.0, 18.0)
NUM_TUNING = 3  # windows
NUM_COMPARED = 16  # others, of which every second one is replayed at other rates too
HALF_NUM_RATES = 2  # above and below the goodput that was found in tuning
PANELS = {
    "ttft_s": ("mean TTFT, of the arm best by TTFT", -1),
    "gpu_s": ("prefill GPU-seconds, of the arm best by TTFT", -1),
    "goodput": ("goodput, of the arm best by goodput", 1),
}
SHORT = {"best_effort": "best effort", "wait_complete": "wait", "timeout": "timeout"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """One cell in the windows for tuning: all arms, the best stock ones, and their goodputs.

    `times`: the goodput of the best stock arm and of ours, in rates of the trace.
    """

    rows: Sequence[Row]
    by_ttft: Arm
    by_goodput: Arm
    times: Mapping[Arm, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Ours beside the best stock arms of a cell, in the windows for comparing.

    `differences` by the names of `PANELS`, and of the share `in_time` at the stock arm's goodput;
    `bounds`: arms that no rate tried was too high for, or all were.
    """

    tp: int
    read_gbps: float
    tuned: Tuned
    differences: Mapping[str, Difference]
    overloaded: Sequence[str]
    bounds: Sequence[str]

    @property
    def name(self) -> str:
        """In tables."""
        return name_of(self.tp, self.read_gbps)

    def is_told(self, metric: str) -> bool:
        """Whether ours is better or worse, beyond chance and by a number that may be read."""
        found = self.differences[metric]
        if metric == "ttft_s":
            return found.is_told and not self.overloaded
        if metric == "goodput":
            shares = self.differences["in_time"]
            return shares.is_told and (shares.low > 0) == (found.ours > found.other)
        return found.is_told

    def arm(self, metric: str) -> Arm:
        """The stock arm that ours is held against."""
        return self.tuned.by_goodput if metric == "goodput" else self.tuned.by_ttft


def carry_out(config: ExperimentConfig, out_dir: Path) -> None:
    """Measure every cell, draw them, leave the tables and print them."""
    assert config.workload.windows is not None
    count = NUM_TUNING + NUM_COMPARED
    places = np.linspace(0, config.workload.windows - 1, count).round().astype(int).tolist()
    for_tuning = places[count // NUM_TUNING // 2 :: count // NUM_TUNING + 1]
    others = [place for place in places if place not in for_tuning]
    tuning, at_its_rate, at_others = (
        Windows(config, numbers) for numbers in (for_tuning, others, others[::2])
    )
    cells = []
    for tp in DEVICES:
        for read_gbps in READ_GBPS:
            here = replace(
                config,
                parallel=replace(config.parallel, tp=tp),
                storage=replace(config.storage, read_gbps=read_gbps),
            )
            tuned = tune(here, tuning, name_of(tp, read_gbps))
            cells.append(measure(tp, read_gbps, here, at_its_rate, at_others, tuned))
            print(table(cells[-1:]).splitlines()[-1], flush=True)
    out_dir.mkdir(parents=True, exist_ok=True)
    save(draw(cells), out_dir / "stop_phase.png")
    (out_dir / "table.md").write_text(table(cells) + "\n")
    (out_dir / "tuning.md").write_text(tuning_table(cells) + "\n")
    write_json(out_dir / "cells.json", {cell.name: described(cell) for cell in cells})
    write_json(out_dir / "summary.json", summary_of(cells))
    print(table(cells), tuning_table(cells), sep="\n\n")


def name_of(tp: int, read_gbps: float) -> str:
    """A cell."""
    return f"{tp} devices, {read_gbps:g} GB/s"


def tune(config: ExperimentConfig, windows: Windows, cell: str) -> Tuned:
    """All arms at the trace's rate; then the goodput of the best stock arm and of ours."""
    alone = {arm: windows.replay(arm.applied(config), 1.0) for arm in ARMS}
    rows = [_row(cell, arm, rung, windows) for arm, rung in alone.items()]
    stock = [row for row in rows if row.arm.policy != OURS]
    by_goodput, times = _best_by_goodput(config, windows, alone)
    ours = Arm(OURS)
    ladder = windows.bracket(ours.applied(config), 1.0, alone[ours])
    return Tuned(
        rows=rows,
        by_ttft=min(stock, key=lambda row: row.ttft_s).arm,
        by_goodput=by_goodput,
        times={
            by_goodput: times,
            ours: ladder.goodput(config.goodput.share) / windows.own_rate,
        },
    )


def _best_by_goodput(
    config: ExperimentConfig, windows: Windows, alone: Mapping[Arm, Rung]
) -> tuple[Arm, float]:
    """The best stock arm and its goodput, in rates of the trace.

    An arm that has too few in time at the goodput of the best so far is no better.
    """
    best, times = None, 1.0
    for arm, rung in alone.items():
        if arm.policy == OURS:
            continue
        here, first = arm.applied(config), rung
        if best is not None:
            first = windows.replay(here, times)
            if first.share < config.goodput.share:
                continue
        goodput = windows.bracket(here, times, first).goodput(config.goodput.share)
        if goodput:
            best, times = arm, goodput / windows.own_rate
    if best is None:
        raise ValueError("goodput.ttft_s and .tpot_s: no stock arm keeps them at any rate tried")
    return best, times


def measure(
    tp: int,
    read_gbps: float,
    config: ExperimentConfig,
    at_its_rate: Windows,
    at_others: Windows,
    tuned: Tuned,
) -> Cell:
    """Ours and the best stock arms in windows that they were not tuned on."""
    ours, share = Arm(OURS), config.goodput.share
    alone = {arm: at_its_rate.replay(arm.applied(config), 1.0) for arm in (ours, tuned.by_ttft)}
    ladders = {
        arm: _ladder(arm.applied(config), at_others, times) for arm, times in tuned.times.items()
    }
    first, second = (partial(ladders[arm].goodput, share) for arm in (ours, tuned.by_goodput))
    differences = {"goodput": at_others.difference(first, second)}
    times = second(np.ones(len(at_others.window_of))) / at_others.own_rate
    both = (at_its_rate.replay(arm.applied(config), times) for arm in (ours, tuned.by_goodput))
    differences["in_time"] = at_its_rate.difference(*map(at_its_rate.share_in_time, both))
    for name, metric in (
        ("ttft_s", at_its_rate.mean_ttft_s),
        ("gpu_s", at_its_rate.gpu_s_per_request),
    ):
        differences[name] = at_its_rate.difference(
            metric(alone[ours]), metric(alone[tuned.by_ttft])
        )
    return Cell(
        tp=tp,
        read_gbps=read_gbps,
        tuned=tuned,
        differences=differences,
        overloaded=[str(arm) for arm, rung in alone.items() if rung.is_overloaded],
        bounds=[
            str(arm)
            for arm, ladder in ladders.items()
            if ladder.goodput(share) in (0.0, ladder.rates[-1])
        ],
    )


def _ladder(config: ExperimentConfig, windows: Windows, times: float) -> Ladder:
    """Rates around the goodput that tuning has found."""
    powers = range(-HALF_NUM_RATES, HALF_NUM_RATES + 1)
    return windows.ladder([windows.replay(config, times * STEP**power) for power in powers])


def _row(cell: str, arm: Arm, rung: Rung, windows: Windows) -> Row:
    once = np.ones(len(windows.window_of))
    return Row(
        cell=cell,
        arm=arm,
        ttft_s=windows.mean_ttft_s(rung)(once),
        gpu_s=windows.gpu_s_per_request(rung)(once),
        rho_gpu=rung.loads["load/rho_gpu"],
        rho_read=rung.loads["load/rho_read"],
        is_overloaded=rung.is_overloaded,
    )


def draw(cells: Sequence[Cell]) -> Figure:
    """A panel a metric; a cell says what ours is over the best stock arm, and which that is."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 3), PANELS, strict=True):
        _draw_panel(axes, {cell.name: cell for cell in cells}, metric)
    figure.suptitle(
        "marginal ÷ the best stock arm of the cell, tuned on other windows: simulated time on "
        "modelled H200s\nblue: ours is better, red: worse, white and ≈: no difference can be told "
        f"({NUM_COMPARED} windows, 95 %); dash: overloaded, no latency claim",
        x=0.01,
        ha="left",
    )
    return figure


def _draw_panel(axes: Axes, cells: Mapping[str, Cell], metric: str) -> None:
    title, sign = PANELS[metric]
    shades = np.zeros((len(DEVICES), len(READ_GBPS)))
    for y, tp in enumerate(DEVICES):
        for x, read_gbps in enumerate(READ_GBPS):
            cell = cells[name_of(tp, read_gbps)]
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
    axes.set_xticks(range(len(READ_GBPS)), _loads(cells, "rho_read"))
    axes.set_yticks(range(len(DEVICES)), _loads(cells, "rho_gpu"))
    axes.set_xlabel("storage, GB/s (ρ read of waiting for all of it)")
    axes.set_ylabel("devices (ρ GPU of never waiting)")


def _loads(cells: Mapping[str, Cell], metric: str) -> list[str]:
    """What was varied, each with the load that it makes over the values of the other."""
    if metric == "rho_read":
        names = {f"{gbps:g}": [name_of(tp, gbps) for tp in DEVICES] for gbps in READ_GBPS}
        policy = "wait_complete"
    else:
        names = {f"{tp}": [name_of(tp, gbps) for gbps in READ_GBPS] for tp in DEVICES}
        policy = "best_effort"
    labels = []
    for value, column in names.items():
        loads = [
            value_of(row, metric)
            for name in column
            for row in cells[name].tuned.rows
            if row.arm.policy == policy
        ]
        ends = dict.fromkeys(f"{load:.2f}" for load in (min(loads), max(loads)))
        labels.append(f"{value}\n({'–'.join(ends)})")
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
        "| cell | best by TTFT | TTFT mean, s | prefill GPU-s a request | best by goodput "
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
        "tuning": [row._asdict() | {"arm": str(row.arm)} for row in cell.tuned.rows],
    }


def summary_of(cells: Sequence[Cell]) -> dict[str, float]:
    """Ours over the best stock arm of every cell, by every metric."""
    return {
        f"{cell.name}/{metric}_over_stock": found.ours / found.other
        for cell in cells
        for metric, found in cell.differences.items()
    }
