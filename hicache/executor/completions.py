"""What an executor reports to the engine: the ends of a batch's steps, and completed copies."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Reported

Delivery = tuple[int, Reported | Prefetch]  # the engine's number, and the completed work


class StepEnds:
    """Rising end times (ns) of a batch's steps, computed on demand; `known` holds those so far."""

    def __init__(self, blocks: Iterable[list[int]]) -> None:
        self.known: list[int] = []
        self._blocks = iter(blocks)

    def __getitem__(self, step: int) -> int:
        self.look(None)
        return self.known[step]

    def look(self, until_ns: int | None) -> int:
        """Compute ends until one is at `until_ns` or later; return the index of the last known one.

        Computes at least one end. None means all of them.
        """
        known = self.known
        while not known or until_ns is None or known[-1] < until_ns:
            block = next(self._blocks, None)
            if block is None:
                break
            known += block
        return len(known) - 1

    def first_from(self, now_ns: int, first: int, last: int) -> int:
        return bisect_left(self.known, now_ns, first, last)


class StepRun(NamedTuple):
    """A running batch: the end of each step, and the time (ns) that it waited for copies."""

    ends: StepEnds
    load_stall_ns: int
