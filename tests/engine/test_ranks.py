"""Ranks as processes over gloo: equal trees, whatever happens to the storage of one of them."""

from pathlib import Path

import pytest

from hicache.config import STOP_POLICIES, FaultsConfig
from hicache.engine.ranks.processes import groups_of
from tests.engine.rank_program import FAULTS, QUIET, Plan, Report, run_ranks


def check_reports(reports: list[Report], plan: Plan) -> None:
    """What must hold of every run: no failure, equal trees, nothing wrong, nobody left behind."""
    assert [report.failure for report in reports] == [""] * plan.num_ranks
    assert len({report.digests for report in reports}) == 1
    assert len(set(reports[0].digests)) > 1  # the trees did change
    assert {report.num_wrong_pages for report in reports} == {0}
    assert len({tuple(sorted(report.counters.items())) for report in reports}) == 1
    report = reports[0]
    assert report.num_ended == report.num_submitted
    assert report.num_steps >= plan.num_steps


@pytest.fixture(scope="module")
def faulty_plan() -> Plan:
    return Plan(num_ranks=2, num_steps=500, faults=(FAULTS, FAULTS), abort_share=0.05)


@pytest.fixture(scope="module")
def faulty(faulty_plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    return run_ranks(faulty_plan, tmp_path_factory.mktemp("ranks"))


def test_two_ranks_with_faulty_storage_keep_equal_trees_for_500_steps(
    faulty: list[Report], faulty_plan: Plan
) -> None:
    check_reports(faulty, faulty_plan)


def test_the_faults_came_to_pass(faulty: list[Report]) -> None:
    assert all(report.num_injected > 100 for report in faulty)
    counters = faulty[0].counters
    assert counters["prefetch/aborted_count"] > 0
    assert counters["prefetch/not_restorable_pages"] > 0
    assert counters["cache/storage_hit_tokens"] > 0


def test_there_is_one_collective_a_step_and_one_a_query(faulty: list[Report]) -> None:
    report = faulty[0]
    assert report.num_collectives["step"] == report.num_steps
    assert report.num_collectives["query"] == report.counters["prefetch/started_count"]


def test_ranks_of_two_axes_agree_while_one_misses_pages_and_one_is_slow(tmp_path: Path) -> None:
    misses = FaultsConfig(missing_rate=0.3, full_rate=0.3)
    slow = FaultsConfig(delay_ms=2.0, delay_sigma=1.0)
    plan = Plan(
        num_ranks=4,
        num_steps=200,
        faults=(QUIET, misses, slow, QUIET),
        axes=([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        timeout_base_s=0.003,
        abort_share=0.05,
    )
    reports = run_ranks(plan, tmp_path)
    check_reports(reports, plan)
    assert reports[0].num_collectives["step"] == 2 * reports[0].num_steps  # one an axis


def test_a_rank_that_drifts_is_found_by_all_in_the_next_step(tmp_path: Path) -> None:
    plan = Plan(num_ranks=2, num_steps=40, diverges_at=20)
    failures = {report.failure for report in run_ranks(plan, tmp_path)}
    assert failures == {"RanksDivergedError: the ranks' trees differ after step 21"}


def test_an_axis_of_groups_of_one_needs_no_collective() -> None:
    assert groups_of([[[0], [1]], [[0, 1]]]) == [((0, 1),)]


def test_axes_that_part_the_ranks_alike_share_a_group() -> None:
    assert groups_of([[[0, 1], [2, 3]], [[3, 2], [1, 0]]]) == [((0, 1), (2, 3))]


def test_context_and_tensor_groups_are_kept_apart() -> None:
    context, tensor = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    assert groups_of([context, tensor]) == [((0, 2), (1, 3)), ((0, 1), (2, 3))]


def test_one_rank_alone_agrees_with_itself() -> None:
    assert groups_of([[[0]]]) == []


@pytest.mark.soak
@pytest.mark.parametrize("stop", STOP_POLICIES)
def test_four_ranks_with_faulty_storage_keep_equal_trees_for_10_000_steps(
    stop: str, tmp_path: Path
) -> None:
    plan = Plan(
        num_ranks=4, num_steps=10_000, faults=(FAULTS,) * 4, stop=stop, timeout_base_s=0.004
    )
    check_reports(run_ranks(plan, tmp_path, timeout_s=1800), plan)
