"""Eviction policies that give each entry a value: GDSF, Marconi, hints, and Belady's optimum."""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable
from math import inf

import numpy as np

from hicache.cache.tree.entry import Entry, Evictable
from hicache.clock import to_ns
from hicache.config import Arrivals
from hicache.policies.world import World
from hicache.request import Request
from hicache.workload.page_numbers import page_numbers
from hicache.workload.windows import trees

FAR_NS = 1 << 60  # after all that have a time


def _flops_per_byte(world: World, entry: Entry, start: int) -> float:
    """Return the FLOPs per byte of having an entry's end when a prompt is computed to `start`."""
    return world.flops(start, entry.end) / max(entry.bytes, 1)


class Gdsf:
    """Greedy-Dual-Size-Frequency: uses x cost / size, on a floor that rises with each victim.

    Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy"
    (1998). The value of an entry is set at each use: the floor of its pool, plus uses times the
    FLOPs to compute it per byte, where those of the first page of a prompt are 1. The floor is the
    value of the last victim. Of equal values the one used longest ago goes first. A cache of KV
    evicts before it inserts; libCacheSim inserts at the former floor and may evict that at once.
    """

    def __init__(self, world: World | None, capacity: float) -> None:
        self._world = world
        self._floor = 0.0
        self._values: dict[Entry, float] = {}

    def insert(self, entry: Entry) -> None:
        """Set its value."""
        weight = 1.0
        if self._world is not None:
            size = self._world.page_size
            page = self._world.flops(0, size) / self._world.unit_bytes["device"]["full"]
            weight = _flops_per_byte(self._world, entry, entry.start) / page
        self._values[entry] = self._floor + (entry.hits + 1) * weight

    hit = insert

    def miss(self, keys: Iterable[int]) -> None:
        """Do nothing."""

    def split(self, entry: Entry, first: Entry) -> None:
        """Give both its value."""
        self._values[first] = self._values[entry]

    def evict(self, entry: Entry) -> None:
        """Raise the floor to its value."""
        self._floor = max(self._floor, self._values.pop(entry))

    def rank(self, entry: Entry) -> tuple[float, ...]:
        """Return its value, then its last use."""
        return (self._values[entry], entry.used)


class Lowest:
    """Finds the evictable entry of the lowest score, where all scores may change at an event.

    It scores all of a pool once after `forget`, and then takes one after the other.
    """

    def __init__(self, scores: Callable[[list[Entry]], Iterable[tuple[float, ...]]]) -> None:
        """`scores`: of these entries of a pool, smallest first to go."""
        self._scores = scores
        self._heaps: dict[tuple[str, str], list[tuple[tuple[float, ...], int, Entry]]] = {}

    def forget(self) -> None:
        """Forget all scores."""
        self._heaps.clear()

    def of(self, tier: str, kind: str, queue: Evictable) -> Entry | None:
        """Return the lowest of the queue; None if it is empty."""
        heap = self._heaps.get((tier, kind), [])
        while heap and heap[0][2] not in queue:
            heapq.heappop(heap)
        if not heap:
            entries = list(queue)
            scored = zip(self._scores(entries), entries, strict=True)
            heap = self._heaps[tier, kind] = [(score, each.id, each) for score, each in scored]
            heapq.heapify(heap)
        return heap[0][2] if heap else None

    def evicted(self, entry: Entry, tier: str) -> None:
        """Score the entry above: it may be evictable now."""
        heap, above = self._heaps.get((tier, entry.kind)), entry.parent
        if heap and above is not None:
            (score,) = self._scores([above])
            heapq.heappush(heap, (score, above.id, above))


class Marconi:
    """Recency plus `alpha` times the FLOPs that an entry saves per byte, each scaled to [0, 1].

    Pan et al., "Marconi: prefix caching for the era of hybrid LLMs" (MLSys 2025), from the paper:
    recency is 1 / (now - last use); a state saves the FLOPs from the state above it, a page those
    of its own tokens. The paper tunes `alpha` by a replay; it also admits states only at the end
    of a request and at branches, as `cache.checkpoints=branch_or_end` does.
    """

    def __init__(self, world: World, *, alpha: float = 1.0) -> None:
        self._world = world
        self._alpha = alpha
        self._lowest = Lowest(self._scores)
        self._saved: dict[tuple[str, int, int], float] = {}

    def on_insert(self, entry: Entry, tier: str) -> None:
        """Score all anew."""
        self._lowest.forget()

    def on_hit(self, entry: Entry, request: Request) -> None:
        """Score all anew."""
        self._lowest.forget()

    def on_split(self, entry: Entry, first: Entry) -> None:
        """Score all anew."""
        self._lowest.forget()

    def on_evict(self, entry: Entry, tier: str, why: str) -> None:
        """Score all anew: one above it may be evictable now, and the range of values changes."""
        self._lowest.forget()

    def victim(self, tier: str, kind: str, need: int, queue: Evictable) -> Entry | None:
        """Return the entry of the lowest score."""
        return self._lowest.of(tier, kind, queue)

    def _scores(self, entries: list[Entry]) -> Iterable[tuple[float, ...]]:
        now = 1 + max((entry.used for entry in entries), default=0)
        recency = _scaled([1 / (now - entry.used) for entry in entries])
        saved = _scaled([self._saving(entry) for entry in entries])
        return [
            (recent + self._alpha * flops, entry.used, entry.end)
            for recent, flops, entry in zip(recency, saved, entries, strict=True)
        ]

    def _saving(self, entry: Entry) -> float:
        start = entry.start
        if entry.kind == "mamba":
            above = entry.parent
            start = 0 if above is None else above.end
        place = (entry.kind, start, entry.end)
        if place not in self._saved:
            self._saved[place] = _flops_per_byte(self._world, entry, start)
        return self._saved[place]


def _scaled(values: list[float]) -> list[float]:
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


class Hints:
    """LRU that keeps what a tool call will return to: its last use counts as later by `ttl`.

    After Continuum (Li et al., 2025), which pins the KV of a turn that ends in a tool call for a
    time to live. Here a turn whose `stop_reason` is tool_use adds `ttl` uses of the cache to the
    last use of its entries: ranks of an engine have clocks of their own, but use the cache alike.
    """

    def __init__(self, world: World, *, ttl: float = 500) -> None:
        self._ttl = ttl
        self._asker: dict[int, int] = {}  # by key of a page that was not found: the request
        self._calls: set[int] = set()  # requests that ended in a tool call

    def on_miss(self, keys: Iterable[int], request: Request) -> None:
        """Remember who computes them."""
        self._asker.update((key, request.id) for key in keys)

    def on_hit(self, entry: Entry, request: Request) -> None:
        """The entry belongs to the turn that used it last."""
        entry.state = request.id

    def on_insert(self, entry: Entry, tier: str) -> None:
        """The entry belongs to the turn that computed it, as what follows from it does."""
        above = entry.parent
        owner = self._asker.pop(entry.key, None)
        if owner is not None:
            entry.state = owner
        elif entry.state is None and above is not None:
            entry.state = above.state

    def on_split(self, entry: Entry, first: Entry) -> None:
        """Both belong to the turn."""
        first.state = entry.state

    def on_finish(self, request: Request, outcome: str) -> None:
        """A turn ends; its session's former turn returned."""
        if request.stop_reason == "tool_use":
            self._calls.add(request.id)

    def rank(self, entry: Entry, tier: str, kind: str) -> tuple[float, ...]:
        """Return the last use, plus `ttl` after a tool call."""
        return (entry.used + (self._ttl if entry.state in self._calls else 0), entry.end)


class Belady:
    """Evicts what is needed furthest in the future, which it knows: a bound, not a policy.

    Belady, "A study of replacement algorithms for a virtual-storage computer" (1966). The next use
    of an entry is the first request to come that has its first page (a state: its last), has not
    started, and arrives after the warm-up. Requests come in the order of arrival. Closed arrivals
    depend on the run: there a session goes on `think_ns` after each request, counted from its last
    start, and sessions that have not begun come last. Of entries needed at the same time the deeper
    goes first. With equal pages of full attention on one tier and arrivals that do not depend on
    the run, no policy without bypass hits more; elsewhere it is a reference.

    Raises:
        ValueError: `parallel.ranks` is above 1; clocks of ranks differ.
    """

    def __init__(self, world: World) -> None:
        workload = world.config.workload
        if world.config.parallel.ranks > 1:
            raise ValueError(f"oracle needs parallel.ranks=1, got {world.config.parallel.ranks}")
        numbers = page_numbers(world.requests, world.page_size)
        counted_ns = to_ns(workload.warm_up_s)
        self._now_ns = world.now_ns
        self._order = {request.id: place for place, request in enumerate(world.requests)}
        self._is_closed = workload.arrivals is Arrivals.closed
        self._tree_of = trees(world.requests) if self._is_closed else {}
        self._shift_ns: dict[int, int] = {}  # by session that has begun: its start less its offset
        self._due_ns: list[int] = []  # of each request, without the shift of its session
        for request in world.requests:
            due_ns = request.arrival_ns
            if self._is_closed and request.parent_id is not None:
                due_ns = self._due_ns[self._order[request.parent_id]] + request.think_ns
            self._due_ns.append(due_ns)
        self._sessions = [self._tree_of.get(request.id, 0) for request in world.requests]
        places = [
            (number, self._order[request.id])
            for request in world.requests
            if request.arrival_ns >= counted_ns
            for number in np.frombuffer(numbers[request.id].to_bytes(), "<i4").tolist()
        ]
        places.sort()
        self._uses: dict[int, list[int]] = {}
        for number, place in places:
            self._uses.setdefault(number, []).append(place)
        self._started = bytearray(len(world.requests))
        self._low = 0  # all requests before this one have started
        self._lowest = Lowest(self._scores)

    def on_hit(self, entry: Entry, request: Request) -> None:
        """The request has started."""
        self._start(request)

    def on_miss(self, keys: Iterable[int], request: Request) -> None:
        """The request has started."""
        self._start(request)

    def on_finish(self, request: Request, outcome: str) -> None:
        """The request has started, or never will."""
        self._start(request)

    def on_insert(self, entry: Entry, tier: str) -> None:
        """Score all anew."""
        self._lowest.forget()

    def on_split(self, entry: Entry, first: Entry) -> None:
        """Score all anew."""
        self._lowest.forget()

    def on_evict(self, entry: Entry, tier: str, why: str) -> None:
        """Score what may be evicted now."""
        self._lowest.evicted(entry, tier)

    def victim(self, tier: str, kind: str, need: int, queue: Evictable) -> Entry | None:
        """Return the entry that is needed last."""
        return self._lowest.of(tier, kind, queue)

    def next_use(self, key: int) -> float:
        """Return when the next request needs this content; inf if none does."""
        uses = self._uses.get(key, [])
        left = (place for place in uses[bisect_left(uses, self._low) :] if not self._started[place])
        if not self._is_closed:
            return next(left, inf)
        shifts, sessions = self._shift_ns, self._sessions
        return min(
            (self._due_ns[place] + shifts.get(sessions[place], FAR_NS) for place in left),
            default=inf,
        )

    def _start(self, request: Request) -> None:
        place = self._order[request.id]
        if self._started[place]:
            return
        self._started[place] = 1
        if self._is_closed:
            self._shift_ns[self._sessions[place]] = self._now_ns() - self._due_ns[place]
        while self._low < len(self._started) and self._started[self._low]:
            self._low += 1
        self._lowest.forget()

    def _scores(self, entries: list[Entry]) -> Iterable[tuple[float, ...]]:
        return [(-self.next_use(entry.key), -entry.end) for entry in entries]
