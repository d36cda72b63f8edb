"""What an executor reports to the engine: the ends of a batch's steps, and completed copies."""

from collections.abc import Generator
from typing import NamedTuple

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Reported
from hicache.clock import NEVER
from hicache.scheduler.handover import News

# the engine's number, and the completed work
Delivery = tuple[int, Reported | Prefetch | News]


class StepEnds:
    """The end times (ns) of the steps of one batch, computed only as far as needed.

    `known` holds the end times computed so far, in ascending order. There is at least one.
    """

    def __init__(
        self, known: list[int], more: Generator[list[int], int, None] | None = None
    ) -> None:
        """Begin with the end times `known`. `more` yields the later ones, as far as it is asked.

        It is sent the time (ns) up to which end times are needed.
        """
        self.known = known
        self._more = more

    def __getitem__(self, step: int) -> int:
        self.look(NEVER)
        return self.known[step]

    def look(self, until_ns: int) -> int:
        """Compute end times of steps until one is at `until_ns` or later, or all are known.

        Return the index of the last step whose end time is known.
        """
        known = self.known
        while known[-1] < until_ns and self._more is not None:
            try:
                known += self._more.send(until_ns)
            except StopIteration:
                self._more = None
        return len(known) - 1


class StepRun(NamedTuple):
    """The times of a batch that has started.

    A batch of decodes may run several steps in a row. `ends` holds the end time of each step; a
    simulated executor knows them when the batch starts. `load_stall_ns` is the time in ns for which
    the batch waits for KV to be loaded from host to device.
    """

    ends: StepEnds
    load_stall_ns: int
