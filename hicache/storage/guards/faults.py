"""Injects every kind of storage fault, in an order that the seed determines."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import compress
from random import Random
from threading import Lock
from typing import NoReturn

from hicache.clock import SECOND_NS, Clock, to_ns
from hicache.config import FaultsConfig
from hicache.storage.base import Storage, StorageError
from hicache.storage.guards.base import GuardStorage, Result


class Fault(Enum):
    delay = auto()
    error = auto()
    gone = auto()
    missing = auto()
    short = auto()
    corrupt = auto()
    full = auto()


class FaultyStorage(GuardStorage):
    """A wrapper that injects faults into the calls of a storage engine, drawn from `seed`.

    Faults are drawn in the order of the calls. A write that fails may have stored its pages.
    Missing and half-read pages are reported as misses. A corrupt page is reported as a hit, with
    one bit flipped; the caller must detect it. The stored page does not change, so a later read can
    return it intact. `injected` counts the faults by type. A delay advances the clock, or calls
    `wait` with its length in nanoseconds if `wait` is given. A call that would take longer than
    `deadline_s` seconds fails after that time.
    """

    def __init__(
        self,
        inner: Storage,
        plan: FaultsConfig,
        *,
        seed: int,
        clock: Clock,
        wait: Callable[[int], None] | None = None,
        deadline_s: float = math.inf,
    ) -> None:
        super().__init__(inner)
        self._plan = plan
        self._deadline_s = deadline_s
        self._clock = clock
        self._wait = wait or (lambda delay_ns: clock.wait_until(clock.now() + delay_ns))
        self._rng = Random(seed)
        self._lock = Lock()
        self.injected: Counter[Fault] = Counter()

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        results = super().read(keys, buffers)
        if not (self._plan.missing_rate or self._plan.short_rate or self._plan.corrupt_rate):
            return results
        return [
            result and self._spoil(buffer) for buffer, result in zip(buffers, results, strict=True)
        ]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self._delay()
        fails = self._draw(Fault.error, self._plan.error_rate)
        if fails and self._draw_half():
            self._fail("the write failed")
        kept = [not self._draw(Fault.full, self._plan.full_rate) for _ in keys]
        results = iter(self._inner.write(list(compress(keys, kept)), list(compress(buffers, kept))))
        if fails:
            self._fail("the write failed after its pages were stored")
        return [is_kept and next(results) for is_kept in kept]

    def _call(self, call: Callable[[], Result], otherwise: Result) -> Result:
        self._delay()
        if self._draw(Fault.error, self._plan.error_rate):
            self._fail("the call failed")
        return call()

    def _delay(self) -> None:
        plan = self._plan
        delay_ns = 0
        if plan.delay_ms:
            with self._lock:
                factor = math.exp(self._rng.gauss(0.0, plan.delay_sigma))
                self.injected[Fault.delay] += 1
            delay_s = plan.delay_ms / 1000 * factor
            if delay_s > self._deadline_s:
                self._wait(to_ns(self._deadline_s))
                raise StorageError(f"injected fault: no answer within {self._deadline_s:g} s")
            delay_ns = to_ns(delay_s)
            before = self._clock.now()
            self._wait(delay_ns)
            delay_ns -= self._clock.now() - before  # the clock has counted this part
        now_s = (self._clock.now() + max(delay_ns, 0)) / SECOND_NS
        if plan.is_gone(now_s):
            with self._lock:
                self.injected[Fault.gone] += 1
            self._fail(f"storage is unavailable at {now_s:g} s")

    def _fail(self, reason: str) -> NoReturn:
        if self._plan.failure_ms:
            self._wait(to_ns(self._plan.failure_ms / 1000))
        raise StorageError(f"injected fault: {reason}")

    def _draw_half(self) -> bool:
        with self._lock:
            return self._rng.random() < 0.5

    def _draw(self, fault: Fault, share: float) -> bool:
        if not share:
            return False
        with self._lock:
            drawn = self._rng.random() < share
            self.injected[fault] += drawn
        return drawn

    def _spoil(self, buffer: memoryview) -> bool:
        if self._draw(Fault.missing, self._plan.missing_rate):
            self._overwrite(buffer)
            return False
        if self._draw(Fault.short, self._plan.short_rate):
            self._overwrite(buffer[buffer.nbytes // 2 :])
            return False
        if buffer.nbytes and self._draw(Fault.corrupt, self._plan.corrupt_rate):
            with self._lock:
                at = self._rng.randrange(buffer.nbytes)
                buffer[at] ^= 1 << self._rng.randrange(8)
        return True

    def _overwrite(self, buffer: memoryview) -> None:
        # callers must not use the buffer of a missed page
        buffer[:] = b"\xfa" * buffer.nbytes
