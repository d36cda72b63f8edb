"""What reading and computing will take, and the stop policy that chooses between them."""

import pytest

from hicache.cache.kinds import MAMBA, Window
from hicache.cache.prefetch.prefetch import Phase, Prefetch
from hicache.cache.prefetch.rates import RateEstimator, RecentRate
from hicache.config import PrefetchConfig
from hicache.policies.stop import Marginal
from tests.cache.small import PAGE, make_cache, world_of

CACHE = make_cache(device=(8, 0, 0), host=(8, 0, 0))


def prefetch_of(num_pages: int, *, completed: int = 0, has_state: bool = False) -> Prefetch:
    """One that is being read, its keys known."""
    prefetch = Prefetch(
        request_id=0,
        sequence=None,  # type: ignore[arg-type]  # nobody looks
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


def marginal(rates: RateEstimator, patience: float | None = 1) -> Marginal:
    return Marginal(world_of(rates=rates, prefetch=PrefetchConfig(patience=patience)))


def test_a_rate_nobody_has_seen_is_unknown() -> None:
    rates = RateEstimator()
    assert rates.load_ns(prefetch_of(1)) is None
    assert rates.compute_ns(1) is None


def test_a_rate_is_that_of_all_that_was_seen_lately() -> None:
    rate = RecentRate(1_000_000)
    rate.add(10, 100)
    rate.add(30, 100)
    assert rate.ns == pytest.approx(5.0, rel=1e-4)


def test_half_a_memory_later_a_rate_counts_half() -> None:
    rate = RecentRate(200)
    rate.add(100, 1000)
    rate.add(100, 0)
    assert rate.ns == pytest.approx(500 / 150)


def test_readers_side_by_side_share_their_time() -> None:
    rates = RateEstimator()
    was_read(rates, 5, 0, 10)
    was_read(rates, 5, 0, 10)
    assert rates.load_ns(prefetch_of(1)) == pytest.approx(1.0, rel=0.01)


def test_time_in_which_nothing_was_read_does_not_count() -> None:
    rates = RateEstimator()
    was_read(rates, 5, 0, 10)
    was_read(rates, 5, 1_000, 1_010)
    assert rates.load_ns(prefetch_of(1)) == pytest.approx(2.0)


@pytest.mark.parametrize(("num_engines", "page_ns"), [(1, 2), (2, 6)])
def test_a_read_from_shared_storage_includes_the_wait_for_other_engines(
    num_engines: int, page_ns: int
) -> None:
    rates = RateEstimator(num_engines)
    prefetch = prefetch_of(5, completed=5)
    prefetch.answered_ns, prefetch.read_ns = 100, (120, 130)
    rates.was_read(prefetch)
    assert rates.load_ns(prefetch_of(1)) == pytest.approx(page_ns)


def test_earlier_prefetches_are_read_first() -> None:
    earlier, done, ours, later = prefetch_of(7, completed=2), *map(prefetch_of, (50, 3, 90))
    done.phase = Phase.stopped
    rates = RateEstimator()
    rates.active.update(enumerate([earlier, done, ours, later]))
    was_read(rates, 10, 0, 10)
    assert rates.load_ns(ours) == pytest.approx(5 + 3)


@pytest.mark.parametrize(("token_ns", "may_stop"), [(2, False), (3, False), (1, True)])
def test_marginal_stops_when_computing_is_sooner_done(token_ns: int, *, may_stop: bool) -> None:
    rates = RateEstimator()
    was_read(rates, 10, 0, 80)  # 8 ns a page of 4 tokens
    rates.was_computed(100, 100 * token_ns)
    assert marginal(rates).may_stop(prefetch_of(5), 0) is may_stop


def test_marginal_lets_the_first_request_go_to_learn_what_computing_takes() -> None:
    assert marginal(RateEstimator()).may_stop(prefetch_of(5), 0)
    assert marginal(RateEstimator()).deadline_ns(prefetch_of(5)) is None


def test_marginal_waits_for_an_answer_of_storage() -> None:
    rates = RateEstimator()
    was_read(rates, 10, 0, 10**9)
    rates.was_computed(1, 10)
    unanswered = prefetch_of(5)
    unanswered.restorable = None
    assert not marginal(rates).may_stop(unanswered, 0)
    assert marginal(rates).may_stop(prefetch_of(5), 0)


def test_nobody_waits_longer_than_computing_would_have_taken() -> None:
    rates = RateEstimator()
    rates.was_computed(1, 10)
    policy, prefetch = marginal(rates), prefetch_of(5)  # no read has told how long this one takes
    assert policy.deadline_ns(prefetch) == 5 * PAGE * 10
    assert not policy.may_stop(prefetch, 200)
    assert policy.may_stop(prefetch, 201)


@pytest.mark.parametrize(("num_waiting", "may_stop"), [(0, True), (1, True), (2, False)])
def test_computing_counts_once_for_everybody_it_keeps_waiting(
    num_waiting: int, *, may_stop: bool
) -> None:
    rates = RateEstimator()
    was_read(rates, 10, 0, 80)
    rates.was_computed(100, 150)
    rates.num_waiting = num_waiting
    assert marginal(rates).may_stop(prefetch_of(5), 0) is may_stop  # 40 ns to read, 30 to compute


def test_patience_is_what_computing_counts_for() -> None:
    rates = RateEstimator()
    was_read(rates, 10, 0, 80)
    rates.was_computed(100, 150)
    verdicts = [marginal(rates, patience).may_stop(prefetch_of(5), 0) for patience in (1.3, 1.4)]
    assert verdicts == [True, False]


@pytest.mark.parametrize(
    ("keeps_part", "restorable", "may_stop"),
    [(False, [5, 10], False), (True, [5, 10], True), (True, [10], False)],
)
def test_at_stake_is_what_a_stop_would_not_keep(
    restorable: list[int], *, keeps_part: bool, may_stop: bool
) -> None:
    rates = RateEstimator()
    was_read(rates, 10, 0, 114)
    rates.was_computed(100, 150)
    half = prefetch_of(10, completed=5, has_state=True)  # 57 ns to read, 60 or 30 to compute
    half.keeps_part, half.restorable = keeps_part, restorable
    assert marginal(rates).may_stop(half, 0) is may_stop


@pytest.mark.parametrize(("num_engines", "may_stop"), [(1, False), (2, True)])
def test_saving_gpu_time_justifies_no_longer_read_from_shared_storage(
    num_engines: int, *, may_stop: bool
) -> None:
    rates = RateEstimator(num_engines)
    was_read(rates, 10, 0, 80)
    rates.was_computed(100, 150)
    policy = marginal(rates, None)
    assert policy.may_stop(prefetch_of(5), 0) is may_stop  # 40 ns to read, 30 to compute
