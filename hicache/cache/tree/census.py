"""Every page that a run has come across, by number: who has seen it, and what storage has of it.

A page's number stands for all tokens up to its end, so equal numbers mean equal prefixes. The pages
of one request are a `Chain`. Engines that share a storage share a census.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

PageNumbers = NDArray[np.int32]
NO_NUMBERS: PageNumbers = np.empty(0, np.int32)


class Stored(IntEnum):
    """What became of a page's, a window page's or a state's way to storage."""

    never = 0  # nobody wanted it there
    dropped = 1  # the write queue was full
    under_way = 2
    written = 3


@dataclass(slots=True, eq=False)
class Chain:
    """The whole pages of a request's prompt and answer, and who it is.

    `target_len`: tokens up to where decoding begins.
    """

    request_id: int
    numbers: PageNumbers
    target_len: int


class Census:
    """What is known of pages whatever engine they are on, by component and page number.

    `is_seen`: it was in an admitted request, or storage was found to have it.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self.is_seen = np.zeros(0, bool)
        self.stored = np.zeros((3, 0), np.uint8)
        self.stored_ns = np.zeros((3, 0), np.int64)  # when that was so

    def add(self, count: int) -> PageNumbers:
        """Numbers of pages that nobody has come across."""
        first, self.num_pages = self.num_pages, self.num_pages + count
        if self.num_pages > len(self.is_seen):
            size = max(2 * self.num_pages, 1 << 16)
            self.is_seen = grown(self.is_seen, size)
            self.stored = grown(self.stored, size)
            self.stored_ns = grown(self.stored_ns, size)
        return np.arange(first, self.num_pages, dtype=np.int32)


def num_leading(flags: NDArray[np.bool_]) -> int:
    """How many lead that are true."""
    return len(flags) if flags.all() else int(flags.argmin())


def grown(table: NDArray[Any], size: int) -> NDArray[Any]:
    """The same, longer in its last axis; what is new is zero."""
    longer = np.zeros((*table.shape[:-1], size), table.dtype)
    longer[..., : table.shape[-1]] = table
    return longer
