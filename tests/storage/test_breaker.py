"""The circuit breaker: when it bypasses an engine, when it probes it, and what callers get."""

import pytest

from hicache.clock import SimulatedClock, to_ns
from hicache.storage.base import StorageError, StorageStats
from hicache.storage.contract import keys, poisoned, write
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.base import GuardStorage
from hicache.storage.guards.breaker import BreakerStorage

COUNTED = StorageStats(stored_pages=1, stored_bytes=8192)


class Failing(GuardStorage):
    """Memory that raises `error` if it is set, and counts the calls that reach it."""

    error: Exception | None = None
    num_calls = 0

    def stats(self):
        return self._call(self._inner.stats, None)

    def close(self):
        self._call(self._inner.close, None)

    def _call(self, call, otherwise):
        self.num_calls += 1
        self.before_answer()
        if self.error is not None:
            raise self.error
        return call()

    def before_answer(self):
        """Tests replace this with what happens during a call."""


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def inner() -> Failing:
    inner = Failing(MemoryStorage(capacity_bytes=None))
    write(inner, keys(1))
    inner.num_calls = 0
    return inner


@pytest.fixture
def storage(inner: Failing, clock: SimulatedClock) -> BreakerStorage:
    return BreakerStorage(inner, clock=clock)


def fail(storage: BreakerStorage, inner: Failing, times: int) -> None:
    inner.error = StorageError("gone")
    assert [storage.contains(keys(1)) for _ in range(times)] == [[False]] * times
    inner.error = None


def test_three_consecutive_failures_bypass_the_engine_for_five_seconds(storage, inner, clock):
    for _ in range(3):
        fail(storage, inner, 2)
        assert not storage.is_bypassed
        assert storage.contains(keys(1)) == [True]  # the count begins anew
    fail(storage, inner, 3)
    assert storage.is_bypassed
    assert inner.num_calls == 12
    fail(storage, inner, 6)
    clock.wait_until(to_ns(5.0) - 1)
    assert storage.contains(keys(1)) == [False]
    assert inner.num_calls == 12
    clock.wait_until(to_ns(5.0))
    assert storage.contains(keys(1)) == [True]
    assert not storage.is_bypassed
    assert (storage.failed_calls, storage.bypassed_calls) == (9, 7)


def test_a_failed_probe_bypasses_the_engine_for_another_five_seconds(storage, inner, clock):
    fail(storage, inner, 3)
    clock.wait_until(to_ns(7.0))
    fail(storage, inner, 2)
    assert inner.num_calls == 4
    clock.wait_until(to_ns(12.0) - 1)
    assert storage.contains(keys(1)) == [False]
    clock.wait_until(to_ns(12.0))
    assert storage.contains(keys(1)) == [True]


def test_a_call_during_a_probe_is_bypassed(storage, inner, clock):
    fail(storage, inner, 3)
    clock.wait_until(to_ns(5.0))
    answers = []

    def call_once() -> None:
        del inner.before_answer
        answers.append(storage.contains(keys(1)))

    inner.before_answer = call_once
    assert storage.contains(keys(1)) == [True]
    assert answers == [[False]]
    assert inner.num_calls == 4


def test_an_exception_that_is_no_storage_error_counts_as_a_failure_and_is_raised(storage, inner):
    inner.error = ZeroDivisionError("a bug")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            storage.contains(keys(1))
    assert (storage.failed_calls, storage.is_bypassed) == (3, True)


def test_a_bypassed_engine_is_not_called(storage, inner):
    fail(storage, inner, 3)
    assert storage.contains(keys(1, 2)) == [False, False]
    assert storage.read(keys(1, 2), [poisoned(), poisoned()]) == [False, False]
    assert write(storage, keys(2, 3)) == [False, False]
    storage.delete(keys(1))
    assert inner.contains(keys(1, 2)) == [True, False]
    assert storage.bypassed_calls == 4


def test_stats_of_a_failing_engine_are_the_last_known(storage, inner):
    assert storage.last_stats == StorageStats()
    assert (storage.stats(), storage.last_stats) == (COUNTED, COUNTED)
    write(storage, keys(2))
    inner.error = StorageError("gone")
    assert (storage.stats(), storage.last_stats) == (COUNTED, COUNTED)


@pytest.mark.parametrize("num_failures", [0, 3])
def test_close_reads_the_stats_and_closes_also_a_bypassed_engine(num_failures, storage, inner):
    fail(storage, inner, num_failures)
    storage.close()
    assert storage.last_stats == COUNTED
    assert inner.stats().stored_bytes == 0
    assert storage.failed_calls == num_failures


def test_an_engine_that_fails_to_close_raises_nothing(storage, inner):
    storage.stats()
    inner.error = StorageError("gone")
    storage.close()
    assert (storage.failed_calls, storage.last_stats) == (1, COUNTED)


def test_max_failures_must_be_at_least_one(inner, clock):
    with pytest.raises(ValueError, match="max_failures must be at least 1, got 0"):
        BreakerStorage(inner, clock=clock, max_failures=0)
    assert not BreakerStorage(inner, clock=clock, max_failures=1).is_bypassed


@pytest.mark.parametrize("answer", [None, [True], [True] * 3, (True, True)])
def test_an_answer_other_than_one_bool_for_each_key_is_refused(answer, storage, inner):
    inner.contains = lambda _: answer
    with pytest.raises(ValueError, match=r"a list of 2 bools, one per key, got"):
        storage.contains(keys(0, 1))
