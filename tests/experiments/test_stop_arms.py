"""Stop policies beside each other: which arm counts, what is clear, what tables and figure say."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.launch.schema import config_of
from experiments.studies import stop_arms, stop_phase
from experiments.studies.stop_arms import ARMS, OURS, TIMEOUT, TIMEOUTS, Arm, Row, best_of

CELL = stop_phase.name_of(2, 6.0)


def row(arm: Arm, ttft_s: float, *, cell: str = CELL, goodput: float | None = None) -> Row:
    """Fifty sessions that differ by less than arms do."""
    noise = np.random.default_rng(1).normal(0, 0.05, 50)
    return Row(
        cell=cell,
        arm=arm,
        ttft_s=ttft_s,
        gpu_s=1 / ttft_s,
        rho_gpu=0.5,
        rho_read=0.4,
        is_overloaded=False,
        sessions={each: (2 * (ttft_s + noise[each]), 2) for each in range(50)},
        goodput=None if goodput is None else (goodput, 0.9 * goodput, 1.1 * goodput, 3.0),
    )


def rows(cell: str = CELL) -> list[Row]:
    """The third timeout is the best of all stock arms."""
    found = [row(arm, 1.0 + 0.1 * place, cell=cell) for place, arm in enumerate(ARMS)]
    found[4] = row(ARMS[4], 0.5, cell=cell, goodput=1.0)
    found[0] = found[0]._replace(goodput=(3.0, 2.9, 3.0, 3.0))
    found[-1] = row(Arm(OURS), 0.4, cell=cell, goodput=1.05)
    return found


def test_an_arm_changes_nothing_but_when_to_stop() -> None:
    config = config_of("compat=hicache")
    applied = Arm(TIMEOUT, (0.1, 0.03)).applied(config)
    assert (applied.prefetch.stop, applied.prefetch.timeout_base_s) == (TIMEOUT, 0.1)
    assert replace(applied, prefetch=config.prefetch) == config
    assert Arm(OURS).applied(config) == config


def test_a_timeout_is_the_best_of_its_grid_by_each_metric() -> None:
    assert best_of(rows(), TIMEOUT, "ttft_s").arm == TIMEOUTS[2]
    assert best_of(rows(), TIMEOUT, "gpu_s").arm == TIMEOUTS[-1]
    assert stop_arms.best_stock(rows(), "ttft_s").arm == TIMEOUTS[2]
    assert stop_arms.best_stock(rows(), "goodput").arm == Arm("best_effort")


def test_a_difference_is_clear_if_sessions_drawn_anew_keep_its_sign() -> None:
    ours, stock = rows()[-1], rows()[4]
    assert stop_arms.is_clear(ours, stock, "ttft_s")
    assert not stop_arms.is_clear(ours, ours, "ttft_s")
    mixed = {each: (2.0 * (each % 2), 1) for each in range(50)}
    other = {each: (2.0 * ((each + 1) % 2) + 0.05, 1) for each in range(50)}
    assert not stop_arms.is_clear(
        ours._replace(sessions=mixed), stock._replace(sessions=other), "ttft_s"
    )
    assert not stop_arms.is_clear(ours, stock, "goodput")  # 0.945 to 1.155 and 0.9 to 1.1
    assert stop_arms.is_clear(ours, rows()[0], "goodput")


def test_tables_print_the_whole_grid_and_tell_a_bound() -> None:
    best, grid = stop_arms.table(rows()), stop_arms.tuning_table(rows())
    assert "| timeout 0 + 0.25 | 0.5 |" in best
    assert "| ≥ 3.00 [2.90, 3.00] |" in best
    assert all(str(arm) in grid for arm in TIMEOUTS)


def test_the_figure_says_in_each_cell_what_ours_is_over_the_best_stock_arm() -> None:
    names = [
        stop_phase.name_of(tp, gbps) for tp in stop_phase.DEVICES for gbps in stop_phase.READ_GBPS
    ]
    figure = stop_phase.draw([each for name in names for each in rows(name)])
    told = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert len(told) == 3 * len(names)
    assert {told[0], told[len(names)], told[-1]} == {
        "0.80\ntimeout",
        "0.35\nbest effort",
        "1.25\ntimeout",
    }


def test_all_arms_serve_the_same_requests() -> None:
    config = config_of(
        "workload=chat", "workload.num_sessions=4", "workload.start=warm_storage", "compat=hicache"
    )
    found = stop_arms.measure("here", config)
    assert [each.arm for each in found] == list(ARMS)
    assert len({frozenset(each.sessions) for each in found}) == 1
    assert {each.goodput for each in found} == {None}
    assert pytest.approx(found[0].ttft_s) == sum(
        seconds for seconds, _ in found[0].sessions.values()
    ) / sum(count for _, count in found[0].sessions.values())
