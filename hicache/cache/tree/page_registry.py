"""Every page of a workload, by number: who has seen it, and what storage has of it.

A page's number stands for all tokens up to its end, so equal numbers mean equal prefixes; along a
prefix they rise. The pages of one request are a `Chain`. Engines that share a storage share a
registry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hicache.cache.kinds import KIND_NAMES
from hicache.request import Request, TokenSpans

PageNumbers = NDArray[np.int32]
NO_NUMBERS: PageNumbers = np.empty(0, np.int32)


class Stored:
    """What became of a page's, a window page's or a state's way to storage.

    Plain numbers: an enum's members would be turned into numbers at every look at a table.
    """

    never: Final = 0  # nobody wanted it there
    dropped: Final = 1  # the write queue was full
    under_way: Final = 2
    written: Final = 3


@dataclass(slots=True, eq=False)
class Chain:
    """The pages of a request's prompt and answer that can be kept, and who it is.

    `target_len`: tokens up to where decoding begins.
    """

    request_id: int
    numbers: PageNumbers
    target_len: int


class PageRegistry:
    """What is known of pages whatever engine they are on.

    `is_seen`: it was in an admitted request, or storage was found to have it. `stored`, and
    `written_ns`, since when: by kind.
    """

    def __init__(
        self, pages: Mapping[int, TokenSpans], page_size: int, num_kinds: int = len(KIND_NAMES)
    ) -> None:
        """`pages`: of each request, by its id, the numbers of its whole pages."""
        self._pages = pages
        self._page_size = page_size
        ends = (int((each.starts + each.counts).max(initial=0)) for each in pages.values())
        self.num_pages = max(ends, default=0)
        self.is_seen = np.zeros(self.num_pages, bool)
        self.stored = [np.zeros(self.num_pages, np.uint8) for _ in range(num_kinds)]
        self.written_ns = [np.zeros(self.num_pages, np.int64) for _ in range(num_kinds)]

    def numbers_of(self, request: Request) -> PageNumbers:
        """Its pages; the last token of an answer is never fed back, so nothing is kept of it."""
        num_pages = (request.prompt_len + request.output_len - 1) // self._page_size
        return np.frombuffer(self._pages[request.id].to_bytes(), np.int32)[:num_pages]


def num_leading(flags: NDArray[np.bool_]) -> int:
    """How many lead that are true."""
    return len(flags) if flags.all() else int(flags.argmin())


def place_of(numbers: PageNumbers) -> slice | PageNumbers:
    """Where pages stand in a table; a slice, which is quicker, if they follow each other."""
    first, last = numbers.item(0), numbers.item(-1)
    return slice(first, last + 1) if last - first == len(numbers) - 1 else numbers
