"""What the requests in an engine's queue wait for, and how long.

All queued requests that do not wait for storage wait for the same thing: the one that ended the
last scan of the queue. So the time is added up once, and a request takes differences.
"""

from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """What a queued request waits for, other than a read from storage."""

    step = "step"
    chunk = "chunk"
    tokens = "tokens"
    swa_tokens = "swa_tokens"
    slots = "slots"
    running = "running"
    prefill_oom = "prefill_oom"
    scan_limit = "scan_limit"


Mark = dict[Cause, int]  # nanoseconds by cause


class Shortage(NamedTuple):
    """Why the queued requests do not run.

    `first` is the id of the first request that could not start. It is None if the cause does not
    concern a single request.
    """

    cause: Cause
    first: int | None = None


NO_STEP, NO_CHUNK = Shortage(Cause.step), Shortage(Cause.chunk)


class QueueWaits:
    """Adds up the waiting time of an engine's queue in ns, by cause.

    At each moment, all queued requests wait for the same cause, except those that wait for storage.
    So one sum per cause serves all requests. The waiting time of a request is the sums at the end
    of its wait minus the sums at the beginning.
    """

    def __init__(self) -> None:
        self._spent = dict.fromkeys(Cause, 0)
        self.lacks = NO_STEP
        self._since_ns = 0

    def turn(self, now_ns: int, lacks: Shortage) -> None:
        if now_ns != self._since_ns:
            self._spent[self.lacks.cause] += now_ns - self._since_ns
            self._since_ns = now_ns
        self.lacks = lacks

    def mark(self, now_ns: int) -> Mark:
        """Return a copy of the sums of waiting time up to `now_ns`, in ns by cause."""
        if now_ns != self._since_ns:
            self.turn(now_ns, self.lacks)
        return self._spent.copy()
