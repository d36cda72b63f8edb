"""Policies that give each entry a value: GDSF, Marconi, TinyLFU, and Belady's optimum."""

import heapq
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from math import inf

import numpy as np

from hicache.cache.tiers.transfer import Load
from hicache.cache.tree.entry import Entry, Evictable
from hicache.clock import to_ns
from hicache.config import Arrivals
from hicache.policies.world import World
from hicache.request import Request
from hicache.workload.page_numbers import page_numbers
from hicache.workload.windows import trees

FAR_NS = 1 << 60  # later than every known time


def _flops_per_byte(world: World, entry: Entry, start: int) -> float:
    # the FLOPs that an entry saves per byte, for a prompt that is computed up to token `start`
    return world.flops(start, entry.end) / max(entry.bytes, 1)


class Gdsf:
    """Greedy-Dual-Size-Frequency eviction: evicts the entry of the lowest value first.

    Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy"
    (1998). Each use sets the value of an entry to floor + uses * saved FLOPs / bytes. A hit saves
    these FLOPs. The floor is the value of the last entry evicted from the same page pool. Entries
    without recent uses thus fall behind. Of equal values, the least recently used entry is evicted
    first.
    """

    def __init__(self, world: World | None, capacity: float) -> None:
        self._world = world
        self._floor = 0.0
        self._values: dict[Entry, float] = {}

    def insert(self, entry: Entry) -> None:
        weight = 1.0
        if self._world is not None:
            size = self._world.page_size
            page = self._world.flops(0, size) / self._world.unit_bytes["device"]["full"]
            weight = _flops_per_byte(self._world, entry, entry.start) / page
        self._values[entry] = self._floor + (entry.hits + 1) * weight

    hit = insert

    def split(self, entry: Entry, first: Entry) -> None:
        self._values[first] = self._values[entry]

    def evict(self, entry: Entry) -> None:
        # libCacheSim inserts at the former floor; a KV cache evicts before it inserts
        self._floor = max(self._floor, self._values.pop(entry))

    def rank(self, entry: Entry) -> tuple[float, ...]:
        return (self._values[entry], entry.used)


class Lowest:
    """Finds the entry with the lowest score among the entries that may be evicted.

    `scores` computes the scores of a list of entries. The scores are then stored; `forget` drops
    them when they have changed.
    """

    def __init__(self, scores: Callable[[list[Entry]], Iterable[tuple[float, ...]]]) -> None:
        self._scores = scores
        self._heaps: dict[tuple[str, str], list[tuple[tuple[float, ...], int, Entry]]] = {}

    def forget(self) -> None:
        self._heaps.clear()

    def of(self, tier: str, kind: str, queue: Evictable) -> Entry | None:
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
        heap, above = self._heaps.get((tier, entry.kind)), entry.parent
        if heap and above is not None:
            (score,) = self._scores([above])
            heapq.heappush(heap, (score, above.id, above))


class Marconi:
    """Ranks cached data for eviction by recency, plus `alpha` times the saved FLOPs per byte.

    Pan et al., "Marconi: prefix caching for the era of hybrid LLMs" (MLSys 2025), written from the
    paper. Both terms are scaled to [0, 1]. Recency is 1 / (now - last use). A hit on a page saves
    the FLOPs of the page's tokens. A hit on a Mamba state saves the FLOPs of all tokens since the
    state before it. The paper tunes `alpha` by a replay; here `alpha` is fixed.
    """

    def __init__(self, world: World, *, alpha: float = 1.0) -> None:
        self._world = world
        self._alpha = alpha
        self._lowest = Lowest(self._scores)
        self._saved: dict[tuple[str, int, int], float] = {}

    def _changed(self, *_: object) -> None:
        # an entry above may be evictable now, and the range of values shifts
        self._lowest.forget()

    on_insert = on_hit = on_split = on_evict = _changed

    def victim(self, tier: str, kind: str, need: int, queue: Evictable) -> Entry | None:
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


class StateFlops:
    """Ranks Mamba states by their last use plus the FLOPs per byte that they save.

    A state saves the FLOPs of the tokens since the state before it. The bytes include the KV pages
    of these tokens, because a hit needs the pages too. The FLOPs per byte of a prompt's first page
    weigh as much as `alpha` times 1,000 uses of the cache. Other kinds of data keep LRU order.
    """

    def __init__(self, world: World, *, alpha: float = 1.0) -> None:
        self._world = world
        self._page_bytes = world.unit_bytes["host"]["full"]
        self._scale = alpha * 1000 * self._page_bytes / world.flops(0, world.page_size)

    def rank(self, entry: Entry, tier: str, kind: str) -> float | None:
        if kind != "mamba":
            return None
        start = entry.parent.end if entry.parent else 0
        pages = (entry.end - start) // self._world.page_size
        num_bytes = entry.bytes + pages * self._page_bytes
        return entry.used + self._scale * self._world.flops(start, entry.end) / num_bytes


def _scaled(values: list[float]) -> list[float]:
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


class TinyLfu:
    """Admits data to a full host only if it was used more often than what would be evicted.

    Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (2017). What
    would be evicted is taken to be the host's least recently used entry of the same kind. Each
    prompt page that a request computes and each entry that it reuses counts as a use. After
    `period` * capacity uses, all counts are halved; the capacity is that of the host in pages.
    Counts are exact, where the paper has a sketch. The write policy still chooses when data is
    offered to the host.
    """

    def __init__(self, world: World, *, period: float = 10) -> None:
        pages = world.capacity["host"]["full"]
        self._limit = inf if pages is None else max(period * pages, 1)
        self._uses: Counter[int] = Counter()
        self._since = 0  # uses counted since the counts were halved
        self._held: dict[str, OrderedDict[Entry, None]] = {
            kind: OrderedDict() for kind in world.kinds
        }

    def on_miss(self, keys: Iterable[int], request: Request) -> None:
        for key in keys:
            self._count(key)

    def on_hit(self, entry: Entry, request: Request) -> None:
        self._count(entry.key)
        if entry in self._held[entry.kind]:
            self._held[entry.kind].move_to_end(entry)

    def on_insert(self, entry: Entry, tier: str) -> None:
        if tier == "host":
            self._held[entry.kind][entry] = None

    def on_evict(self, entry: Entry, tier: str, why: str) -> None:
        if tier == "host":
            del self._held[entry.kind][entry]

    def on_split(self, entry: Entry, first: Entry) -> None:
        # the entry's key is now that of its last pages, which were used as often
        uses = self._uses
        uses[entry.key] = max(uses[entry.key], uses[first.key])
        if "host" in first.tiers:
            self._held[first.kind][first] = None

    def admit(self, entry: Entry, source: str, target: str, load: Load) -> bool | None:
        if target != "host" or load.target_free_bytes >= entry.bytes:
            return None  # as the write policy says
        victim = next(iter(self._held[entry.kind]), None)
        if victim is None or self._uses[entry.key] > self._uses[victim.key]:
            return None
        return False

    def _count(self, key: int) -> None:
        self._uses[key] += 1
        self._since += 1
        if self._since >= self._limit:
            self._since = 0
            self._uses = Counter({key: uses // 2 for key, uses in self._uses.items() if uses > 1})


class Belady:
    """Evicts the data that is needed furthest in the future; a reference point, not a real policy.

    Belady, "A study of replacement algorithms for a virtual-storage computer" (1966). The policy
    knows all requests of the workload beforehand. Requests that arrive during the warm-up do not
    count as uses. With full attention on one tier and fixed arrival times, no policy that inserts
    all data gets more hits. In other cases, another policy may get more.

    Raises:
        ValueError: the engine has several ranks. Their clocks differ, so they would disagree.
    """

    def __init__(self, world: World) -> None:
        workload = world.config.workload
        if world.config.parallel.ranks > 1:
            raise ValueError(f"oracle needs parallel.ranks=1, got {world.config.parallel.ranks}")
        numbers = page_numbers(world.requests, world.page_size, world.config.overlap)
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

    def on_hit(self, _: object, request: Request) -> None:
        self._start(request)

    on_miss = on_hit

    def on_finish(self, request: Request, outcome: str) -> None:
        self._start(request)

    def on_insert(self, *_: object) -> None:
        self._lowest.forget()

    on_split = on_insert

    def on_evict(self, entry: Entry, tier: str, why: str) -> None:
        self._lowest.evicted(entry, tier)

    def victim(self, tier: str, kind: str, need: int, queue: Evictable) -> Entry | None:
        return self._lowest.of(tier, kind, queue)

    def next_use(self, key: int) -> float:
        """Return when the content with the number `key` is needed next; infinity means never.

        The result is the place of a request in the order of arrival. With closed arrivals, it is a
        time in nanoseconds.
        """
        uses = self._uses.get(key, [])
        left = (place for place in uses[bisect_left(uses, self._low) :] if not self._started[place])
        if not self._is_closed:
            return next(left, inf)
        # a session continues `think_ns` after each request, counted from its last start; sessions
        # that have not begun come last
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
        # of entries needed at the same time, the deeper goes first
        return [(-self.next_use(entry.key), -entry.end) for entry in entries]
