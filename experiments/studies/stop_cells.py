"""One load of storage and GPU: the stock arms tuned there, and the best of them beside ours.

Arms are tuned in some windows of a trace and compared in others, at the trace's own rate and, in
every second window, at rates around their goodput.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.studies.stop_arms import ARMS, OURS, Arm, Row
from experiments.studies.windows import STEP, Difference, Rung, Windows
from hicache.cli.goodput import Ladder
from hicache.config import ExperimentConfig

HALF_NUM_RATES = 2  # above and below the goodput that was found in tuning


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

    `differences` of `ttft_s`, `gpu_s`, `goodput`, and of the share `in_time` at the stock arm's;
    `bounds`: arms that no rate tried was too high for, or all were.
    """

    name: str
    tuned: Tuned
    differences: Mapping[str, Difference]
    overloaded: Sequence[str]
    bounds: Sequence[str]

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


def name_of(config: ExperimentConfig) -> str:
    """A cell, in tables."""
    return f"{config.parallel.tp} devices, {config.storage.read_gbps:g} GB/s"


def tune(config: ExperimentConfig, windows: Windows) -> Tuned:
    """All arms at the trace's rate; then the goodput of the best stock arm and of ours."""
    alone = {arm: windows.replay(arm.applied(config), 1.0) for arm in ARMS}
    rows = [_row(name_of(config), arm, rung, windows) for arm, rung in alone.items()]
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
        raise ValueError(
            "no built-in policy meets goodput.ttft_s and goodput.tpot_s at any rate that was tried"
        )
    return best, times


def measure(
    config: ExperimentConfig, at_its_rate: Windows, at_others: Windows, tuned: Tuned
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
        name=name_of(config),
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
