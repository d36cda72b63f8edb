"""Clocks in integer nanoseconds: simulated, and the machine's own."""

import time
from typing import Protocol

SECOND_NS = 1_000_000_000
NEVER = 2**63 - 1  # a time (ns) after all events


def to_ns(seconds: float) -> int:
    return round(seconds * SECOND_NS)


class Clock(Protocol):
    """Interface of the clock by which the serving engine reads the time and waits."""

    def now(self) -> int:
        """Return the time in nanoseconds since the run began."""

    def wait_until(self, time_ns: int) -> None:
        """Wait until `time_ns`; return at once if that time has passed.

        `time_ns` counts nanoseconds since the run began.
        """


class SimulatedClock:
    """A clock for simulated time: it never sleeps, but jumps to the time that is waited for."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        return self._now

    def wait_until(self, time_ns: int) -> None:
        if time_ns > self._now:
            self._now = time_ns


class WallClock:
    """A clock that counts real time from its creation, and sleeps in order to wait."""

    def __init__(self) -> None:
        self._start = time.monotonic_ns()

    def now(self) -> int:
        return time.monotonic_ns() - self._start

    def wait_until(self, time_ns: int) -> None:
        delay = time_ns - self.now()
        if delay > 0:
            time.sleep(delay / SECOND_NS)


class Stall:
    """Adds up simulated durations in nanoseconds, until `take` returns the sum and resets it."""

    def __init__(self) -> None:
        self._pending_ns = 0

    def add(self, duration_ns: int) -> None:
        self._pending_ns += duration_ns

    def take(self) -> int:
        taken, self._pending_ns = self._pending_ns, 0
        return taken
