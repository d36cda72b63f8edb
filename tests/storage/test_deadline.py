"""Engines that block: the caller goes on in time, and nothing touches its buffers afterwards.

Deadlines here are of two kinds: too long to pass in a test, or for calls that never end before
the test lets them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from threading import enumerate as enumerate_threads

import numpy as np
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
    with pytest.raises(StorageError, match="all 2 I/O threads are blocked"):
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


def test_a_call_that_has_not_begun_never_does() -> None:
    threads = DeadlineThreads(num_threads=1, deadline_s=NEVER_S)
    go, done = Event(), []
    with pytest.raises(StorageError, match=r"no answer within 0\.02 s"):
        threads.call(lambda: go.wait(NEVER_S), deadline_s=0.02)
    go.set()
    # queued behind it, whether or not it has come back by now
    for _ in range(1_000_000):
        try:
            threads.call(lambda: done.append(1))
            break
        except StorageError:
            continue
    stuck = Event()
    with ThreadPoolExecutor(1) as other:
        blocked = other.submit(threads.call, lambda: stuck.wait(NEVER_S))
        with pytest.raises(StorageError, match="no answer"):
            threads.call(lambda: done.append(2), deadline_s=SOON_S)
        stuck.set()
        assert blocked.result(NEVER_S)
    threads.call(lambda: done.append(3))
    assert done == [1, 3]
    threads.close()


def test_four_calls_may_be_given_up_before_nobody_is_left(blocking: Blocking) -> None:
    storage = DeadlineStorage(blocking, deadline_s=SOON_S)
    for _ in range(4):
        with pytest.raises(StorageError, match="no answer"):
            storage.read(keys(1), [poisoned()])
    with pytest.raises(StorageError, match="all 4 I/O threads are blocked in calls that timed out"):
        storage.read(keys(1), [poisoned()])


def test_threads_end_when_they_are_closed() -> None:
    before = set(enumerate_threads())
    storage = DeadlineStorage(MemoryStorage(capacity_bytes=None), deadline_s=NEVER_S, num_threads=3)
    threads = set(enumerate_threads()) - before
    assert len(threads) == 3
    assert all(thread.daemon for thread in threads)  # a program ends without them
    write(storage, keys(1))
    storage.close()
    for thread in threads:
        thread.join(NEVER_S)
        assert not thread.is_alive()


def test_an_engine_that_cannot_be_closed_leaves_no_threads() -> None:
    class Stubborn(MemoryStorage):
        def close(self) -> None:
            raise StorageError("stubborn")

    before = set(enumerate_threads())
    storage = DeadlineStorage(Stubborn(capacity_bytes=None), deadline_s=NEVER_S)
    with pytest.raises(StorageError, match="stubborn"):
        storage.close()
    for thread in set(enumerate_threads()) - before:
        thread.join(NEVER_S)
        assert not thread.is_alive()


def test_every_call_is_the_engines() -> None:
    inner = MemoryStorage(capacity_bytes=PAGE_BYTES)
    storage = DeadlineStorage(inner, deadline_s=NEVER_S)
    assert write(storage, keys(1)) == [True]
    assert storage.contains(keys(1, 2)) == [True, False]
    assert storage.write(keys(2), [payload(keys(2)[0], PAGE_BYTES + 1)]) == [False]
    assert storage.stats() == inner.stats()
    storage.delete(keys(1))
    assert inner.contains(keys(1)) == [False]
    write(storage, keys(1))
    storage.close()
    assert inner.contains(keys(1)) == [False]


def test_a_miss_leaves_the_buffer_as_it_is() -> None:
    storage = DeadlineStorage(MemoryStorage(capacity_bytes=None), deadline_s=NEVER_S)
    write(storage, keys(1))
    buffers = [poisoned(), poisoned()]
    assert storage.read(keys(2, 1), buffers) == [False, True]
    assert buffers == [poisoned(), payload(keys(1)[0])]
    storage.close()


def test_staging_is_used_again_and_is_as_long_as_the_longest_batch() -> None:
    class Addressed(MemoryStorage):
        seen: list[memoryview]  # kept, or another one could get its address

        def _saw(self, buffers: Sequence[memoryview]) -> None:
            self.seen.append(buffers[0])

        def read(self, page_keys, buffers):
            self._saw(buffers)
            return super().read(page_keys, buffers)

        def write(self, page_keys, buffers):
            self._saw(buffers)
            return super().write(page_keys, buffers)

    inner = Addressed(capacity_bytes=None)
    inner.seen = []
    storage = DeadlineStorage(inner, deadline_s=NEVER_S)
    write(storage, keys(1, 2))
    read(storage, keys(1, 2))
    read(storage, keys(1))
    write(storage, keys(3, 4))
    assert len({np.frombuffer(each, np.uint8).ctypes.data for each in inner.seen}) == 1
    storage.close()


def test_a_blocking_engine_behind_a_breaker_is_a_miss_and_then_left_alone(
    blocking: Blocking,
) -> None:
    clock = SimulatedClock()
    storage = BreakerStorage(
        DeadlineStorage(blocking, deadline_s=SOON_S), clock=clock, max_failures=2
    )
    assert [read(storage, keys(1)) for _ in range(4)] == [[None]] * 4
    assert (storage.failed_calls, storage.bypassed_calls) == (2, 2)
