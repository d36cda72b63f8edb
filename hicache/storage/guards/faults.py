"""Everything that can go wrong with an engine, on purpose and in the same order every time."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from random import Random
from threading import Lock
from typing import NoReturn

from hicache.clock import SECOND_NS, Clock, to_ns
from hicache.config import FaultsConfig
from hicache.storage.base import Storage, StorageError
from hicache.storage.guards.base import GuardStorage, Result


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
    shares are of calls for `error`, and of pages for the rest. A call that fails, or finds the
    engine gone, takes `failure_s` to say so; one that would take longer than `deadline_s` fails
    then.
    """

    delay_median_s: float = 0.0
    delay_sigma: float = 0.0
    error_share: float = 0.0  # the call raises; a write may have stored its pages all the same
    missing_share: float = 0.0  # a page that exists cannot be read
    short_share: float = 0.0  # half a page comes, and is reported as a miss
    corrupt_share: float = 0.0  # one byte is wrong, and reported as a hit
    full_share: float = 0.0  # a write finds no room
    gone_s: tuple[tuple[float, float], ...] = ()  # [from, to) on the clock: every call raises
    failure_s: float = 0.0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_share") and not 0 <= value <= 1:
                raise ValueError(f"{field.name} must be a share between 0 and 1, got {value}")
        for name in ("delay_median_s", "delay_sigma", "failure_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    @classmethod
    def of(cls, config: FaultsConfig, *, deadline_s: float | None = None) -> "FaultPlan":
        """The plan that a configuration asks for."""
        gone: tuple[tuple[float, float], ...] = ()
        if config.gone_from_s is not None:
            length = math.inf if config.gone_for_s is None else config.gone_for_s
            gone = ((config.gone_from_s, config.gone_from_s + length),)
        return cls(
            delay_median_s=config.delay_ms / 1000,
            delay_sigma=config.delay_sigma,
            error_share=config.error_rate,
            missing_share=config.missing_rate,
            short_share=config.short_rate,
            corrupt_share=config.corrupt_rate,
            full_share=config.full_rate,
            gone_s=gone,
            failure_s=config.failure_ms / 1000,
            deadline_s=deadline_s,
        )

    @property
    def is_harmless(self) -> bool:
        """Whether nothing ever goes wrong."""
        shares = (self.error_share, self.missing_share, self.short_share, self.corrupt_share)
        return not (self.delay_median_s or any(shares) or self.full_share or self.gone_s)


class Stall:
    """Time that calls have taken where nobody sleeps: a simulation charges it to the caller."""

    def __init__(self) -> None:
        self._pending_ns = 0

    def add(self, duration_ns: int) -> None:
        """A call took so much longer."""
        self._pending_ns += duration_ns

    def take(self) -> int:
        """Nanoseconds since this was last asked."""
        taken, self._pending_ns = self._pending_ns, 0
        return taken


class FaultyStorage(GuardStorage):
    """An engine with the faults of a plan, drawn from a seed in the order of the calls.

    Corrupt pages come back as hits: what stands above has to notice. The stored pages stay as
    they are, so a page that was corrupt once is read well the next time. `injected` counts. Time
    passes on the clock, or by `wait` if it is given, which is told nanoseconds.
    """

    def __init__(
        self,
        inner: Storage,
        plan: FaultPlan,
        *,
        seed: int,
        clock: Clock,
        wait: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(inner)
        self._plan = plan
        self._clock = clock
        self._wait = self._sleep if wait is None else wait
        self._rng = Random(seed)
        self._lock = Lock()
        self.injected: Counter[Fault] = Counter()

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers, more or less."""
        results = super().read(keys, buffers)
        if not (self._plan.missing_share or self._plan.short_share or self._plan.corrupt_share):
            return results
        return [
            result and self._spoil(buffer) for buffer, result in zip(buffers, results, strict=True)
        ]

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Store pages, except those that find the disk full."""
        self._delay()
        fails = self._draw(Fault.error, self._plan.error_share)
        if fails and self._draw_half():
            self._fail("the write failed")
        refused = [self._draw(Fault.full, self._plan.full_share) for _ in keys]
        kept = [
            (key, buffer)
            for key, buffer, full in zip(keys, buffers, refused, strict=True)
            if not full
        ]
        results = iter(self._inner.write([key for key, _ in kept], [buffer for _, buffer in kept]))
        if fails:
            self._fail("the write failed after its pages were stored")
        return [not full and next(results) for full in refused]

    def _call(self, call: Callable[[], Result], otherwise: Result) -> Result:
        self._delay()
        if self._draw(Fault.error, self._plan.error_share):
            self._fail("the call failed")
        return call()

    def _delay(self) -> None:
        """Let the call take its time, and fail it if the engine is gone by then."""
        plan = self._plan
        delay_ns = 0
        if plan.delay_median_s:
            with self._lock:
                factor = math.exp(self._rng.gauss(0.0, plan.delay_sigma))
                self.injected[Fault.delay] += 1
            delay_ns = to_ns(plan.delay_median_s * factor)
            if plan.deadline_s is not None and delay_ns > to_ns(plan.deadline_s):
                self._wait(to_ns(plan.deadline_s))
                raise StorageError(f"injected: no answer within {plan.deadline_s:g} s")
            before = self._clock.now()
            self._wait(delay_ns)
            delay_ns -= self._clock.now() - before  # what of it the clock has not seen
        now_s = (self._clock.now() + max(delay_ns, 0)) / SECOND_NS
        if any(start <= now_s < end for start, end in plan.gone_s):
            with self._lock:
                self.injected[Fault.gone] += 1
            self._fail(f"the engine is gone at {now_s:g} s")

    def _fail(self, reason: str) -> NoReturn:
        if self._plan.failure_s:
            self._wait(to_ns(self._plan.failure_s))
        raise StorageError(f"injected: {reason}")

    def _sleep(self, duration_ns: int) -> None:
        self._clock.wait_until(self._clock.now() + duration_ns)

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
