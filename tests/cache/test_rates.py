"""Estimates of the time to read and to compute pages, and the stop policy that compares them."""

import pytest

from hicache.cache.kinds import MAMBA, Window
from hicache.cache.prefetch.prefetch import Phase, Prefetch
from hicache.cache.prefetch.rates import RateEstimator, RecentRate
from hicache.policies.stop import Marginal
from tests.cache.small import PAGE, make_cache, world_of

CACHE = make_cache(device=(8, 0, 0), host=(8, 0, 0))


def prefetch_of(num_pages: int, *, completed: int = 0, has_state: bool = False) -> Prefetch:
    """A prefetch of `num_pages` pages that is being read; `completed` pages have arrived."""
    prefetch = Prefetch(
        request_id=0,
        sequence=None,  # type: ignore[arg-type]  # unused
        anchor=CACHE.tree.root(""),
        anchor_lock=None,  # type: ignore[arg-type]
        start_page=0,
        asked_pages=num_pages,
        num_pages=num_pages,
        names=[],
        enqueued_ns=0,
        needs=((MAMBA, Window(1)),) if has_state else (),
        staged=[[], [], []],
    )
    prefetch.restorable = [num_pages]
    prefetch.phase = Phase.reading
    prefetch.completed_pages = completed
    return prefetch


def was_read(rates: RateEstimator, num_pages: int, began_ns: int, ended_ns: int) -> None:
    prefetch = prefetch_of(num_pages, completed=num_pages)
    prefetch.read_ns = began_ns, ended_ns
    rates.was_read(prefetch)


def test_a_rate_is_unknown_before_the_first_measurement():
    rates = RateEstimator()
    assert rates.load_ns(prefetch_of(1)) is None
    assert rates.compute_ns(1) is None


@pytest.mark.parametrize(
    ("num_remembered", "work", "ns"),
    [
        (1_000_000, [(10, 100), (30, 100)], 5.0),
        (200, [(100, 1000), (100, 0)], 500 / 150),  # 100 units later, older work counts half
    ],
)
def test_a_rate_is_the_mean_of_recent_work(num_remembered, work, ns):
    rate = RecentRate(num_remembered)
    for units, duration_ns in work:
        rate.add(units, duration_ns)
    assert rate.ns == pytest.approx(ns, rel=1e-4)


@pytest.mark.parametrize(("began_ns", "page_ns"), [(0, 1.0), (1_000, 2.0)])
def test_parallel_reads_share_their_time_and_idle_time_does_not_count(began_ns, page_ns):
    rates = RateEstimator()
    was_read(rates, 5, 0, 10)
    was_read(rates, 5, began_ns, began_ns + 10)
    assert rates.load_ns(prefetch_of(1)) == pytest.approx(page_ns, rel=0.01)


@pytest.mark.parametrize(("num_engines", "page_ns"), [(1, 2), (2, 6)])
def test_a_read_from_shared_storage_includes_the_wait_for_other_engines(
    num_engines: int, page_ns: int
) -> None:
    rates = RateEstimator(num_engines)
    prefetch = prefetch_of(5, completed=5)
    prefetch.answered_ns, prefetch.read_ns = 100, (120, 130)
    rates.was_read(prefetch)
    assert rates.load_ns(prefetch_of(1)) == pytest.approx(page_ns)


def test_the_expected_read_time_includes_prefetches_that_are_read_before() -> None:
    earlier, done, ours, later = prefetch_of(7, completed=2), *map(prefetch_of, (50, 3, 90))
    done.phase = Phase.stopped
    rates = RateEstimator()
    rates.active.update(enumerate([earlier, done, ours, later]))
    was_read(rates, 10, 0, 10)
    assert rates.load_ns(ours) == pytest.approx(5 + 3)


# -- the policy `marginal` ----------------------------------------------------------------------


def marginal(
    page_ns: int | None, token_ns: float | None, num_engines: int = 2, num_waiting: int = 0
) -> Marginal:
    """The policy `marginal` with these rates in ns; with one engine, computing counts twice."""
    rates = RateEstimator(num_engines)
    if page_ns is not None:
        was_read(rates, 10, 0, 10 * page_ns)
    if token_ns is not None:
        rates.was_computed(100, int(100 * token_ns))
    rates.num_waiting = num_waiting
    return Marginal(world_of(rates=rates))


@pytest.mark.parametrize(
    ("policy", "may_stop"),
    [
        # 5 pages of 4 tokens
        (marginal(8, 2), False),
        (marginal(8, 3), False),
        (marginal(8, 1), True),
        (marginal(8, 1.5, num_waiting=1), True),
        (marginal(8, 1.5, num_waiting=2), False),
        (marginal(8, 1, num_engines=1), False),
        (marginal(8, 0.9, num_engines=1), True),
        (marginal(None, None), True),  # the first request runs, to measure a step
        (marginal(None, 2), False),
    ],
)
def test_marginal_stops_when_reading_takes_longer_than_computing_summed_over_waiting_requests(
    policy, may_stop
):
    assert policy.may_stop(prefetch_of(5), 0) is may_stop


def test_marginal_waits_for_the_answer_of_storage():
    policy, unanswered = marginal(100, 1), prefetch_of(5)
    unanswered.restorable = None
    assert not policy.may_stop(unanswered, 0)
    assert policy.may_stop(prefetch_of(5), 0)


def test_marginal_waits_no_longer_than_computing_would_have_taken():
    policy, prefetch = marginal(None, 10), prefetch_of(5)
    assert policy.deadline_ns(prefetch) == 5 * PAGE * 10
    assert [policy.may_stop(prefetch, now_ns) for now_ns in (200, 201)] == [False, True]
    assert marginal(None, None).deadline_ns(prefetch) is None


@pytest.mark.parametrize(
    ("keeps_part", "restorable", "may_stop"),
    [(False, [5, 10], False), (True, [5, 10], True), (True, [10], False)],
)
def test_marginal_counts_the_pages_that_a_stop_would_lose(restorable, may_stop, *, keeps_part):
    half = prefetch_of(10, completed=5, has_state=True)
    half.keeps_part, half.restorable = keeps_part, restorable
    assert marginal(11, 1.5).may_stop(half, 0) is may_stop  # 55 ns to read, 60 or 30 to compute
