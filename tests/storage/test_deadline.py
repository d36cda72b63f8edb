"""Engines that block: the caller goes on in time, and nothing touches its buffers afterwards.

Deadlines here are of two kinds: too long to pass in a test, or for calls that never end before
the test lets them.
"""

from collections.abc import Iterator, Sequence
from threading import Event

import pytest
from storage_pages import PAGE_BYTES, keys, payload, poisoned, read, write

from hicache.clock import SimulatedClock
from hicache.storage.base import StorageError
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.breaker import BreakerStorage
from hicache.storage.guards.deadline import DeadlineStorage, DeadlineThreads

NEVER_S = 60.0
SOON_S = 0.01


class Blocking(MemoryStorage):
    """Memory whose reads and writes wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=None)
        self.go = Event()
        self.is_over = Event()

    def read(self, page_keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self.go.wait(NEVER_S)
        results = super().read(page_keys, buffers)
        self.is_over.set()
        return results

    def write(self, page_keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self.go.wait(NEVER_S)
        results = super().write(page_keys, buffers)
        self.is_over.set()
        return results


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    storage = Blocking()
    yield storage
    storage.go.set()


def test_pages_pass_through_in_time() -> None:
    storage = DeadlineStorage(MemoryStorage(capacity_bytes=None), deadline_s=NEVER_S)
    write(storage, keys(1, 3))
    assert read(storage, keys(1, 2, 3)) == [payload(keys(1)[0]), None, payload(keys(3)[0])]
    storage.close()


def test_staging_grows_with_the_batch() -> None:
    storage = DeadlineStorage(MemoryStorage(capacity_bytes=None), deadline_s=NEVER_S)
    for count in (1, 5, 2):
        write(storage, keys(*range(count)))
        assert None not in read(storage, keys(*range(count)))
    storage.close()


def test_an_error_of_the_engine_is_passed_on() -> None:
    threads = DeadlineThreads(num_threads=1, deadline_s=NEVER_S)
    with pytest.raises(ZeroDivisionError):
        threads.call(lambda: 1 // 0)
    threads.close()


def test_a_timeout_of_the_engine_is_not_taken_for_ours() -> None:
    def time_out() -> None:
        raise TimeoutError("the engine's own")

    threads = DeadlineThreads(num_threads=1, deadline_s=NEVER_S)
    with pytest.raises(TimeoutError, match="the engine's own"):
        threads.call(time_out)
    threads.close()


def test_a_call_that_blocks_is_given_up(blocking: Blocking) -> None:
    storage = DeadlineStorage(blocking, deadline_s=SOON_S)
    with pytest.raises(StorageError, match=r"no answer within 0.01 s"):
        storage.read(keys(1), [poisoned()])


def test_a_read_that_was_given_up_never_touches_the_buffer(blocking: Blocking) -> None:
    MemoryStorage.write(blocking, keys(1), [payload(keys(1)[0])])
    storage = DeadlineStorage(blocking, deadline_s=SOON_S)
    buffer = poisoned()
    with pytest.raises(StorageError):
        storage.read(keys(1), [buffer])
    blocking.go.set()
    assert blocking.is_over.wait(NEVER_S)
    assert buffer == poisoned()


def test_a_write_that_was_given_up_stores_what_was_meant(blocking: Blocking) -> None:
    storage = DeadlineStorage(blocking, deadline_s=SOON_S)
    buffer = memoryview(bytearray(payload(keys(1)[0])))
    with pytest.raises(StorageError):
        storage.write(keys(1), [buffer])
    buffer[:] = b"\0" * PAGE_BYTES  # the caller has another use for it
    blocking.go.set()
    assert blocking.is_over.wait(NEVER_S)
    back = poisoned()
    assert MemoryStorage.read(blocking, keys(1), [back]) == [True]
    assert back == payload(keys(1)[0])


def test_calls_fail_at_once_while_every_thread_is_blocked(blocking: Blocking) -> None:
    storage = DeadlineStorage(blocking, deadline_s=SOON_S, num_threads=2)
    for _ in range(2):
        with pytest.raises(StorageError, match="no answer"):
            storage.read(keys(1), [poisoned()])
    with pytest.raises(StorageError, match="all 2 threads wait"):
        storage.contains(keys(1))


def test_a_thread_that_comes_back_is_used_again(blocking: Blocking) -> None:
    storage = DeadlineStorage(blocking, deadline_s=SOON_S, num_threads=1)
    with pytest.raises(StorageError):
        storage.read(keys(1), [poisoned()])
    blocking.go.set()
    assert blocking.is_over.wait(NEVER_S)
    # the thread is free a moment after the call is over: asked again until it is
    for _ in range(1_000_000):
        try:
            assert storage.contains(keys(1)) == [False]
            break
        except StorageError:
            continue
    else:
        pytest.fail("the thread never came back")


def test_a_blocking_engine_behind_a_breaker_is_a_miss_and_then_left_alone(
    blocking: Blocking,
) -> None:
    clock = SimulatedClock()
    storage = BreakerStorage(
        DeadlineStorage(blocking, deadline_s=SOON_S), clock=clock, max_failures=2
    )
    assert [read(storage, keys(1)) for _ in range(4)] == [[None]] * 4
    assert (storage.failed_calls, storage.bypassed_calls) == (2, 2)
