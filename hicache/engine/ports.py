"""What the engine asks of whoever carries out its steps, in simulated or in real time."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Work
from hicache.scheduler.batch import Batch


class StepRun(NamedTuple):
    """A batch under way: when each of its steps ends, and how long it stood still for copies."""

    ends_ns: NDArray[np.int64]  # [num_steps], rising
    load_stall_ns: int


class Executor(Protocol):
    """The forward pass, the copies and the storage I/O of one engine.

    What is submitted is reported to the engine's `deliver` when it is done; nothing here blocks
    the engine but `forward` of a real executor.
    """

    @property
    def is_fenced(self) -> bool:
        """Whether a copy is under way whose source pages have been given away already."""
        ...

    def submit(self, work: Work, now_ns: int) -> None:
        """Begin a copy."""
        ...

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        """Ask storage what it has; sets `restorable`."""
        ...

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        """Read into the staged pages, batch by batch, until all is read or it is terminated."""
        ...

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        """Compute a batch."""
        ...
