"""Hits of a one-tier cache: without limit, under LRU at every capacity, and at best.

The model ignores time, and all cached data are pages of one size, as of a model with full attention
only. Requests come one after another. Each reads the longest held prefix of its prompt (and
computes at least one token), and then offers all whole pages of prompt and answer to the cache. So
a request never hits its own pages.

- `infinite`: a bound on the hits of any cache.
- `lru_depths`: LRU's hits at every capacity in one pass.
- `min_hits`: Belady's MIN with bypass; a bound.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from hicache.request import Request
from hicache.workload.page_numbers import page_numbers

Ids = NDArray[np.int64]
BLOCK = 1024  # places counted at once
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Visit:
    """The KV-cache pages that one request reads and writes.

    `chain`: [G] ids of all whole pages of prompt and answer in order. Two pages have the same id if
    all tokens up to the ends of the pages are equal. `reach`: the number of leading pages that can
    be hits; at least one prompt token is always computed. `prompt_len`: the prompt's length in
    tokens.
    """

    chain: Ids
    reach: int
    prompt_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """The KV-cache pages of all requests of a workload, in order of arrival.

    Page ids lie between 0 and `num_pages - 1`. `page_size` is the number of tokens per page.
    """

    visits: Sequence[Visit]
    num_pages: int
    page_size: int

    @property
    def prompt_tokens(self) -> int:
        return sum(visit.prompt_len for visit in self.visits)


def visits_of(requests: Sequence[Request], page_size: int) -> Visits:
    """Return the pages that each request reads and writes, as page ids.

    Two pages have the same id if all tokens up to the ends of the pages are equal. `page_size` is
    in tokens.
    """
    numbers = page_numbers(requests, page_size)
    visits = []
    for request in requests:
        pages = np.frombuffer(numbers[request.id].to_bytes(), "<i4").astype(np.int64)
        # the last token of an answer is never fed back, so it has no KV
        chain = pages[: (request.prompt_len + request.output_len - 1) // page_size]
        reach = (request.prompt_len - 1) // page_size
        visits.append(Visit(chain, reach, request.prompt_len))
    num_pages = 1 + max((int(visit.chain.max(initial=-1)) for visit in visits), default=-1)
    return Visits(visits=visits, num_pages=num_pages, page_size=page_size)


def infinite(visits: Visits) -> int:
    known = np.zeros(visits.num_pages, bool)
    pages = 0
    for visit in visits.visits:
        pages += _leading(known[visit.chain[: visit.reach]])
        known[visit.chain] = True
    return pages * visits.page_size


def lru_depths(visits: Visits) -> Ids:
    """Return the smallest capacity in pages at which LRU hits each page, in ascending order.

    An LRU cache of `n` pages hits as many pages as there are numbers of at most `n`. Pages that are
    read for the first time are left out.
    """
    # All pages ever used lie on a stack, the last used on top; a cache of n pages holds the top n
    # pages (Mattson 1970). A request puts its pages on top with the deepest page lowest, so no page
    # outlives its prefix.
    stack = _Stack(visits)
    found = [np.empty(0, np.int64)]
    for visit in visits.visits:
        read = visit.chain[: visit.reach]
        found.append(stack.depths(read[: _leading(stack.is_known(read))]))
        stack.push(visit.chain)
    return np.sort(np.concatenate(found))


def min_hits(visits: Visits, capacity_pages: int) -> int:
    """Return the number of tokens that Belady's optimal cache of `capacity_pages` pages hits.

    No cache of this capacity hits more tokens. This holds for models with full attention only,
    where all pages have the same size. The cache knows the future, and may choose not to keep a
    page at all.
    """
    # A page is kept from one request that has it until the next one, if that one reads it, or is
    # not kept at all. Dropping the page needed furthest in the future keeps the most such
    # intervals. A page that the next request brings again without reading it has no value until
    # then. Of pages needed at the same time the deeper one is dropped, so a page is only read
    # together with its whole prefix.
    held: dict[int, tuple[int, int]] = {}  # by page: its key in the heap
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, page)
    hits = 0
    for visit, nexts in zip(visits.visits, _next_uses(visits), strict=True):
        read = visit.chain[: visit.reach].tolist()
        hits += sum(1 for _ in takewhile(held.__contains__, read))
        for depth, (page, when) in enumerate(
            zip(visit.chain.tolist(), nexts.tolist(), strict=True)
        ):
            if when == NEVER:
                held.pop(page, None)
                continue
            held[page] = (-when, -depth)
            heapq.heappush(heap, (-when, -depth, page))
        while len(held) > capacity_pages:
            when, depth, page = heapq.heappop(heap)
            if held.get(page) == (when, depth):
                del held[page]
    return hits * visits.page_size


def _next_uses(visits: Visits) -> list[Ids]:
    following: list[Ids] = []
    next_use = np.full(visits.num_pages, NEVER, np.int64)
    for number in range(len(visits.visits) - 1, -1, -1):
        visit = visits.visits[number]
        following.append(next_use[visit.chain])
        next_use[visit.chain[: visit.reach]] = number
        next_use[visit.chain[visit.reach :]] = NEVER
    return following[::-1]


def _leading(flags: NDArray[np.bool_]) -> int:
    return int(flags.argmin()) if not flags.all() else len(flags)


class _Stack:
    def __init__(self, visits: Visits) -> None:
        # every use takes the next place on top and leaves the earlier place empty
        uses = sum(len(visit.chain) for visit in visits.visits)
        self._is_taken = np.zeros(-(-(uses + 1) // BLOCK) * BLOCK, np.int64)
        # counts over blocks of places make depths cheap
        self._counts = np.zeros(len(self._is_taken) // BLOCK, np.int64)
        self._place = np.full(visits.num_pages, -1, np.int64)
        self._top = 0

    def is_known(self, pages: Ids) -> NDArray[np.bool_]:
        return self._place[pages] >= 0

    def depths(self, pages: Ids) -> Ids:
        # number of pages from the top of the stack to each of these, which is counted as well
        places = self._place[pages]
        if not len(places):
            return places
        blocks = places // BLOCK
        last = self._top // BLOCK
        lowest = int(blocks.min())
        # by block: the pages from its start to the top
        above = np.cumsum(self._counts[lowest : last + 1][::-1])[::-1]
        depths = np.empty(len(places), np.int64)
        for block in np.unique(blocks).tolist():
            inside = self._is_taken[block * BLOCK : (block + 1) * BLOCK]
            from_here = np.cumsum(inside[::-1])[::-1]
            members = blocks == block
            later = above[block - lowest + 1] if block < last else 0
            depths[members] = later + from_here[places[members] - block * BLOCK]
        return depths

    def push(self, chain: Ids) -> None:
        old = self._place[chain]
        old = old[old >= 0]
        np.subtract.at(self._counts, old // BLOCK, 1)
        self._is_taken[old] = 0
        places = np.arange(self._top, self._top + len(chain))
        self._is_taken[places] = 1
        np.add.at(self._counts, places // BLOCK, 1)
        self._place[chain[::-1]] = places
        self._top += len(chain)
