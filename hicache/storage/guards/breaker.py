"""A circuit breaker: bypasses a failing engine, and tries it again later."""

from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from hicache.clock import Clock, to_ns
from hicache.storage.base import Storage, StorageError, StorageStats
from hicache.storage.guards.base import GuardStorage, Result


class BreakerStorage(GuardStorage):
    """A circuit breaker around a storage engine: failed calls are misses and raise no error.

    After `max_failures` failed calls in a row, the breaker bypasses the engine. Reads then miss,
    writes store nothing, and deletions are dropped, all at no cost. Dropped deletions are harmless,
    because the page of a key never changes. After `retry_s` seconds, one call reaches the engine as
    a probe. If the probe succeeds, the engine is used again. If the probe fails, the bypass lasts
    another `retry_s` seconds.
    """

    def __init__(
        self, inner: Storage, *, clock: Clock, max_failures: int = 3, retry_s: float = 5.0
    ) -> None:
        if max_failures < 1:
            raise ValueError(f"max_failures must be at least 1, got {max_failures}")
        super().__init__(inner)
        self._clock = clock
        self._max_failures = max_failures
        self._retry_ns = to_ns(retry_s)
        self._lock = Lock()
        self._failures = 0  # consecutive
        self._retry_at = 0
        self._is_probing = False
        self.last_stats = StorageStats()  # as of the last `stats` or `close`
        self.failed_calls = 0
        self.bypassed_calls = 0

    @property
    def is_bypassed(self) -> bool:
        return self._failures >= self._max_failures

    def stats(self) -> StorageStats:
        self.last_stats = self._call(self._inner.stats, self.last_stats)
        return self.last_stats

    def close(self) -> None:
        with suppress(StorageError):  # a bypassed engine is asked too, for its final counters
            self.last_stats = self._inner.stats()
        try:
            self._inner.close()
        except StorageError:
            self.failed_calls += 1

    def _call(self, call: Callable[[], Result], otherwise: Result) -> Result:
        with self._lock:
            if self.is_bypassed:
                if self._is_probing or self._clock.now() < self._retry_at:
                    self.bypassed_calls += 1
                    return otherwise
                self._is_probing = True
        failed = True  # also after an exception of another type
        try:
            result = call()
            _check_answer(result, otherwise)
            failed = False
        except StorageError:
            result = otherwise
        finally:
            with self._lock:
                self._is_probing = False
                if failed:
                    self._failures += 1
                    self.failed_calls += 1
                    self._retry_at = self._clock.now() + self._retry_ns
                else:
                    self._failures = 0
        return result


def _check_answer(given: object, otherwise: object) -> None:
    # our engines return the right types, but a user's engine may not; every call passes here
    if not isinstance(otherwise, list):
        return
    if not isinstance(given, list) or len(given) != len(otherwise):
        raise ValueError(
            f"a storage engine must return a list of {len(otherwise)} bools, one per key, got "
            f"{given!r:.80}"
        )
