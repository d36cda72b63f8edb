"""The breaker: what it counts, when it tries again, and what it lets through."""

from collections.abc import Callable

import pytest
from storage_pages import keys, payload, poisoned, read, write

from hicache.clock import SimulatedClock, to_ns
from hicache.storage.base import StorageError, StorageStats
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.breaker import BreakerStorage

COUNTED = StorageStats(stored_pages=1, stored_bytes=8192)


class Failing(MemoryStorage):
    """Memory that fails with `error` while there is one, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=None)
        self.error: Exception | None = None
        self.num_calls = 0
        self.meanwhile: Callable[[], object] | None = None

    def _asked(self) -> None:
        self.num_calls += 1
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if self.error is not None:
            raise self.error

    def contains(self, page_keys):
        self._asked()
        return super().contains(page_keys)

    def delete(self, page_keys):
        self._asked()
        super().delete(page_keys)

    def stats(self):
        self._asked()
        return super().stats()

    def close(self):
        self._asked()
        super().close()


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def inner() -> Failing:
    return Failing()


@pytest.fixture
def storage(inner: Failing, clock: SimulatedClock) -> BreakerStorage:
    storage = BreakerStorage(inner, clock=clock)
    write(storage, keys(1))
    return storage


def fail(storage: BreakerStorage, inner: Failing, times: int) -> None:
    inner.error = StorageError("gone")
    for _ in range(times):
        storage.contains(keys(1))


def test_three_failures_in_a_row_are_enough_for_five_seconds(
    storage: BreakerStorage, inner: Failing, clock: SimulatedClock
) -> None:
    fail(storage, inner, 2)
    assert not storage.is_bypassed
    fail(storage, inner, 1)
    assert storage.is_bypassed
    inner.error = None
    clock.wait_until(to_ns(5.0) - 1)
    assert storage.contains(keys(1)) == [False]
    clock.wait_until(to_ns(5.0))
    assert storage.contains(keys(1)) == [True]
    assert (storage.failed_calls, storage.bypassed_calls) == (3, 1)


def test_a_probe_that_fails_makes_the_engine_rest_again(
    storage: BreakerStorage, inner: Failing, clock: SimulatedClock
) -> None:
    fail(storage, inner, 3)
    clock.wait_until(to_ns(7.0))
    fail(storage, inner, 1)
    inner.error = None
    clock.wait_until(to_ns(12.0) - 1)
    assert storage.contains(keys(1)) == [False]
    clock.wait_until(to_ns(12.0))
    assert storage.contains(keys(1)) == [True]
    inner.error = StorageError("gone")
    storage.contains(keys(1))
    assert not storage.is_bypassed  # a success begins the count anew


def test_nobody_else_is_let_through_during_a_probe(
    storage: BreakerStorage, inner: Failing, clock: SimulatedClock
) -> None:
    fail(storage, inner, 3)
    inner.error = None
    clock.wait_until(to_ns(5.0))
    answers: list[list[bool]] = []
    inner.meanwhile = lambda: answers.append(storage.contains(keys(1)))
    assert storage.contains(keys(1)) == [True]
    assert answers == [[False]]
    assert inner.num_calls == 4
    assert storage.contains(keys(1)) == [True]


def test_a_fault_of_ours_counts_as_a_failure_and_is_raised(
    storage: BreakerStorage, inner: Failing
) -> None:
    inner.error = ZeroDivisionError("a bug")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            storage.contains(keys(1))
    assert (storage.failed_calls, storage.is_bypassed) == (3, True)


def test_every_call_passes_through_while_all_is_well(
    storage: BreakerStorage, inner: Failing
) -> None:
    assert write(storage, keys(2)) == [True]
    assert read(storage, keys(1, 3)) == [payload(keys(1)[0]), None]
    storage.delete(keys(2))
    assert inner.contains(keys(1, 2)) == [True, False]
    assert (storage.failed_calls, storage.bypassed_calls) == (0, 0)


def test_nothing_is_found_stored_or_forgotten_while_the_engine_is_left_alone(
    storage: BreakerStorage, inner: Failing
) -> None:
    fail(storage, inner, 3)
    inner.error = None
    assert storage.contains(keys(1, 2)) == [False, False]
    assert storage.read(keys(1, 2), [poisoned(), poisoned()]) == [False, False]
    assert write(storage, keys(2, 3)) == [False, False]
    storage.delete(keys(1))
    assert inner.contains(keys(1, 2)) == [True, False]
    assert storage.bypassed_calls == 4


def test_the_last_counts_stand_while_the_engine_fails(
    storage: BreakerStorage, inner: Failing
) -> None:
    assert storage.last_stats == StorageStats()
    assert (storage.stats(), storage.last_stats) == (COUNTED, COUNTED)
    inner.error = StorageError("gone")
    write(storage, keys(2))
    assert (storage.stats(), storage.last_stats) == (COUNTED, COUNTED)


def test_closing_asks_for_the_counts_once_more(storage: BreakerStorage, inner: Failing) -> None:
    storage.close()
    assert storage.last_stats == COUNTED
    assert inner.stats().stored_bytes == 0
    assert storage.failed_calls == 0


def test_an_engine_that_cannot_be_closed_is_let_go(storage: BreakerStorage, inner: Failing) -> None:
    storage.stats()
    inner.error = StorageError("gone")
    storage.close()
    assert (storage.failed_calls, storage.last_stats) == (1, COUNTED)


def test_at_least_one_failure_must_be_allowed(inner: Failing, clock: SimulatedClock) -> None:
    with pytest.raises(ValueError, match="max_failures must be at least 1, got 0"):
        BreakerStorage(inner, clock=clock, max_failures=0)
    assert not BreakerStorage(inner, clock=clock, max_failures=1).is_bypassed


@pytest.mark.parametrize("answer", [None, [True], [True] * 3, (True, True)])
def test_an_answer_that_is_not_one_truth_value_for_each_key_is_refused(
    storage: BreakerStorage, inner: Failing, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    monkeypatch.setattr(inner, "contains", lambda _: answer)
    with pytest.raises(ValueError, match=r"a list of 2 bools, one per key, got"):
        storage.contains(keys(0, 1))
