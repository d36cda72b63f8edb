"""Clocks in integer nanoseconds: simulated, and the machine's own."""

import time
from typing import Protocol

SECOND_NS = 1_000_000_000


def to_ns(seconds: float) -> int:
    return round(seconds * SECOND_NS)


class Clock(Protocol):
    """Gives the time to the engine, and lets it wait."""

    def now(self) -> int:
        """Nanoseconds since the run began."""
        ...

    def wait_until(self, time_ns: int) -> None:
        """Return at `time_ns` or later; at once if that has passed."""
        ...


class SimulatedClock:
    """Jumps to the next event."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        return self._now

    def wait_until(self, time_ns: int) -> None:
        if time_ns > self._now:
            self._now = time_ns


class WallClock:
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        self._start = time.monotonic_ns()

    def now(self) -> int:
        return time.monotonic_ns() - self._start

    def wait_until(self, time_ns: int) -> None:
        delay = time_ns - self.now()
        if delay > 0:
            time.sleep(delay / SECOND_NS)


class Stall:
    """Accumulates the simulated time that calls took, until it is charged to the caller."""

    def __init__(self) -> None:
        self._pending_ns = 0

    def add(self, duration_ns: int) -> None:
        self._pending_ns += duration_ns

    def take(self) -> int:
        taken, self._pending_ns = self._pending_ns, 0
        return taken
