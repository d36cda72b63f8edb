"""Stop policies beside each other: which arm counts, and what the tables say."""

from dataclasses import replace

from experiments.studies import stop_arms
from experiments.studies.stop_arms import ARMS, OURS, TIMEOUT, TIMEOUTS, Arm, Row, best_of
from hicache.cli.schema import config_of

CELL = "here"


def row(arm: Arm, ttft_s: float, *, cell: str = CELL, goodput: float | None = None) -> Row:
    """An arm that costs the less GPU time the later it is."""
    return Row(
        cell=cell,
        arm=arm,
        ttft_s=ttft_s,
        gpu_s=1 / ttft_s,
        rho_gpu=0.5,
        rho_read=0.4,
        is_overloaded=False,
        goodput=goodput,
        tried=3.0,
    )


def rows(cell: str = CELL) -> list[Row]:
    """The third timeout is the best of all stock arms."""
    found = [row(arm, 1.0 + 0.1 * place, cell=cell) for place, arm in enumerate(ARMS)]
    found[4] = row(ARMS[4], 0.5, cell=cell, goodput=1.0)
    found[0] = found[0]._replace(goodput=3.0)
    found[-1] = row(Arm(OURS), 0.4, cell=cell, goodput=1.05)
    return found


def test_an_arm_changes_nothing_but_when_to_stop() -> None:
    config = config_of("compat=hicache")
    applied = Arm(TIMEOUT, (0.1, 0.03)).applied(config)
    assert (applied.prefetch.stop, applied.prefetch.timeout_base_s) == (TIMEOUT, 0.1)
    assert replace(applied, prefetch=config.prefetch) == config
    assert Arm(OURS).applied(config) == config


def test_a_timeout_is_the_best_of_its_grid_by_each_metric() -> None:
    assert best_of(rows(), [TIMEOUT], "ttft_s").arm == TIMEOUTS[2]
    assert best_of(rows(), [TIMEOUT], "gpu_s").arm == TIMEOUTS[-1]
    assert best_of(rows(), stop_arms.STOCK, "ttft_s").arm == TIMEOUTS[2]
    assert best_of(rows(), stop_arms.STOCK, "goodput").arm == Arm("best_effort")


def test_tables_print_the_whole_grid_and_tell_a_bound() -> None:
    best, grid = stop_arms.table(rows()), stop_arms.tuning_table(rows())
    assert "| timeout 0 + 0.25 | 0.5 |" in best
    assert "| ≥ 3.00 |" in best
    assert all(str(arm) in grid for arm in TIMEOUTS)


def test_all_arms_of_a_cell_are_run_and_without_rates_no_goodput_is_sought() -> None:
    config = config_of(
        "workload=chat", "workload.num_sessions=4", "workload.start=warm_storage", "compat=hicache"
    )
    found = stop_arms.measure("here", config)
    assert [each.arm for each in found] == list(ARMS)
    assert {each.goodput for each in found} == {None}
    assert len({each.ttft_s for each in found}) > 1


def test_goodput_is_sought_for_each_policy_at_its_best_and_for_the_timeout_as_it_comes() -> None:
    config = config_of(
        *("workload=chat", "workload.num_sessions=4", "workload.start=warm_storage"),
        "goodput.num_rates=2",
    )
    found = [each.arm for each in stop_arms.measure("here", config) if each.goodput is not None]
    assert {each.policy for each in found} == {*stop_arms.STOCK, OURS}
    assert Arm(TIMEOUT, stop_arms.AS_IT_COMES) in found
