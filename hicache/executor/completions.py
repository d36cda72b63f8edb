"""What an executor reports to the engine: the ends of a batch's steps, and completed copies."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Reported

Delivery = tuple[int, Reported | Prefetch]  # the engine's number, and the completed work


class StepEnds:
    """The end times (ns) of the steps of one batch, computed only as far as needed.

    `known` holds the end times computed so far, in ascending order.
    """

    def __init__(self, blocks: Iterable[list[int]]) -> None:
        self.known: list[int] = []
        self._blocks = iter(blocks)

    def __getitem__(self, step: int) -> int:
        self.look(None)
        return self.known[step]

    def look(self, until_ns: int | None) -> int:
        """Compute end times of steps until one is at `until_ns` or later; None computes all.

        At least one end time is computed. Return the index of the last step whose end time is
        known.
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
    """The times of a batch that has started.

    `ends` holds the end time of each step. `load_stall_ns` is the time in ns for which the batch
    waits for KV to be loaded from host to device.
    """

    ends: StepEnds
    load_stall_ns: int
