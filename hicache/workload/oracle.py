"""Hits of a one-tier cache: without limit, under LRU at every capacity, and at best.

The model ignores time. Requests come one after another. Each reads the longest held prefix of its
prompt (and computes at least one token), and then offers all whole pages of prompt and answer to
the cache. So a request never hits its own pages.

- `infinite`: a bound on the hits of any cache.
- `lru_curve`: LRU's hits at every capacity in one pass, for pages alone, or with the states and
  windows that a hybrid model keeps at checkpoints. For pages alone it is exact. With checkpoints
  it is a reference: a request refreshes the deepest checkpoint on its path, even if a smaller
  cache would have started at another.
- `min_hits`: Belady's MIN with bypass, for pages alone; a bound.
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
BLOCK = 1024  # marks summed at once
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Visit:
    """The KV-cache pages that one request reads and writes.

    `chain`: [G] ids of all whole pages of prompt and answer in order. Two pages have the same id if
    all tokens up to the ends of the pages are equal. `reach`: the number of leading pages that can
    be hits; at least one prompt token is always computed. `prompt_pages`: the number of whole pages
    in the prompt. `prompt_len`: the prompt's length in tokens.
    """

    chain: Ids
    reach: int
    prompt_pages: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRule:
    """Says after which pages a hybrid model saves a checkpoint for later requests.

    A checkpoint is the Mamba state and the sliding window that a later request needs to resume
    there. It takes `num_bytes` bytes besides the full-attention KV. Each request saves a checkpoint
    at the last whole page of its prompt and of its answer. With `branch`, a request also saves one
    where its prompt diverges from earlier prompts. If `every` is not 0, a request also saves one
    after each `every` pages.
    """

    num_bytes: int
    branch: bool = False
    every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The number of tokens that a cache hits, as a function of its capacity.

    A cache of `capacity_bytes[i]` bytes hits `hit_tokens[i]` tokens. Both arrays rise.
    `prompt_tokens` is the number of tokens in all prompts.
    """

    capacity_bytes: Ids
    hit_tokens: Ids
    prompt_tokens: int

    def hit_rate(self, capacity_bytes: float) -> float:
        place = int(np.searchsorted(self.capacity_bytes, capacity_bytes, side="right")) - 1
        return float(self.hit_tokens[place]) / self.prompt_tokens if place >= 0 else 0.0

    @property
    def maximum(self) -> float:
        return float(self.hit_tokens[-1]) / self.prompt_tokens if len(self.hit_tokens) else 0.0


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
        prompt_pages = request.prompt_len // page_size
        visits.append(Visit(chain, reach, prompt_pages, request.prompt_len))
    num_pages = 1 + max((int(visit.chain.max(initial=-1)) for visit in visits), default=-1)
    return Visits(visits=visits, num_pages=num_pages, page_size=page_size)


def infinite(visits: Visits) -> int:
    known = np.zeros(visits.num_pages, bool)
    pages = 0
    for visit in visits.visits:
        pages += _leading(known[visit.chain[: visit.reach]])
        known[visit.chain] = True
    return pages * visits.page_size


def lru_curve(
    visits: Visits, *, page_bytes: int, checkpoints: CheckpointRule | None = None
) -> Curve:
    """Return the hits of an LRU cache at every capacity, in one pass over the requests.

    `page_bytes` is the size of a page. `checkpoints` says where a hybrid model saves states and
    windows; None means a model with full attention only.
    """
    # All objects ever used lie on a stack, the last used on top; a cache of C bytes holds the top C
    # bytes (Mattson 1970). A request puts its pages on top with the deepest page lowest, so no page
    # outlives its prefix, and puts each checkpoint right below its page.
    stack = _Stack(visits, 0 if checkpoints is None else checkpoints.num_bytes, page_bytes)
    gains: list[tuple[int, int]] = []  # (capacity in bytes from which on, additional tokens)
    known = np.zeros(visits.num_pages, bool)
    for visit in visits.visits:
        read = visit.chain[: visit.reach]
        hit = _leading(known[read])
        depths = stack.depths(read[:hit])
        if checkpoints is None:
            gains += [(depth, visits.page_size) for depth in depths.tolist()]
            stack.push(visit.chain, np.empty(0, np.int64))
        else:
            gains += _gains(stack, read, depths, visits.page_size)
            stack.push(visit.chain, _places(stack, visit, hit, checkpoints))
        known[visit.chain] = True
    gains.sort()
    sizes, tokens = np.array(gains, np.int64).reshape(-1, 2).T
    return Curve(
        capacity_bytes=sizes, hit_tokens=np.cumsum(tokens), prompt_tokens=visits.prompt_tokens
    )


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


def _gains(stack: "_Stack", read: Ids, depths: Ids, page_size: int) -> list[tuple[int, int]]:
    # a deeper checkpoint counts from the capacity that holds it and every page before it
    at = stack.checkpointed[read[: len(depths)]].nonzero()[0]
    if not len(at):
        return []
    needed = np.maximum(depths[at], stack.depths(read[at] + stack.num_pages))
    gains = []
    reached = 0
    for capacity, place in sorted(zip(needed.tolist(), at.tolist(), strict=True)):
        if place + 1 > reached:
            gains.append((capacity, (place + 1 - reached) * page_size))
            reached = place + 1
    return gains


def _places(stack: "_Stack", visit: Visit, hit: int, checkpoints: CheckpointRule) -> Ids:
    # pages of the chain after which a checkpoint is used or made
    chain = visit.chain
    places = {visit.prompt_pages, len(chain)}
    used = stack.checkpointed[chain[:hit]].nonzero()[0]
    start = int(used[-1]) + 1 if len(used) else 0
    if start:
        places.add(start)
    if checkpoints.branch and hit > start:
        places.add(hit)
    if checkpoints.every:
        step = checkpoints.every
        places.update(range((start // step + 1) * step, visit.prompt_pages + 1, step))
    return np.array(sorted(place - 1 for place in places if 0 < place <= len(chain)), np.int64)


class _Stack:
    def __init__(self, visits: Visits, checkpoint_bytes: int, page_bytes: int) -> None:
        self.num_pages = visits.num_pages
        self.checkpointed = np.zeros(visits.num_pages, bool)
        self._checkpoint_bytes = checkpoint_bytes
        self._page_bytes = page_bytes
        uses = sum(len(visit.chain) for visit in visits.visits)
        size = uses * (2 if checkpoint_bytes else 1) + BLOCK
        # every use takes the next place on top and leaves the earlier place empty
        self._weight = np.zeros(-(-size // BLOCK) * BLOCK, np.int64)
        # sums over blocks of places make depths cheap
        self._sums = np.zeros(len(self._weight) // BLOCK, np.int64)
        # of pages, then of checkpoints: the one after page p has the id num_pages + p
        self._place = np.full(2 * visits.num_pages, -1, np.int64)
        self._top = 0

    def depths(self, objects: Ids) -> Ids:
        # bytes from the top of the stack to the end of each object
        places = self._place[objects]
        if not len(places):
            return places
        blocks = places // BLOCK
        last = self._top // BLOCK
        lowest = int(blocks.min())
        # by block: the bytes from its start to the top
        above = np.cumsum(self._sums[lowest : last + 1][::-1])[::-1]
        depths = np.empty(len(places), np.int64)
        for block in np.unique(blocks).tolist():
            inside = self._weight[block * BLOCK : (block + 1) * BLOCK]
            from_here = np.cumsum(inside[::-1])[::-1]
            members = blocks == block
            later = above[block - lowest + 1] if block < last else 0
            depths[members] = later + from_here[places[members] - block * BLOCK]
        return depths

    def push(self, chain: Ids, checkpoints: Ids) -> None:
        objects = chain[::-1]
        weights = np.full(len(objects), self._page_bytes, np.int64)
        if len(checkpoints):
            # below its page, so that the state leaves before its prefix
            where = len(chain) - 1 - checkpoints
            self.checkpointed[chain[checkpoints]] = True
            objects = np.insert(objects, where, chain[checkpoints] + self.num_pages)
            weights = np.insert(weights, where, self._checkpoint_bytes)
        old = self._place[objects]
        old = old[old >= 0]
        np.subtract.at(self._sums, old // BLOCK, self._weight[old])
        self._weight[old] = 0
        places = np.arange(self._top, self._top + len(objects))
        self._weight[places] = weights
        np.add.at(self._sums, places // BLOCK, weights)
        self._place[objects] = places
        self._top += len(objects)
