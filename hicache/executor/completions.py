"""What an executor tells the engine: when the steps of a batch end, and which copies are done."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Reported

Delivery = tuple[int, Reported | Prefetch]  # the engine's number, and what is done


class StepEnds:
    """When the steps of a batch end, rising; `known` as far as anybody has looked."""

    def __init__(self, blocks: Iterable[list[int]]) -> None:
        """`blocks`: of ends, found out as they are asked for."""
        self.known: list[int] = []
        self._blocks = iter(blocks)

    def __getitem__(self, step: int) -> int:
        self.look(None)
        return self.known[step]

    def look(self, until_ns: int | None) -> int:
        """The last step whose end is known, once one is that lies at `until_ns` or later.

        None: all of them. One at least.
        """
        known = self.known
        while not known or until_ns is None or known[-1] < until_ns:
            block = next(self._blocks, None)
            if block is None:
                break
            known += block
        return len(known) - 1

    def first_from(self, now_ns: int, first: int, last: int) -> int:
        """The first step of [first, last] that ends at `now_ns` or later; else `last`."""
        return bisect_left(self.known, now_ns, first, last)


class StepRun(NamedTuple):
    """A batch under way: when each of its steps ends, and how long it stood still for copies."""

    ends: StepEnds
    load_stall_ns: int
