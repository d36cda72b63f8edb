"""Engines that fail: never a wrong byte, never an error that gets through, and back again."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from storage_engines import ENGINES
from storage_pages import PAGE_BYTES, assert_whole_or_absent, keys, payload, read, write

from hicache.clock import SimulatedClock, to_ns
from hicache.storage.base import Storage, StorageError
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.breaker import BreakerStorage
from hicache.storage.guards.checked import CheckedStorage
from hicache.storage.guards.faults import Fault, FaultPlan, FaultyStorage

ALL_AT_ONCE = FaultPlan(
    delay_median_s=0.01,
    delay_sigma=1.0,
    error_share=0.1,
    missing_share=0.1,
    short_share=0.1,
    corrupt_share=0.1,
    full_share=0.1,
    gone_s=((0.5, 1.0),),
)
PLANS = {
    "delay": FaultPlan(delay_median_s=0.01, delay_sigma=1.0),
    "error": FaultPlan(error_share=0.3),
    "missing": FaultPlan(missing_share=0.3),
    "short": FaultPlan(short_share=0.3),
    "corrupt": FaultPlan(corrupt_share=0.3),
    "full": FaultPlan(full_share=0.3),
    "gone": FaultPlan(delay_median_s=0.01, gone_s=((0.2, 0.6),)),
    "all": ALL_AT_ONCE,
}


def faulty(plan: FaultPlan, *, seed: int = 0) -> FaultyStorage:
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
    name: str, plan: FaultPlan, tmp_path: Path
) -> None:
    clock = SimulatedClock()
    engine = ENGINES[name].open(str(tmp_path), "test", 12 * PAGE_BYTES)
    spoilt = FaultyStorage(engine, plan, seed=1, clock=clock)
    safe = BreakerStorage(CheckedStorage(spoilt), clock=clock, retry_s=0.05)
    with closing(safe):
        assert use(safe) > 0


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault.name in PLANS])
def test_a_plan_injects_its_fault(fault: Fault) -> None:
    clock = SimulatedClock()
    spoilt = FaultyStorage(
        MemoryStorage(capacity_bytes=None), PLANS[fault.name], seed=1, clock=clock
    )
    use(BreakerStorage(CheckedStorage(spoilt), clock=clock, retry_s=0.05))
    assert spoilt.injected[fault] > 0


def test_corrupt_pages_get_through_without_the_check() -> None:
    with pytest.raises(AssertionError, match="wrong bytes"):
        use(faulty(FaultPlan(corrupt_share=0.3)))


def test_corrupt_pages_are_counted_as_damaged() -> None:
    spoilt = faulty(FaultPlan(corrupt_share=0.3))
    storage = CheckedStorage(spoilt)
    use(storage)
    assert storage.stats().damaged_pages == spoilt.injected[Fault.corrupt]


def test_a_page_whose_digest_is_not_known_is_a_miss() -> None:
    inner = MemoryStorage(capacity_bytes=None)
    write(inner, keys(1))
    assert read(CheckedStorage(inner), keys(1)) == [None]


def test_the_same_seed_gives_the_same_faults() -> None:
    plan = replace(ALL_AT_ONCE, error_share=0.0, corrupt_share=0.0, gone_s=())
    assert use(faulty(plan, seed=5)) == use(faulty(plan, seed=5))
    assert use(faulty(plan, seed=5)) != use(faulty(plan, seed=6))


def test_delays_pass_on_the_clock() -> None:
    clock = SimulatedClock()
    plan = FaultPlan(delay_median_s=0.25)
    FaultyStorage(MemoryStorage(capacity_bytes=None), plan, seed=0, clock=clock).contains([])
    assert clock.now() == to_ns(0.25)


def test_a_failed_write_may_have_stored_its_pages() -> None:
    stored = set()
    for seed in range(20):
        inner = MemoryStorage(capacity_bytes=None)
        plan = FaultPlan(error_share=1.0)
        with pytest.raises(StorageError, match="injected"):
            write(FaultyStorage(inner, plan, seed=seed, clock=SimulatedClock()), keys(1))
        stored.update(inner.contains(keys(1)))
    assert stored == {True, False}


def test_a_share_above_one_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"short_share must be .* got 1.5"):
        FaultPlan(short_share=1.5)


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
