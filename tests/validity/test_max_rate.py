"""The bisection for the highest rate, and what it counts."""

import pytest

from experiments.max_rate import Objective, bisect, max_rate
from hicache.metrics import RequestRecord, Status
from tests.composed import composed

PROMISE = Objective(ttft_s=1.0, tpot_s=0.1, share=0.9)


def record(ttft_s: float, total_s: float, output_len: int) -> RequestRecord:
    return RequestRecord(
        id=0,
        session_id=0,
        status=Status.finished,
        arrival_ns=0,
        first_token_ns=int(ttft_s * 1e9),
        finish_ns=int(total_s * 1e9),
        prompt_len=10,
        output_len=output_len,
    )


@pytest.mark.parametrize("limit", [0.0, 0.013, 0.4, 0.77, 1.0])
def test_bisection_finds_where_the_objective_stops_to_hold(limit: float) -> None:
    found = bisect(lambda share: share <= limit, tolerance=0.005)

    assert limit - 0.005 <= found <= limit


@pytest.mark.parametrize(
    ("ttft_s", "total_s", "output_len", "is_met"),
    [(0.9, 1.8, 10, True), (1.1, 1.8, 10, False), (0.9, 1.9, 10, False), (0.5, 0.5, 1, True)],
    ids=["in_time", "late_first_token", "slow_tokens", "one_token"],
)
def test_both_promises_must_be_kept(
    ttft_s: float, total_s: float, output_len: int, *, is_met: bool
) -> None:
    assert PROMISE.is_met_by(record(ttft_s, total_s, output_len)) is is_met


def test_a_harder_promise_allows_no_higher_rate() -> None:
    config = composed("workload=chat", "workload.num_sessions=40", "storage=none")
    easy = Objective(ttft_s=5.0, tpot_s=1.0, share=0.9)
    hard = Objective(ttft_s=0.03, tpot_s=0.02, share=0.9)

    rates = [max_rate(config, each, tolerance=0.1)[0] for each in (hard, easy)]

    assert rates[0] <= rates[1]
    assert rates[1] > 0
