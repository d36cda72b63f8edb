"""The estimator of goodput: what it counts, that it is monotone, and what it knows of itself."""

import numpy as np
import pytest

from hicache.config import GoodputConfig
from hicache.results.metrics import RequestRecord, Status
from hicache.runs.goodput import Ladder, climb, crossing, falling, is_in_time, ladder_of, run
from hicache.runs.schema import config_of

WANTED = GoodputConfig(num_rates=6, ttft_s=1.0, tpot_s=0.1)
CHAT = ("workload=chat", "workload.num_sessions=40", "storage=none", "goodput.num_rates=6")


def record(session: int, ttft_s: float, total_s: float = 0.0, output_len: int = 1) -> RequestRecord:
    return RequestRecord(
        id=0,
        session_id=session,
        status=Status.finished,
        arrival_ns=0,
        first_token_ns=int(ttft_s * 1e9),
        finish_ns=int(max(ttft_s, total_s) * 1e9),
        prompt_len=10,
        output_len=output_len,
    )


def ladder(shares: list[float]) -> Ladder:
    """Rates that rise by equal steps, with these shares in time."""
    served = 50.0 * np.arange(1, len(shares) + 1)
    return Ladder(rates=served / 100, in_time=served * np.array(shares), served=served)


@pytest.mark.parametrize(
    ("ttft_s", "total_s", "output_len", "is_met"),
    [(0.9, 1.8, 10, True), (1.1, 1.8, 10, False), (0.9, 1.9, 10, False), (0.5, 0.5, 1, True)],
    ids=["in_time", "late_first_token", "slow_tokens", "one_token"],
)
def test_both_promises_must_be_kept(
    ttft_s: float, total_s: float, output_len: int, *, is_met: bool
) -> None:
    assert is_in_time(record(0, ttft_s, total_s, output_len), WANTED) is is_met


def test_shares_that_rise_are_pooled_by_their_requests() -> None:
    shares = falling(np.array([0.9, 0.5, 0.8, 0.7, 0.2]), np.array([1.0, 3.0, 1.0, 1.0, 9.0]))
    assert shares == pytest.approx([0.9, 0.6, 0.6, 0.6, 0.2])


def test_no_monotone_shares_are_nearer() -> None:
    generator = np.random.default_rng(5)
    shares, weights = generator.random(9), generator.integers(1, 9, 9).astype(float)
    best = falling(shares, weights)
    for _ in range(200):
        other = np.sort(best + generator.normal(0, 0.1, 9))[::-1]
        assert np.sum(weights * (best - shares) ** 2) <= np.sum(weights * (other - shares) ** 2)


@pytest.mark.parametrize(
    ("wanted", "rate"), [(0.95, 2.0), (0.9, 2.5), (0.5, 4.0), (0.3, 4.0), (1.0, 1.0), (1.1, 0.0)]
)
def test_the_crossing_lies_between_the_rates_around_it(wanted: float, rate: float) -> None:
    rates, shares = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 0.95, 0.85, 0.5])
    assert crossing(rates, shares, wanted) == pytest.approx(rate)


def test_more_in_time_at_any_rate_is_no_lower_goodput() -> None:
    generator = np.random.default_rng(3)
    for _ in range(100):
        shares = generator.random(7)
        more = shares.copy()
        more[generator.integers(7)] += 0.2
        assert ladder(more.tolist()).goodput(0.5) >= ladder(shares.tolist()).goodput(0.5)


def test_two_shares_that_keep_the_same_sessions_are_one_rate() -> None:
    few, all_of_them = [record(7, 0.5)], [record(7, 0.5), record(8, 5.0)]
    found = ladder_of([few, few, all_of_them], WANTED, 10.0)
    assert found.rates == pytest.approx([0.1, 0.2])
    assert found.shares() == pytest.approx([1.0, 0.5])


def test_a_rate_above_the_workloads_own_is_reached() -> None:
    found = climb(config_of(*CHAT, "goodput.times=1.5"))
    assert found.rates[-1] > found.rates[-2]


def test_a_harder_promise_allows_no_higher_rate() -> None:
    easy, hard = (
        run(config_of(*CHAT, f"goodput.ttft_s={ttft_s}", "goodput.tpot_s=0.02")).measures
        for ttft_s in (5.0, 0.03)
    )
    key = "goodput/requests_per_s"
    assert hard[key] <= easy[key] <= easy["goodput/tried_requests_per_s"]


def test_requests_that_come_when_others_are_answered_have_no_goodput() -> None:
    with pytest.raises(ValueError, match=r"got workload\.arrivals=closed"):
        climb(config_of(*CHAT, "workload.arrivals=closed"))
