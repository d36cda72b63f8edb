"""What an executor tells the engine: when the steps of a batch end, and which copies are done."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Reported

Delivery = tuple[int, Reported | Prefetch]  # the engine's number, and what is done
STEPS_AHEAD = 16  # most runs of steps are cut at about 8


class StepEnds:
    """When the steps of a batch end, rising; found out some at a time, as they are asked for."""

    def __init__(self, ends_ns: Iterable[int]) -> None:
        self._known: list[int] = []
        self._others = iter(ends_ns)

    def __getitem__(self, step: int) -> int:
        self.look(step)
        return self._known[step]

    def look(self, step: int) -> int:
        """The last step whose end is known, once that of `step` is, if there is one."""
        while len(self._known) <= step and (more := list(islice(self._others, STEPS_AHEAD))):
            self._known += more
        return len(self._known) - 1

    def first_from(self, now_ns: int, first: int, last: int) -> int:
        """The first step of [first, last] that ends at `now_ns` or later; else `last`."""
        return bisect_left(self._known, now_ns, first, last)


class StepRun(NamedTuple):
    """A batch under way: when each of its steps ends, and how long it stood still for copies."""

    ends: StepEnds
    load_stall_ns: int
