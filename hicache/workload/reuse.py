"""Counts the hits of a prefix cache of any size in one pass over a workload, without time.

The requests come one after another. Each uses all pages of its prompt and its answer, the last page
first, so a page is never evicted before the pages that follow it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hicache.request import Request
from hicache.workload.page_numbers import page_numbers

Column = NDArray[np.int64]
BLOCK = 1024  # of requests, whose sums are kept


@dataclass(frozen=True, slots=True)
class Reuse:
    """The pages of N requests that are used again, as G groups of pages that follow one another.

    Attributes:
        num_requests: N.
        request: [G] place of the request that uses a group again, in rising order.
        before: [G] place of the request that has used the group before.
        counts: [G] pages in the group.
        usable: [G] pages in the group that may hit: those before the last token of a prompt.
        newer: [G] distinct pages used since the last use of the group.
    """

    num_requests: int
    request: Column
    before: Column
    counts: Column
    usable: Column
    newer: Column

    def lru(self, capacity: int) -> Column:
        """Return the pages that each request finds in an LRU cache of `capacity` pages: [N].

        A page hits if all pages used since its last use fit (Mattson et al., "Evaluation techniques
        for storage hierarchies", 1970).
        """
        return self._by_request(np.clip(capacity - self.newer, 0, self.usable))

    def belady(self, capacity: int) -> Column:
        """Return the pages found if the cache keeps the pages that are used again soonest: [N]."""
        order = np.argsort(self.before, kind="stable")
        firsts = self.before[order].searchsorted(np.arange(self.num_requests + 1)).tolist()
        nexts, counts = self.request[order].tolist(), self.counts[order].tolist()
        held = [0] * self.num_requests  # pages in the cache, by the request that uses them next
        latest: list[int] = []  # these requests, negative, as a heap; may hold finished ones
        room = capacity
        for place in range(self.num_requests):
            room += held[place]
            for group in range(firsts[place], firsts[place + 1]):
                if not held[nexts[group]]:
                    heappush(latest, -nexts[group])
                held[nexts[group]] += counts[group]
                room -= counts[group]
            while room < 0:
                last = -latest[0]
                num_evicted = min(held[last], -room)
                held[last] -= num_evicted
                room += num_evicted
                if not held[last]:
                    heappop(latest)
        # nothing is inserted or evicted for a request after it has begun
        return np.minimum(held, self._by_request(self.usable))

    @property
    def full_pages(self) -> int:
        """The smallest capacity at which LRU evicts nothing that is used again."""
        return int((self.newer + self.usable).max(initial=0))

    def _by_request(self, pages: Column) -> Column:
        # sums of whole numbers below 2**53 are exact
        return np.bincount(self.request, pages, self.num_requests).astype(np.int64)


def reuse(requests: Sequence[Request], page_size: int, overlap: int = 0) -> Reuse:
    """Find the pages that `requests` use again. The requests come in this order.

    Pages are equal if `overlap` tokens of the next page are equal, too.
    """
    pages = page_numbers(requests, page_size, overlap)
    num_pages = max(int((each.starts + each.counts).max(initial=0)) for each in pages.values())
    used_by = np.full(num_pages, -1, np.int32)  # the last request that used a page
    # pages by the last request that used them, and their sums over blocks of requests
    alive = np.zeros(len(requests), np.int64)
    sums = np.zeros(len(requests) // BLOCK + 1, np.int64)
    groups: list[tuple[int, ...]] = []
    for place, request in enumerate(requests):
        usable = (request.prompt_len - 1 - overlap) // page_size
        num_kept = (request.prompt_len + request.output_len - 1 - overlap) // page_size
        spans = pages[request.id]
        runs = map(np.arange, spans.starts.tolist(), (spans.starts + spans.counts).tolist())
        path = np.concatenate([np.arange(0), *runs])[:num_kept]
        # the last user of each page: along the path, each is the same or an earlier one
        users = used_by[path]
        used_by[path] = place
        ends = np.flatnonzero(users != np.append(users[1:], place))
        lengths = [end - last for last, end in pairwise([-1, *ends.tolist()])]
        shared = dict(zip(users[ends].tolist(), lengths, strict=True))
        shared.pop(-1, None)  # pages that are new
        for before, count in shared.items():
            end = before // BLOCK + 1
            newer = alive[before + 1 : end * BLOCK].sum() + sums[end:].sum()
            groups.append((place, before, count, min(max(usable, 0), count), int(newer)))
            usable -= count
        for user, count in (*((user, -count) for user, count in shared.items()), (place, num_kept)):
            alive[user] += count
            sums[user // BLOCK] += count
    return Reuse(len(requests), *np.array(groups, np.int64).reshape(-1, 5).T)
