"""What an executor tells the engine: when the steps of a batch end, and which copies are done."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Reported

Delivery = tuple[int, Reported | Prefetch]  # the engine's number, and what is done


class StepRun(NamedTuple):
    """A batch under way: when each of its steps ends, and how long it stood still for copies."""

    ends_ns: NDArray[np.int64]  # [num_steps], rising
    load_stall_ns: int
