"""Deadlines of engine calls: the caller gets an error in time, and its buffers stay unchanged.

A test either uses a deadline that it cannot reach, or a call that ends only when the test lets it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from threading import enumerate as enumerate_threads

import numpy as np
import pytest

from hicache.storage.base import StorageError
from hicache.storage.contract import PAGE_BYTES, keys, payload, poisoned, read, write
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.deadline import DeadlineStorage, DeadlineThreads

NEVER_S = 60.0
SOON_S = 0.01


class Blocking(MemoryStorage):
    """Memory whose reads and writes wait for `go`, and set `is_over` at their end."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=None)
        self.go = Event()
        self.is_over = Event()

    def read(self, page_keys, buffers):
        return self._wait(super().read, page_keys, buffers)

    def write(self, page_keys, buffers):
        return self._wait(super().write, page_keys, buffers)

    def finish(self) -> None:
        self.go.set()
        assert self.is_over.wait(NEVER_S)

    def _wait(self, move, page_keys, buffers):
        self.go.wait(NEVER_S)
        results = move(page_keys, buffers)
        self.is_over.set()
        return results


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    storage = Blocking()
    yield storage
    storage.go.set()


def call_until_free(call: Callable[[], object]) -> object:
    """Repeat a call until the thread of an earlier one, which is over, takes it."""
    for _ in range(1_000_000):
        try:
            return call()
        except StorageError:
            continue
    return pytest.fail("no thread became free")


@pytest.mark.parametrize("kind", [ZeroDivisionError, TimeoutError])
def test_an_exception_of_the_engine_is_raised(kind):
    def fail() -> None:
        raise kind("the engine's own")

    threads = DeadlineThreads(num_threads=1, deadline_s=NEVER_S)
    with pytest.raises(kind, match="the engine's own"):
        threads.call(fail)
    threads.close()


def test_a_read_that_timed_out_never_changes_the_buffer(blocking):
    MemoryStorage.write(blocking, keys(1), [payload(keys(1)[0])])
    storage = DeadlineStorage(blocking, deadline_s=SOON_S)
    buffer = poisoned()
    with pytest.raises(StorageError, match=r"no answer within 0.01 s"):
        storage.read(keys(1), [buffer])
    blocking.finish()
    assert buffer == poisoned()


def test_a_write_that_timed_out_stores_the_bytes_of_its_call(blocking):
    storage = DeadlineStorage(blocking, deadline_s=SOON_S)
    buffer = memoryview(bytearray(payload(keys(1)[0])))
    with pytest.raises(StorageError):
        storage.write(keys(1), [buffer])
    buffer[:] = b"\0" * PAGE_BYTES  # the caller reuses its buffer
    blocking.finish()
    assert read(blocking, keys(1)) == [payload(keys(1)[0])]


@pytest.mark.parametrize(("options", "num_threads"), [({}, 4), ({"num_threads": 2}, 2)])
def test_calls_fail_at_once_while_calls_that_timed_out_hold_all_threads(
    options, num_threads, blocking
):
    storage = DeadlineStorage(blocking, deadline_s=SOON_S, **options)
    for _ in range(num_threads):
        with pytest.raises(StorageError, match="no answer"):
            storage.read(keys(1), [poisoned()])
    with pytest.raises(StorageError, match=f"all {num_threads} I/O threads are blocked in calls"):
        storage.contains(keys(1))


def test_a_thread_whose_call_ended_is_used_again(blocking):
    storage = DeadlineStorage(blocking, deadline_s=SOON_S, num_threads=1)
    with pytest.raises(StorageError):
        storage.read(keys(1), [poisoned()])
    blocking.finish()
    assert call_until_free(lambda: storage.contains(keys(1))) == [False]


def test_a_call_that_times_out_in_the_queue_never_starts():
    threads = DeadlineThreads(num_threads=1, deadline_s=NEVER_S)
    go, stuck, done = Event(), Event(), []
    with pytest.raises(StorageError, match=r"no answer within 0\.02 s"):
        threads.call(lambda: go.wait(NEVER_S), deadline_s=0.02)
    go.set()
    call_until_free(lambda: threads.call(lambda: done.append(1)))
    with ThreadPoolExecutor(1) as other:
        blocked = other.submit(threads.call, lambda: stuck.wait(NEVER_S))
        with pytest.raises(StorageError, match="no answer"):
            threads.call(lambda: done.append(2), deadline_s=SOON_S)
        stuck.set()
        assert blocked.result(NEVER_S)
    threads.call(lambda: done.append(3))
    assert done == [1, 3]
    threads.close()


@pytest.mark.parametrize("fails", [False, True])
def test_close_ends_all_threads_also_if_the_engine_fails_to_close(fails):
    class Closing(MemoryStorage):
        def close(self) -> None:
            super().close()
            if fails:
                raise StorageError("stubborn")

    before = set(enumerate_threads())
    inner = Closing(capacity_bytes=None)
    storage = DeadlineStorage(inner, deadline_s=NEVER_S, num_threads=3)
    threads = set(enumerate_threads()) - before
    assert len(threads) == 3
    assert all(thread.daemon for thread in threads)  # they do not keep the program alive
    write(storage, keys(1))
    if fails:
        with pytest.raises(StorageError, match="stubborn"):
            storage.close()
    else:
        storage.close()
    assert inner.contains(keys(1)) == [False]
    for thread in threads:
        thread.join(NEVER_S)
        assert not thread.is_alive()


def test_staging_memory_is_reused_and_a_miss_leaves_the_buffer_unchanged():
    seen: list[memoryview] = []  # kept, or another buffer could get the same address

    class Watched(MemoryStorage):
        def read(self, page_keys, buffers):
            seen.append(buffers[0])
            return super().read(page_keys, buffers)

        def write(self, page_keys, buffers):
            seen.append(buffers[0])
            return super().write(page_keys, buffers)

    storage = DeadlineStorage(Watched(capacity_bytes=None), deadline_s=NEVER_S)
    write(storage, keys(1, 2))
    buffers = [poisoned(), poisoned()]
    assert storage.read(keys(9, 1), buffers) == [False, True]
    assert buffers == [poisoned(), payload(keys(1)[0])]
    read(storage, keys(1))
    write(storage, keys(3, 4))
    assert len({np.frombuffer(each, np.uint8).ctypes.data for each in seen}) == 1
    write(storage, keys(*range(5, 10)))
    assert None not in read(storage, keys(*range(1, 10)))
    storage.close()


def test_a_first_batch_of_empty_pages_is_written_and_read():
    storage = DeadlineStorage(MemoryStorage(capacity_bytes=None), deadline_s=NEVER_S)
    empty = [memoryview(bytearray())]
    assert storage.write(keys(1), empty) == storage.read(keys(1), empty) == [True]
    storage.close()
