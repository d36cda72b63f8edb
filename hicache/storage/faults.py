"""Everything that can go wrong with an engine, on purpose and in the same order every time."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from random import Random
from threading import Lock

from hicache.clock import SECOND_NS, Clock, to_ns
from hicache.storage.base import Storage, StorageError, StorageStats


class Fault(Enum):
    """What was done to a call, or to a page of it."""

    delay = auto()
    error = auto()
    gone = auto()
    missing = auto()
    short = auto()
    corrupt = auto()
    full = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """How often each fault happens.

    A call is delayed by a log-normal time of this median and spread (0: always the median). The
    shares are of calls for `error`, and of pages for the rest.
    """

    delay_median_s: float = 0.0
    delay_sigma: float = 0.0
    error_share: float = 0.0  # the call raises; a write may have stored its pages all the same
    missing_share: float = 0.0  # a page that exists cannot be read
    short_share: float = 0.0  # half a page comes, and is reported as a miss
    corrupt_share: float = 0.0  # one byte is wrong, and reported as a hit
    full_share: float = 0.0  # a write finds no room
    gone_s: tuple[tuple[float, float], ...] = ()  # [from, to) on the clock: every call raises

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_share") and not 0 <= value <= 1:
                raise ValueError(f"{field.name} must be a share between 0 and 1, got {value}")
        if self.delay_median_s < 0 or self.delay_sigma < 0:
            raise ValueError(
                "delay_median_s and delay_sigma must be at least 0, got "
                f"{self.delay_median_s} and {self.delay_sigma}"
            )


class FaultyStorage:
    """An engine with the faults of a plan, drawn from a seed in the order of the calls.

    Corrupt pages come back as hits: what stands above has to notice. The stored pages stay as
    they are, so a page that was corrupt once is read well the next time. `injected` counts.
    """

    def __init__(self, inner: Storage, plan: FaultPlan, *, seed: int, clock: Clock) -> None:
        self._inner = inner
        self._plan = plan
        self._clock = clock
        self._rng = Random(seed)
        self._lock = Lock()
        self.injected: Counter[Fault] = Counter()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is stored now."""
        self._begin()
        return self._inner.contains(keys)

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers, more or less."""
        self._begin()
        results = self._inner.read(keys, buffers)
        return [
            result and self._spoil(buffer) for buffer, result in zip(buffers, results, strict=True)
        ]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Store pages, except those that find the disk full."""
        self._delay()
        fails = self._draw(Fault.error, self._plan.error_share)
        if fails and self._draw_half():
            raise StorageError("injected: the write failed")
        refused = [self._draw(Fault.full, self._plan.full_share) for _ in keys]
        kept = [
            (key, buffer)
            for key, buffer, full in zip(keys, buffers, refused, strict=True)
            if not full
        ]
        results = iter(self._inner.write([key for key, _ in kept], [buffer for _, buffer in kept]))
        if fails:
            raise StorageError("injected: the write failed after its pages were stored")
        return [not full and next(results) for full in refused]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget pages; missing ones are ignored."""
        self._begin()
        self._inner.delete(keys)

    def stats(self) -> StorageStats:
        """What the engine counts."""
        return self._inner.stats()

    def close(self) -> None:
        """Close the engine."""
        self._inner.close()

    def _begin(self) -> None:
        self._delay()
        if self._draw(Fault.error, self._plan.error_share):
            raise StorageError("injected: the call failed")

    def _delay(self) -> None:
        """Let the call take its time, and fail it if the engine is gone by then."""
        plan = self._plan
        if plan.delay_median_s:
            with self._lock:
                factor = math.exp(self._rng.gauss(0.0, plan.delay_sigma))
                self.injected[Fault.delay] += 1
            self._clock.wait_until(self._clock.now() + to_ns(plan.delay_median_s * factor))
        now_s = self._clock.now() / SECOND_NS
        if any(start <= now_s < end for start, end in plan.gone_s):
            with self._lock:
                self.injected[Fault.gone] += 1
            raise StorageError(f"injected: the engine is gone at {now_s:g} s")

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
        """Whether a page that was read is still reported as a hit."""
        if self._draw(Fault.missing, self._plan.missing_share):
            self._overwrite(buffer)
            return False
        if self._draw(Fault.short, self._plan.short_share):
            self._overwrite(buffer[buffer.nbytes // 2 :])
            return False
        if buffer.nbytes and self._draw(Fault.corrupt, self._plan.corrupt_share):
            with self._lock:
                at = self._rng.randrange(buffer.nbytes)
                buffer[at] ^= 1 << self._rng.randrange(8)
        return True

    def _overwrite(self, buffer: memoryview) -> None:
        """A miss leaves the buffer undefined: let nobody get away with using it."""
        buffer[:] = b"\xfa" * buffer.nbytes
