"""The phase diagram: which stock arm is the best, and what the figure and the table say of it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from experiments.studies import stop_cells, stop_phase
from experiments.studies.stop_arms import ARMS, OURS, Arm, Row
from experiments.studies.stop_cells import Cell, Tuned
from experiments.studies.windows import Difference, Rung, Windows
from hicache.cli.goodput import Ladder
from hicache.cli.schema import config_of
from hicache.config import ExperimentConfig

BEST_EFFORT, TIMEOUT = ARMS[0], ARMS[4]
TTFT = Difference(ours=0.4, other=0.5, low=-0.2, high=-0.05)
GPU = Difference(ours=0.3, other=0.2, low=0.05, high=0.15)
GOODPUT = Difference(ours=3.3, other=3.0, low=0.1, high=0.7)
IN_TIME = Difference(ours=0.93, other=0.9, low=-0.01, high=0.07)


def cell(tp: int, read_gbps: float) -> Cell:
    name = f"{tp} devices, {read_gbps:g} GB/s"
    rows = [
        Row(
            cell=name,
            arm=arm,
            ttft_s=0.5,
            gpu_s=0.2,
            rho_gpu=1 / tp,
            rho_read=1 / read_gbps,
            is_overloaded=False,
        )
        for arm in ARMS
    ]
    return Cell(
        name=name,
        tuned=Tuned(rows=rows, by_ttft=BEST_EFFORT, by_goodput=TIMEOUT, times={}),
        differences={"ttft_s": TTFT, "gpu_s": GPU, "goodput": GOODPUT, "in_time": IN_TIME},
        overloaded=[],
        bounds=[],
    )


def cells() -> list[Cell]:
    return [cell(tp, gbps) for tp in stop_phase.DEVICES for gbps in stop_phase.READ_GBPS]


def panels(found: list[Cell]) -> list[set[str]]:
    return [{text.get_text() for text in axes.texts} for axes in stop_phase.draw(found).axes]


def test_the_figure_says_in_each_cell_what_ours_is_over_the_arm_that_is_best() -> None:
    assert panels(cells()) == [
        {"0.80\nbest effort"},
        {"1.50\nbest effort"},
        {"≈ 1.10\ntimeout 0 + 0.25"},
    ]


def test_only_what_can_be_told_has_a_colour() -> None:
    ttft, gpu, goodput = (
        np.asarray(axes.images[0].get_array()) for axes in stop_phase.draw(cells()).axes
    )
    assert np.all(ttft > 0)
    assert np.all(gpu < 0)
    assert np.all(goodput == 0)


@pytest.mark.parametrize(
    ("low", "high", "is_told"), [(0.01, 0.05, True), (-0.05, -0.01, False), (-0.01, 0.05, False)]
)
def test_which_goodput_is_higher_is_told_by_who_is_in_time_at_one_rate(
    low: float, high: float, *, is_told: bool
) -> None:
    found = cell(2, 6.0)
    shares = replace(IN_TIME, low=low, high=high)
    assert (
        replace(found, differences={**found.differences, "in_time": shares}).is_told("goodput")
        is is_told
    )


def test_an_overloaded_cell_has_no_latency_and_a_bound_is_called_one() -> None:
    found = [replace(each, overloaded=["marginal"], bounds=["marginal"]) for each in cells()]
    ttft, gpu, goodput = panels(found)
    assert ttft == {"–\nbest effort"}
    assert gpu == {"1.50\nbest effort"}
    assert goodput == {"≈ 1.10 (bound)\ntimeout 0 + 0.25"}
    assert "| 0.5 → 0.4 ! |" in stop_phase.table(found)


def test_the_tuning_tells_how_far_an_arm_is_where_it_is_farthest_and_may_be_read() -> None:
    found = []
    for each, ttft_s in zip(cells()[:3], (0.6, 0.9, 5.0), strict=True):
        rows = [
            row._replace(ttft_s=ttft_s, is_overloaded=ttft_s > 1) for row in each.tuned.rows[1:]
        ]
        found.append(replace(each, tuned=replace(each.tuned, rows=[each.tuned.rows[0], *rows])))
    lines = stop_phase.tuning_table(found).splitlines()
    assert lines[2].endswith("| 0.5 | 0.5 | 0.5 | 1.00 |")
    assert lines[-1].endswith("| 0.6 | 0.9 | 5 ! | 1.80 |")


def test_loads_are_those_of_never_waiting_and_of_waiting_for_all() -> None:
    axes = stop_phase.draw(cells()).axes[0]
    assert axes.get_xticklabels()[0].get_text() == "2\n(0.50)"
    assert axes.get_yticklabels()[-1].get_text() == "8\n(0.12)"


class Fake:
    """Windows in which each arm serves all in time up to a rate of its own, in rates of theirs."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        """`limits` by policy, of timeouts by base."""
        self.limits = limits
        self.own_rate = 10.0

    def replay(self, config: ExperimentConfig, times: float) -> Rung:
        """One session."""
        ones = np.ones(1)
        return Rung(
            served=10 * times * ones,
            in_time=10 * times * ones * (times <= self._limit(config)),
            finished=ones,
            ttft_s=ones,
            gpu_s=ones,
            loads={},
        )

    def bracket(self, config: ExperimentConfig, times: float, first: Rung) -> Ladder:
        """The goodput itself."""
        rate = 10 * self._limit(config)
        return Ladder(
            rates=np.array([rate, 2 * rate]),
            in_time=np.array([[9.0], [0.0]]),
            served=np.array([[10.0], [10.0]]),
        )

    def _limit(self, config: ExperimentConfig) -> float:
        stop = config.prefetch
        name = stop.stop if stop.stop != "timeout" else f"{stop.timeout_base_s:g}"
        return self.limits[name]


@pytest.mark.parametrize(
    ("limits", "best"),
    [
        ({"best_effort": 2.0, "wait_complete": 1.0, "0": 1.5, "0.1": 0.5, "1": 1.9}, BEST_EFFORT),
        ({"best_effort": 0.5, "wait_complete": 0.6, "0": 0.1, "0.1": 2.5, "1": 2.4}, None),
    ],
)
def test_the_best_stock_arm_by_goodput_is_that_of_the_highest(
    limits: dict[str, float], best: Arm | None
) -> None:
    config = config_of("compat=hicache")
    windows = Fake({**limits, OURS: 99.0})
    alone = {arm: windows.replay(arm.applied(config), 1.0) for arm in ARMS}
    arm, times = stop_cells._best_by_goodput(config, cast(Windows, windows), alone)
    assert times == max(limits.values())
    assert arm == best or (best is None and arm.timeout_s is not None and arm.timeout_s[0] == 0.1)


def test_too_few_windows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs 19 windows.*windows=18"):
        stop_phase.carry_out(config_of("experiment=stop_phase", "workload.windows=18"), tmp_path)
