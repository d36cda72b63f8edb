"""The estimator of goodput: requests in time, falling shares, and the rate of a wanted share."""

from types import SimpleNamespace

import numpy as np
import pytest

from hicache import experiment
from hicache.config import GoodputConfig
from hicache.results.metrics import RequestRecord, Status
from hicache.runs.goodput import (
    Ladder,
    climb,
    crossing,
    falling,
    in_time_of,
    is_in_time,
    ladder_of,
    run,
    span_s,
)
from hicache.runs.schema import config_of

WANTED = GoodputConfig(num_rates=6, ttft_s=1.0, tpot_s=0.1)
CHAT = ("workload=chat", "workload.num_sessions=40", "storage=none", "goodput.num_rates=6")


def record(session, ttft_s, total_s=0.0, output_len=1):
    times = {"first_token_ns": ttft_s, "finish_ns": max(ttft_s, total_s)}
    return RequestRecord(
        id=0,
        session_id=session,
        status=Status.finished,
        arrival_ns=0,
        prompt_len=10,
        output_len=output_len,
        **{name: int(time_s * 1e9) for name, time_s in times.items()},
    )


def ladder(shares):
    """Return a Ladder of equally spaced rates in requests/s, with `shares` of requests in time."""
    served = 50.0 * np.arange(1, len(shares) + 1)
    return Ladder(rates=served / 100, in_time=served * shares, served=served)


@pytest.mark.parametrize(
    ("ttft_s", "total_s", "output_len", "is_met"),
    [(0.9, 1.8, 10, True), (1.1, 1.8, 10, False), (0.9, 1.9, 10, False), (0.5, 0.5, 1, True)],
)
def test_a_request_in_time_meets_the_limits_of_ttft_and_tpot(ttft_s, total_s, output_len, is_met):
    assert is_in_time(record(0, ttft_s, total_s, output_len), WANTED) is is_met


def test_shares_in_time_are_replaced_by_the_nearest_falling_sequence():
    shares = falling(np.array([0.9, 0.5, 0.8, 0.7, 0.2]), np.array([1.0, 3.0, 1.0, 1.0, 9.0]))
    assert shares == pytest.approx([0.9, 0.6, 0.6, 0.6, 0.2])
    generator = np.random.default_rng(5)
    shares, weights = generator.random(9), generator.integers(1, 9, 9).astype(float)
    best = falling(shares, weights)
    for _ in range(200):
        other = np.sort(best + generator.normal(0, 0.1, 9))[::-1]
        assert np.sum(weights * (best - shares) ** 2) <= np.sum(weights * (other - shares) ** 2)


@pytest.mark.parametrize(
    ("wanted", "rate"), [(0.95, 2.0), (0.9, 2.5), (0.5, 4.0), (0.3, 4.0), (1.0, 1.0), (1.1, 0.0)]
)
def test_the_rate_of_a_wanted_share_is_interpolated_between_rates(wanted, rate):
    rates, shares = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 0.95, 0.85, 0.5])
    assert crossing(rates, shares, wanted) == pytest.approx(rate)


def test_more_requests_in_time_do_not_lower_the_goodput():
    generator = np.random.default_rng(3)
    for _ in range(100):
        shares = generator.random(7)
        more = shares.copy()
        more[generator.integers(7)] += 0.2
        assert ladder(more).goodput(0.5) >= ladder(shares).goodput(0.5)


def test_rates_that_serve_equally_many_sessions_are_merged():
    found = ladder_of([(1, 1), (1, 1), (1, 2)], 10.0)
    assert found.rates == pytest.approx([0.1, 0.2])
    assert found.shares() == pytest.approx([1.0, 0.5])


def test_rates_above_that_of_the_workload_are_tried():
    found = climb(config_of(*CHAT, "goodput.times=1.5"))
    assert found.rates[-1] > found.rates[-2]


def test_a_stricter_limit_of_ttft_does_not_raise_the_goodput():
    easy, hard = (
        run(config_of(*CHAT, f"goodput.ttft_s={ttft_s}", "goodput.tpot_s=0.02")).measures
        for ttft_s in (5.0, 0.03)
    )
    key = "goodput/requests_per_s"
    assert hard[key] <= easy[key] <= easy["goodput/tried_requests_per_s"]


def test_closed_arrivals_have_no_goodput():
    with pytest.raises(ValueError, match=r"got workload\.arrivals=closed"):
        climb(config_of(*CHAT, "workload.arrivals=closed"))


def test_goodput_can_count_jobs_within_a_limit_of_slowdown() -> None:
    jobs = (*CHAT, "goodput.num_rates=3", "workload.jobs=true")
    config = config_of(*jobs, "goodput.times=1", "goodput.job_slowdown=1.02")
    found = climb(config)
    whole = experiment.run(config).measures
    per_hour, share = whole["jobs/in_time_per_hour"], found.shares()[-1]
    assert 0 < share < 1
    assert share == pytest.approx(per_hour / whole["jobs/per_hour"])  # all 40 jobs finish
    assert found.served[-1] == whole["jobs/finished_count"] == 40

    measures = run(config_of(*jobs, "goodput.job_slowdown=1000")).measures
    assert measures["goodput/jobs_per_hour"] == measures["goodput/tried_jobs_per_hour"] > 0
    assert "goodput/requests_per_s" not in measures


def test_an_aborted_job_is_not_in_time() -> None:
    few = ("workload.jobs=true", "workload.abort_share=1", "workload.patience_s=1e-6")
    config = config_of(*CHAT, *few, "goodput.job_slowdown=1000")
    result = experiment.run(config)
    in_time, served = in_time_of(config, result)
    assert served == 40
    assert in_time == result.measures["jobs/finished_count"] < 40


def test_a_span_lasts_from_the_first_arrival_after_the_warm_up_to_the_last():
    requests = [SimpleNamespace(arrival_ns=place * 10**9) for place in (2, 5, 9)]
    spans = [span_s(SimpleNamespace(requests=requests), warm_up_s) for warm_up_s in (0, 4, 9)]
    assert spans == [7, 5, 1]
