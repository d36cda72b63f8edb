"""Time, in integer nanoseconds: simulated or the machine's own."""

import time
from typing import Protocol

SECOND_NS = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Seconds as integer nanoseconds, rounded to nearest."""
    return round(seconds * SECOND_NS)


class Clock(Protocol):
    """What tells the engine the time, and lets it wait."""

    def now(self) -> int:
        """Nanoseconds since the run began."""
        ...

    def wait_until(self, time_ns: int) -> None:
        """Return at `time_ns` or later; at once if that has passed."""
        ...


class SimulatedClock:
    """Jumps to wherever the next event is."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        """Nanoseconds since the run began."""
        return self._now

    def wait_until(self, time_ns: int) -> None:
        """Jump forward; never back."""
        if time_ns > self._now:
            self._now = time_ns


class WallClock:
    """The machine's monotonic clock."""

    def __init__(self) -> None:
        self._start = time.monotonic_ns()

    def now(self) -> int:
        """Nanoseconds since the run began."""
        return time.monotonic_ns() - self._start

    def wait_until(self, time_ns: int) -> None:
        """Sleep."""
        delay = time_ns - self.now()
        if delay > 0:
            time.sleep(delay / SECOND_NS)


class Stall:
    """Time that calls have taken in simulated time, until it is charged to the caller."""

    def __init__(self) -> None:
        self._pending_ns = 0

    def add(self, duration_ns: int) -> None:
        """Record that a call took so many nanoseconds longer."""
        self._pending_ns += duration_ns

    def take(self) -> int:
        """Return the nanoseconds since the last call of `take`."""
        taken, self._pending_ns = self._pending_ns, 0
        return taken
