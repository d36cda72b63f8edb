"""Deadlines for engine calls that may block forever."""

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread

from hicache.storage.base import Storage, StorageError, StorageStats
from hicache.storage.guards.base import GuardStorage, Result


class DeadlineThreads:
    """Runs function calls in threads of its own, and waits a limited time for each call.

    A call that takes longer than its deadline is abandoned: it keeps its thread, and its result is
    dropped. A call that has not started by its deadline is cancelled. While abandoned calls hold
    all threads, further calls fail at once. The threads do not keep the program alive.
    """

    def __init__(self, *, num_threads: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._num_threads = num_threads
        self._given_up = 0
        self._lock = Lock()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for _ in range(num_threads):
            Thread(target=self._work, name="storage-deadline", daemon=True).start()

    def call(self, function: Callable[[], Result], *, deadline_s: float | None = None) -> Result:
        """Run `function` in another thread and return its result.

        `deadline_s` is the longest wait in seconds; None means the default of this object.
        Exceptions of the function are raised here.

        Raises:
            StorageError: the function takes too long, or abandoned calls hold all threads.
        """
        with self._lock:
            if self._given_up == self._num_threads:
                raise StorageError(
                    f"all {self._num_threads} I/O threads are blocked in calls that timed out"
                )
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        future: Future[Result] = Future()
        self._calls.put(lambda: _run(function, future))
        try:
            return future.result(deadline_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # it finished just now, or raised TimeoutError itself
            if not future.cancel():
                self._count_given_up(1)
                future.add_done_callback(lambda _: self._count_given_up(-1))
            raise StorageError(f"no answer within {deadline_s:g} s") from None

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # release the call's buffers now, not at the next call

    def _count_given_up(self, change: int) -> None:
        with self._lock:
            self._given_up += change


def _run(function: Callable[[], Result], future: Future[Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class DeadlineStorage(GuardStorage):
    """A wrapper around a storage engine whose calls end within a deadline.

    A call that takes longer raises `StorageError` and is abandoned. Pages are copied through
    staging buffers, so an abandoned call never touches the caller's buffers.
    """

    def __init__(self, inner: Storage, *, deadline_s: float, num_threads: int = 4) -> None:
        super().__init__(inner)
        self._threads = DeadlineThreads(num_threads=num_threads, deadline_s=deadline_s)
        self._staging: deque[memoryview] = deque(maxlen=num_threads)

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        staging = self._take_staging(sum(buffer.nbytes for buffer in buffers))
        parts = _split(staging, buffers)
        results = self._threads.call(lambda: self._inner.read(keys, parts))
        for buffer, part, result in zip(buffers, parts, results, strict=True):
            if result:
                buffer[:] = part
        self._staging.append(staging)
        return results

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        staging = self._take_staging(sum(buffer.nbytes for buffer in buffers))
        parts = _split(staging, buffers)
        for buffer, part in zip(buffers, parts, strict=True):
            part[:] = buffer
        # an abandoned write may still store its pages, whole
        results = self._threads.call(lambda: self._inner.write(keys, parts))
        self._staging.append(staging)
        return results

    def stats(self) -> StorageStats:
        return self._threads.call(self._inner.stats)

    def close(self) -> None:
        try:
            self._threads.call(self._inner.close)
        finally:
            self._threads.close()

    def _call(self, call: Callable[[], Result], otherwise: Result) -> Result:
        return self._threads.call(call)

    def _take_staging(self, num_bytes: int) -> memoryview:
        try:
            staging = self._staging.pop()
        except IndexError:
            staging = memoryview(bytearray())
        if staging.nbytes >= num_bytes:
            return staging
        return memoryview(mmap.mmap(-1, num_bytes))  # page-aligned, which some engines need


def _split(staging: memoryview, buffers: Sequence[memoryview]) -> list[memoryview]:
    parts = []
    start = 0
    for buffer in buffers:
        parts.append(staging[start : start + buffer.nbytes])
        start += buffer.nbytes
    return parts
