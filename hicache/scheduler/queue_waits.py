"""What those that wait in an engine's queue wait for, and for how long.

Whoever is left in the queue waits for one thing at a time, and all but those that wait for storage
wait for the same: what ended the last look at the queue. So it is enough to add that up once; a
request takes differences.
"""

from typing import NamedTuple

# what a request that waits for no storage waits for
CAUSES = {
    "step": "the step that was under way when it came",
    "chunk": "its turn: prompts before it filled the steps (scheduler.chunk_tokens)",
    "tokens": "pages on the device",
    "swa_tokens": "window pages on the device",
    "slots": "state slots on the device",
    "running": "a place among those that run (scheduler.max_running)",
    "prefill_oom": "pages that admission had promised",
    "scan_limit": "a look: too many before it waited for storage (scheduler.scan_limit)",
}

Mark = tuple[int, ...]  # nanoseconds by cause


class Turn(NamedTuple):
    """From `at_ns` on the queue waits for `cause`, which the request `first` of it lacks."""

    at_ns: int
    cause: str
    first: int | None


class QueueWaits:
    """The nanoseconds that the queue has waited, by cause. Time never goes back."""

    def __init__(self) -> None:
        self.turns: list[Turn] | None = None  # if they are kept
        self._spent = dict.fromkeys(CAUSES, 0)
        self._cause = "step"
        self._first: int | None = None
        self._since_ns = 0

    def turn(self, now_ns: int, cause: str, first: int | None = None) -> None:
        """From now on they wait for this; `first`: the request that there is no room for."""
        self._spent[self._cause] += now_ns - self._since_ns
        self._since_ns = now_ns
        if self.turns is not None and (cause, first) != (self._cause, self._first):
            self.turns.append(Turn(now_ns, cause, first))
        self._cause, self._first = cause, first

    def mark(self, now_ns: int) -> Mark:
        """What it has come to."""
        self.turn(now_ns, self._cause, self._first)
        return tuple(self._spent.values())
