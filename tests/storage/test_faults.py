"""Injected faults: which callers see them, how long they take, and that the seed decides them."""

import math
from dataclasses import fields
from statistics import mean, stdev

import pytest
from storage_engines import opened

from hicache.clock import SimulatedClock, Stall, to_ns
from hicache.config import FaultsConfig
from hicache.storage.base import Storage, StorageError
from hicache.storage.contract import (
    PAGE_BYTES,
    ContractError,
    keys,
    num_whole,
    payload,
    poisoned,
    read,
    write,
)
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.breaker import BreakerStorage
from hicache.storage.guards.faults import Fault, FaultyStorage

RATES = [field.name for field in fields(FaultsConfig) if field.name.endswith("_rate")]
NOTICED = [name for name in RATES if name != "corrupt_rate"]  # by the caller of the engine
PLANS = {
    "delay": FaultsConfig(delay_ms=10.0, delay_sigma=1.0),
    **{name.removesuffix("_rate"): FaultsConfig(**{name: 0.3}) for name in NOTICED},
    "gone": FaultsConfig(delay_ms=10.0, gone_from_s=0.2, gone_for_s=0.4),
    "all": FaultsConfig(
        delay_ms=10.0,
        delay_sigma=1.0,
        gone_from_s=0.5,
        gone_for_s=0.5,
        **dict.fromkeys(NOTICED, 0.1),
    ),
}
OUTAGE = {"gone_from_s": 1.0, "gone_for_s": 1.0}


class Faulty(FaultyStorage):
    """Memory with faults. `waited_ns` lists its delays, which do not advance its clock."""

    def __init__(self, *, seed: int = 0, deadline_s: float = math.inf, **plan: float) -> None:
        self.memory = MemoryStorage(capacity_bytes=None)
        self.clock = SimulatedClock()
        self.waited_ns: list[int] = []
        super().__init__(
            self.memory,
            FaultsConfig(**plan),
            seed=seed,
            clock=self.clock,
            wait=self.waited_ns.append,
            deadline_s=deadline_s,
        )

    def fails(self, at_s: float = 0.0) -> bool:
        self.clock.wait_until(to_ns(at_s))
        try:
            self.contains([])
        except StorageError:
            return True
        return False


def timed(plan: FaultsConfig, clock: SimulatedClock) -> FaultyStorage:
    """Memory with faults whose delays advance the clock."""
    return FaultyStorage(MemoryStorage(capacity_bytes=None), plan, seed=0, clock=clock)


def use(storage: Storage) -> int:
    """Write and read for a while; return how many pages were read."""
    found = 0
    for turn in range(40):
        some = keys(*range(turn, turn + 8))
        write(storage, some)
        found += num_whole(storage, some)
    return found


@pytest.mark.parametrize(
    ("name", "plan"), [*(("memory", plan) for plan in PLANS), ("slab", "all"), ("file", "all")]
)
def test_a_breaker_turns_every_fault_into_misses(name, plan, tmp_path):
    clock = SimulatedClock()
    with opened(name, tmp_path, 12 * PAGE_BYTES) as engine:
        faulty = FaultyStorage(engine, PLANS[plan], seed=1, clock=clock)
        assert use(BreakerStorage(faulty, clock=clock, retry_s=0.05)) > 0
    expected = set(Fault) - {Fault.corrupt} if plan == "all" else {Fault[plan]}
    assert expected <= {fault for fault, count in faulty.injected.items() if count}


def test_a_corrupt_page_is_reported_as_a_hit():
    faulty = Faulty(corrupt_rate=0.3)
    with pytest.raises(ContractError, match="wrong bytes"):
        use(faulty)
    assert faulty.injected[Fault.corrupt] == 1


def test_equal_seeds_give_equal_faults():
    found = [use(Faulty(seed=seed, missing_rate=0.1, full_rate=0.1)) for seed in (5, 5, 6)]
    assert found[0] == found[1] != found[2]


def test_a_failed_write_may_or_may_not_have_stored_its_pages():
    stored = set()
    for seed in range(20):
        faulty = Faulty(seed=seed, error_rate=1.0)
        with pytest.raises(StorageError, match="injected"):
            write(faulty, keys(1))
        stored.update(faulty.memory.contains(keys(1)))
    assert stored == {True, False}


@pytest.mark.parametrize("name", RATES)
def test_a_rate_must_be_between_0_and_1(name):
    for share in (-0.01, 1.5):
        with pytest.raises(ValueError, match=rf"{name} must be between 0 and 1, got {share}"):
            FaultsConfig(**{name: share})
    assert FaultsConfig(**{name: 0.0}).is_harmless
    assert not FaultsConfig(**{name: 1.0}).is_harmless


@pytest.mark.parametrize("name", ["delay_ms", "delay_sigma", "failure_ms"])
def test_a_time_must_not_be_negative(name):
    with pytest.raises(ValueError, match=rf"{name} must be at least 0, got -0.1"):
        FaultsConfig(**{name: -0.1})
    assert FaultsConfig(**{name: 0.0}).is_harmless
    assert FaultsConfig(**{name: 1.0}).is_harmless == (name != "delay_ms")


def test_delays_are_log_normal_around_their_median():
    faulty = Faulty(delay_ms=250.0, delay_sigma=0.5)
    for _ in range(400):
        faulty.contains([])
    logs = [math.log(each / to_ns(0.25)) for each in faulty.waited_ns]
    assert abs(mean(logs)) < 0.08
    assert abs(stdev(logs) - 0.5) < 0.06
    assert faulty.injected == {Fault.delay: 400}


def test_a_call_that_would_take_too_long_fails_at_its_deadline():
    late = Faulty(delay_ms=250.0, deadline_s=0.2)
    with pytest.raises(StorageError, match=r"no answer within 0\.2 s"):
        late.contains([])
    assert late.waited_ns == [to_ns(0.2)]
    in_time = Faulty(delay_ms=250.0, deadline_s=0.25)
    assert not in_time.fails()
    assert in_time.waited_ns == [to_ns(0.25)]


def test_all_calls_fail_during_an_outage():
    faulty = Faulty(failure_ms=10.0, **OUTAGE)
    moments = (0, 0.999_999_999, 1.0, 1.999_999_999, 2.0, 3.5)
    assert [faulty.fails(at) for at in moments] == [False, False, True, True, False, False]
    assert faulty.injected == {Fault.gone: 2}
    assert faulty.waited_ns == [to_ns(0.01)] * 2
    assert Faulty(gone_from_s=1.0).fails(1e6)  # an outage without an end


def test_a_delayed_call_fails_if_the_outage_has_begun_when_it_reaches_the_engine():
    faulty = Faulty(delay_ms=500.0, **OUTAGE)
    assert [faulty.fails(at) for at in (0.499, 0.5, 1.499, 1.5)] == [False, True, True, False]


def test_a_delay_advances_the_clock_if_no_wait_function_is_given():
    clock = SimulatedClock()
    storage = timed(FaultsConfig(delay_ms=500.0, **OUTAGE), clock)
    storage.contains([])
    assert clock.now() == to_ns(0.5)
    with pytest.raises(StorageError, match="unavailable at 1 s"):
        storage.contains([])


def test_an_outage_is_checked_at_the_time_after_a_delay_that_overslept():
    class Oversleeping(SimulatedClock):
        def wait_until(self, time_ns: int) -> None:
            super().wait_until(time_ns + to_ns(0.5))

    with pytest.raises(StorageError, match="unavailable at 1 s"):
        timed(FaultsConfig(delay_ms=500.0, **OUTAGE), Oversleeping()).contains([])


@pytest.mark.parametrize(("failure_ms", "waited_ns"), [(300.0, [to_ns(0.3)]), (0.0, [])])
def test_a_failed_call_takes_the_configured_failure_time(failure_ms, waited_ns):
    faulty = Faulty(error_rate=1.0, failure_ms=failure_ms)
    assert faulty.fails()
    assert faulty.waited_ns == waited_ns


def test_a_stall_sums_delays_until_it_is_taken_and_then_is_zero():
    stall = Stall()
    assert stall.take() == 0
    stall.add(3)
    stall.add(4)
    assert (stall.take(), stall.take()) == (7, 0)


@pytest.mark.parametrize("num_bytes", [1, 7, PAGE_BYTES])
@pytest.mark.parametrize("name", ["short", "missing"])
def test_an_injected_miss_leaves_foreign_bytes_in_the_buffer(name, num_bytes):
    faulty = Faulty(**{f"{name}_rate": 1.0})
    page = payload(keys(1)[0], num_bytes)
    faulty.memory.write(keys(1), [page])
    buffer = poisoned(num_bytes)
    assert faulty.read(keys(1), [buffer]) == [False]
    kept = num_bytes // 2 if name == "short" else 0
    assert bytes(buffer) == bytes(page[:kept]) + b"\xfa" * (num_bytes - kept)
    assert faulty.injected[Fault[name]] == 1


def test_a_corrupt_page_has_one_wrong_bit_anywhere():
    faulty = Faulty(corrupt_rate=1.0)
    faulty.memory.write(keys(1), [memoryview(bytes(4))])
    wrong = set()
    for _ in range(500):
        buffer = memoryview(bytearray(4))
        assert faulty.read(keys(1), [buffer]) == [True]
        wrong.add(bytes(buffer))
    assert wrong == {(1 << bit).to_bytes(4, "little") for bit in range(32)}


def test_a_page_without_bytes_is_never_corrupt():
    faulty = Faulty(corrupt_rate=1.0)
    faulty.memory.write(keys(1), [memoryview(b"")])
    assert faulty.read(keys(1, 2), [memoryview(b""), poisoned()]) == [True, False]
    assert faulty.injected[Fault.corrupt] == 0


def test_no_fault_is_injected_into_the_read_of_a_page_that_is_not_stored():
    faulty = Faulty(missing_rate=1.0, short_rate=1.0, corrupt_rate=1.0)
    assert read(faulty, keys(1)) == [None]
    assert not faulty.injected


def test_an_injected_full_store_refuses_single_pages_of_a_write():
    faulty = Faulty(full_rate=0.5)
    some = keys(*range(40))
    results = write(faulty, some)
    assert 0 < sum(results) < 40
    assert faulty.memory.contains(some) == results
    assert faulty.injected == {Fault.full: 40 - sum(results)}
    assert write(Faulty(full_rate=1.0), some) == [False] * 40


@pytest.mark.parametrize("name", ["contains", "read", "write", "delete"])
def test_every_call_can_fail_and_be_delayed(name):
    arguments = (keys(1), [poisoned()]) if name in ("read", "write") else (keys(1),)
    faulty = Faulty(error_rate=1.0, delay_ms=100.0)
    write(faulty.memory, keys(1))
    with pytest.raises(StorageError, match="injected"):
        getattr(faulty, name)(*arguments)
    assert faulty.waited_ns == [to_ns(0.1)]
    assert faulty.injected == {Fault.error: 1, Fault.delay: 1}
    assert faulty.memory.contains(keys(1)) == [True]


def test_stats_and_close_reach_the_engine():
    faulty = Faulty(error_rate=1.0)
    write(faulty.memory, keys(1))
    assert faulty.stats() == faulty.memory.stats()
    faulty.close()
    assert faulty.memory.stats().stored_pages == 0
