"""Engines that fail: never a wrong byte, never an error that gets through, and back again."""

import math
from contextlib import closing, suppress
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from storage_engines import ENGINES
from storage_pages import (
    PAGE_BYTES,
    assert_whole_or_absent,
    keys,
    payload,
    poisoned,
    read,
    write,
)

from hicache.clock import SimulatedClock, Stall, to_ns
from hicache.config import FaultsConfig
from hicache.storage.base import Storage, StorageError
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.breaker import BreakerStorage
from hicache.storage.guards.faults import Fault, FaultyStorage

FIELDS = [field.name for field in fields(FaultsConfig)]
ALL_AT_ONCE = FaultsConfig(
    delay_ms=10.0,
    delay_sigma=1.0,
    error_rate=0.1,
    missing_rate=0.1,
    short_rate=0.1,
    corrupt_rate=0.1,
    full_rate=0.1,
    gone_from_s=0.5,
    gone_for_s=0.5,
)
PLANS = {
    "delay": FaultsConfig(delay_ms=10.0, delay_sigma=1.0),
    "error": FaultsConfig(error_rate=0.3),
    "missing": FaultsConfig(missing_rate=0.3),
    "short": FaultsConfig(short_rate=0.3),
    "corrupt": FaultsConfig(corrupt_rate=0.3),
    "full": FaultsConfig(full_rate=0.3),
    "gone": FaultsConfig(delay_ms=10.0, gone_from_s=0.2, gone_for_s=0.4),
    "all": ALL_AT_ONCE,
}


def faulty(plan: FaultsConfig, *, seed: int = 0) -> FaultyStorage:
    return FaultyStorage(
        MemoryStorage(capacity_bytes=None), plan, seed=seed, clock=SimulatedClock()
    )


def use(storage: Storage) -> int:
    """Write and read for a while; how many pages were read."""
    found = 0
    for turn in range(40):
        some = keys(*range(turn, turn + 8))
        write(storage, some)
        found += assert_whole_or_absent(storage, some)
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", ["memory", "slab", "file"])
def test_no_fault_gives_a_wrong_byte_or_an_error(
    name: str, plan: FaultsConfig, tmp_path: Path
) -> None:
    clock = SimulatedClock()
    engine = ENGINES[name].open(str(tmp_path), "test", 12 * PAGE_BYTES)
    plan = replace(plan, corrupt_rate=0.0)  # for the reader to detect
    safe = BreakerStorage(
        FaultyStorage(engine, plan, seed=1, clock=clock), clock=clock, retry_s=0.05
    )
    with closing(safe):
        assert use(safe) > 0


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault.name in PLANS])
def test_a_plan_injects_its_fault(fault: Fault) -> None:
    clock = SimulatedClock()
    spoilt = FaultyStorage(
        MemoryStorage(capacity_bytes=None), PLANS[fault.name], seed=1, clock=clock
    )
    with suppress(AssertionError):  # a corrupt page
        use(BreakerStorage(spoilt, clock=clock, retry_s=0.05))
    assert spoilt.injected[fault] > 0


def test_corrupt_pages_get_through() -> None:
    with pytest.raises(AssertionError, match="wrong bytes"):
        use(faulty(FaultsConfig(corrupt_rate=0.3)))


def test_the_same_seed_gives_the_same_faults() -> None:
    plan = replace(ALL_AT_ONCE, error_rate=0.0, corrupt_rate=0.0, gone_from_s=None, gone_for_s=None)
    assert use(faulty(plan, seed=5)) == use(faulty(plan, seed=5))
    assert use(faulty(plan, seed=5)) != use(faulty(plan, seed=6))


def test_delays_pass_on_the_clock() -> None:
    clock = SimulatedClock()
    plan = FaultsConfig(delay_ms=250.0)
    FaultyStorage(MemoryStorage(capacity_bytes=None), plan, seed=0, clock=clock).contains([])
    assert clock.now() == to_ns(0.25)


@pytest.mark.parametrize(
    ("now_ns", "is_gone"), [(999_999_999, 0), (10**9, 1), (2 * 10**9 - 1, 1), (2 * 10**9, 0)]
)
def test_an_engine_is_gone_from_the_first_nanosecond_to_the_last(now_ns: int, is_gone: int) -> None:
    clock = SimulatedClock()
    clock.wait_until(now_ns)
    plan = FaultsConfig(gone_from_s=1.0, gone_for_s=1.0)
    storage = FaultyStorage(MemoryStorage(capacity_bytes=None), plan, seed=0, clock=clock)
    with suppress(StorageError):
        storage.contains([])
    assert storage.injected[Fault.gone] == is_gone


def test_a_failed_write_may_have_stored_its_pages() -> None:
    stored = set()
    for seed in range(20):
        inner = MemoryStorage(capacity_bytes=None)
        plan = FaultsConfig(error_rate=1.0)
        with pytest.raises(StorageError, match="injected"):
            write(FaultyStorage(inner, plan, seed=seed, clock=SimulatedClock()), keys(1))
        stored.update(inner.contains(keys(1)))
    assert stored == {True, False}


@pytest.mark.parametrize("name", [name for name in FIELDS if name.endswith("_rate")])
def test_a_rate_lies_between_none_and_all(name: str) -> None:
    for share in (-0.01, 1.5):
        with pytest.raises(ValueError, match=rf"{name} must be between 0 and 1, got {share}"):
            FaultsConfig(**{name: share})
    assert FaultsConfig(**{name: 0.0}).is_harmless
    assert not FaultsConfig(**{name: 1.0}).is_harmless


@pytest.mark.parametrize("name", ["delay_ms", "delay_sigma", "failure_ms"])
def test_a_time_is_not_negative(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be at least 0, got -0.1"):
        FaultsConfig(**{name: -0.1})
    FaultsConfig(**{name: 0.0})


def test_what_does_nothing_by_itself_is_harmless() -> None:
    assert FaultsConfig(delay_sigma=1.0, failure_ms=1.0).is_harmless
    assert not FaultsConfig(delay_ms=100.0).is_harmless
    assert not FaultsConfig(gone_from_s=1.0, gone_for_s=1.0).is_harmless


class Waiting:
    """What an engine waits for, where nobody sleeps."""

    def __init__(self, plan: FaultsConfig, *, seed: int = 0, deadline_s: float = math.inf) -> None:
        self.clock = SimulatedClock()
        self.waited_ns: list[int] = []
        self.inner = MemoryStorage(capacity_bytes=None)
        self.storage = FaultyStorage(
            self.inner,
            plan,
            seed=seed,
            clock=self.clock,
            wait=self.waited_ns.append,
            deadline_s=deadline_s,
        )

    def fails(self) -> bool:
        try:
            self.storage.contains([])
        except StorageError:
            return True
        return False


def test_delays_are_log_normal_around_their_median() -> None:
    waiting = Waiting(FaultsConfig(delay_ms=250.0, delay_sigma=0.5))
    for _ in range(400):
        waiting.storage.contains([])
    logs = [math.log(each / to_ns(0.25)) for each in waiting.waited_ns]
    assert abs(mean(logs)) < 0.08
    assert abs(stdev(logs) - 0.5) < 0.06
    assert waiting.storage.injected == {Fault.delay: 400}


def test_a_call_that_would_take_too_long_fails_at_its_deadline() -> None:
    late = Waiting(FaultsConfig(delay_ms=250.0), deadline_s=0.2)
    with pytest.raises(StorageError, match=r"no answer within 0\.2 s"):
        late.storage.contains([])
    assert late.waited_ns == [to_ns(0.2)]
    just = Waiting(FaultsConfig(delay_ms=250.0), deadline_s=0.25)
    assert not just.fails()
    assert just.waited_ns == [to_ns(0.25)]


def test_an_engine_is_gone_from_one_moment_to_another() -> None:
    waiting = Waiting(FaultsConfig(gone_from_s=1.0, gone_for_s=1.0, failure_ms=10.0))
    moments = (0, 0.999, 1.0, 1.999, 2.0, 3.5)  # an end is not part of it
    gone = []
    for moment in moments:
        waiting.clock.wait_until(to_ns(moment))
        gone.append(waiting.fails())
    assert gone == [False, False, True, True, False, False]
    assert waiting.storage.injected[Fault.gone] == 2
    assert waiting.waited_ns == [to_ns(0.01)] * 2


def test_an_engine_that_does_not_come_back_is_gone_for_good() -> None:
    waiting = Waiting(FaultsConfig(gone_from_s=1.0))
    waiting.clock.wait_until(to_ns(1e6))
    assert waiting.fails()


def test_an_engine_is_gone_when_a_delayed_call_gets_there() -> None:
    plan = FaultsConfig(delay_ms=500.0, gone_from_s=1.0, gone_for_s=1.0)
    waiting = Waiting(plan)  # the clock does not see the delay
    waiting.clock.wait_until(to_ns(0.5))
    assert waiting.fails()
    waiting.clock.wait_until(to_ns(1.5))
    assert not waiting.fails()
    clock = SimulatedClock()  # and here it does
    storage = FaultyStorage(MemoryStorage(capacity_bytes=None), plan, seed=0, clock=clock)
    storage.contains([])
    with pytest.raises(StorageError, match="unavailable at 1 s"):
        storage.contains([])


def test_a_clock_that_oversleeps_is_not_put_back() -> None:
    class Oversleeping(SimulatedClock):
        def wait_until(self, time_ns: int) -> None:
            super().wait_until(time_ns + to_ns(0.5))

    plan = FaultsConfig(delay_ms=500.0, gone_from_s=1.0, gone_for_s=1.0)
    storage = FaultyStorage(MemoryStorage(capacity_bytes=None), plan, seed=0, clock=Oversleeping())
    with pytest.raises(StorageError, match="unavailable at 1 s"):
        storage.contains([])


def test_failing_takes_its_time_and_none_without() -> None:
    slow = Waiting(FaultsConfig(error_rate=1.0, failure_ms=300.0))
    assert slow.fails()
    assert slow.waited_ns == [to_ns(0.3)]
    quick = Waiting(FaultsConfig(error_rate=1.0))
    assert quick.fails()
    assert quick.waited_ns == []


def test_a_stall_is_taken_once() -> None:
    stall = Stall()
    assert stall.take() == 0
    stall.add(3)
    stall.add(4)
    assert (stall.take(), stall.take()) == (7, 0)


@pytest.mark.parametrize("num_bytes", [1, 7, PAGE_BYTES])
def test_a_short_page_is_a_miss_whose_second_half_is_not_the_pages(num_bytes: int) -> None:
    waiting = Waiting(FaultsConfig(short_rate=1.0))
    page = payload(keys(1)[0], num_bytes)
    waiting.inner.write(keys(1), [page])
    buffer = poisoned(num_bytes)
    assert waiting.storage.read(keys(1), [buffer]) == [False]
    half = num_bytes // 2
    assert bytes(buffer) == bytes(page[:half]) + b"\xfa" * (num_bytes - half)


def test_nothing_of_a_missing_page_is_left() -> None:
    waiting = Waiting(FaultsConfig(missing_rate=1.0))
    write(waiting.inner, keys(1))
    buffer = poisoned()
    assert waiting.storage.read(keys(1), [buffer]) == [False]
    assert bytes(buffer) == b"\xfa" * PAGE_BYTES
    assert waiting.storage.injected == {Fault.missing: 1}


def test_one_bit_of_a_corrupt_page_is_wrong_and_anywhere() -> None:
    waiting = Waiting(FaultsConfig(corrupt_rate=1.0))
    waiting.inner.write(keys(1), [memoryview(bytes(4))])
    wrong = set()
    for _ in range(500):
        buffer = memoryview(bytearray(4))
        assert waiting.storage.read(keys(1), [buffer]) == [True]
        wrong.add(bytes(buffer))
    assert wrong == {(1 << bit).to_bytes(4, "little") for bit in range(32)}


def test_a_page_of_no_bytes_cannot_be_corrupt() -> None:
    waiting = Waiting(FaultsConfig(corrupt_rate=1.0))
    waiting.inner.write(keys(1), [memoryview(b"")])
    assert waiting.storage.read(keys(1, 2), [memoryview(b""), poisoned()]) == [True, False]
    assert waiting.storage.injected[Fault.corrupt] == 0


def test_pages_that_are_missing_anyway_meet_no_fault() -> None:
    waiting = Waiting(FaultsConfig(missing_rate=1.0, short_rate=1.0, corrupt_rate=1.0))
    assert read(waiting.storage, keys(1)) == [None]
    assert not waiting.storage.injected


def test_pages_are_refused_one_by_one() -> None:
    waiting = Waiting(FaultsConfig(full_rate=0.5))
    some = keys(*range(40))
    results = write(waiting.storage, some)
    assert 0 < sum(results) < 40
    assert waiting.inner.contains(some) == results
    assert waiting.storage.injected == {Fault.full: 40 - sum(results)}
    assert write(Waiting(FaultsConfig(full_rate=1.0)).storage, some) == [False] * 40


def test_a_page_that_the_engine_refuses_is_refused() -> None:
    inner = MemoryStorage(capacity_bytes=1)
    plan = FaultsConfig(delay_ms=100.0)
    assert write(FaultyStorage(inner, plan, seed=0, clock=SimulatedClock()), keys(1)) == [False]


@pytest.mark.parametrize("name", ["contains", "read", "write", "delete"])
def test_every_call_can_fail_and_be_delayed(name: str) -> None:
    arguments = (keys(1), [poisoned()]) if name in ("read", "write") else (keys(1),)
    waiting = Waiting(FaultsConfig(error_rate=1.0, delay_ms=100.0))
    write(waiting.inner, keys(1))
    with pytest.raises(StorageError, match="injected"):
        getattr(waiting.storage, name)(*arguments)
    assert waiting.waited_ns == [to_ns(0.1)]
    assert waiting.storage.injected == {Fault.error: 1, Fault.delay: 1}
    assert waiting.inner.contains(keys(1)) == [True]


def test_what_is_left_passes_through() -> None:
    waiting = Waiting(FaultsConfig(delay_ms=100.0))
    write(waiting.storage, keys(1, 2))
    waiting.storage.delete(keys(1))
    assert waiting.storage.contains(keys(1, 2)) == [False, True]
    assert waiting.storage.stats() == waiting.inner.stats()
    waiting.storage.close()
    assert waiting.inner.stats().stored_pages == 0


class Switched:
    """Memory that can be taken away, and counts the calls that reach it."""

    def __init__(self) -> None:
        self.memory = MemoryStorage(capacity_bytes=None)
        self.is_gone = False
        self.calls = 0

    def contains(self, page_keys: list[bytes]) -> list[bool]:
        self.calls += 1
        if self.is_gone:
            raise StorageError("gone")
        return self.memory.contains(page_keys)


def breaker(clock: SimulatedClock) -> tuple[BreakerStorage, Switched]:
    inner = Switched()
    inner.memory.write(keys(1), [payload(keys(1)[0])])
    return BreakerStorage(inner, clock=clock, max_failures=3, retry_s=5.0), inner  # type: ignore[arg-type]


def test_a_failed_call_is_a_miss() -> None:
    storage, inner = breaker(SimulatedClock())
    inner.is_gone = True
    assert storage.contains(keys(1)) == [False]


def test_failures_that_are_not_in_a_row_do_not_bypass() -> None:
    storage, inner = breaker(SimulatedClock())
    for _ in range(5):
        inner.is_gone = True
        storage.contains(keys(1))
        storage.contains(keys(1))
        inner.is_gone = False
        storage.contains(keys(1))
    assert not storage.is_bypassed


def test_an_engine_that_keeps_failing_is_left_alone() -> None:
    storage, inner = breaker(SimulatedClock())
    inner.is_gone = True
    for _ in range(10):
        storage.contains(keys(1))
    assert (inner.calls, storage.bypassed_calls) == (3, 7)


def test_one_probe_is_let_through_after_the_pause() -> None:
    clock = SimulatedClock()
    storage, inner = breaker(clock)
    inner.is_gone = True
    for _ in range(3):
        storage.contains(keys(1))
    clock.wait_until(to_ns(5.0))
    storage.contains(keys(1))
    storage.contains(keys(1))
    assert inner.calls == 4


def test_an_engine_that_answers_its_probe_is_used_again() -> None:
    clock = SimulatedClock()
    storage, inner = breaker(clock)
    inner.is_gone = True
    for _ in range(3):
        storage.contains(keys(1))
    inner.is_gone = False
    clock.wait_until(to_ns(5.0))
    assert storage.contains(keys(1)) == [True]
    assert not storage.is_bypassed
