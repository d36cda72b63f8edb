"""Eviction policies made of queues: SLRU, S3-FIFO, ARC and LeCaR.

Each policy has one instance per pool. `PerPool` passes the events of a tier and kind to the
instance. An entry that is in use when its turn comes goes to the end of its queue. Sizes are pages
or states.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from math import exp, inf
from random import Random
from typing import Any

from hicache.cache.tree.entry import Entry
from hicache.policies.world import World
from hicache.request import Request


class PerPool:
    """Builds one instance of an eviction policy per page pool, and passes cache events to it.

    `make(world, capacity, **knobs)` builds the instance of a pool. The capacity is in pages; `inf`
    means unlimited. Each instance chooses what to evict by its method `victim` or its method
    `rank`.
    """

    def __init__(self, make: Callable[..., Any], world: World, **knobs: float) -> None:
        self._pools = {
            (tier, kind): make(world, inf if capacity is None else capacity, **knobs)
            for tier, kinds in world.capacity.items()
            for kind, capacity in kinds.items()
        }
        pool = next(iter(self._pools.values()))
        for name, event in (("rank", "rank"), ("victim", "victim"), ("miss", "on_miss")):
            if not hasattr(pool, name):
                setattr(self, event, None)

    def on_insert(self, entry: Entry, tier: str) -> None:
        self._pools[tier, entry.kind].insert(entry)

    def on_hit(self, entry: Entry, request: Request) -> None:
        for tier in entry.tiers:
            self._pools[tier, entry.kind].hit(entry)

    def on_miss(self, keys: Iterable[int], request: Request) -> None:
        for pool in self._pools.values():
            pool.miss(keys)

    def on_split(self, entry: Entry, first: Entry) -> None:
        for tier in entry.tiers:
            self._pools[tier, entry.kind].split(entry, first)

    def on_evict(self, entry: Entry, tier: str, why: str) -> None:
        self._pools[tier, entry.kind].evict(entry)

    def rank(self, entry: Entry, tier: str, kind: str) -> tuple[float, ...]:
        ranked: tuple[float, ...] = self._pools[tier, kind].rank(entry)
        return ranked

    def victim(self, tier: str, kind: str, need: int, queue: Container[Entry]) -> Entry | None:
        chosen: Entry | None = self._pools[tier, kind].victim(queue)
        return chosen


class Line:
    """A queue of cache entries or keys with their sizes; `size` is the sum of the sizes."""

    def __init__(self) -> None:
        self.items: OrderedDict[Any, int] = OrderedDict()
        self.size = 0

    def put(self, item: object, count: int) -> None:
        self.drop(item)
        self.items[item] = count
        self.size += count

    def drop(self, item: object) -> bool:
        count = self.items.pop(item, None)
        self.size -= count or 0
        return count is not None

    def drop_oldest(self) -> None:
        if self.items:
            self.size -= self.items.popitem(last=False)[1]

    def first(self, queue: Container[Entry]) -> Entry | None:
        for _ in range(len(self.items)):
            entry: Entry = next(iter(self.items))
            if entry in queue:
                return entry
            self.items.move_to_end(entry)
        return None


def _split(lines: Iterable[Line], entry: Entry, first: Entry) -> None:
    # the inner part goes to the end: it cannot be evicted before the outer one
    for line in lines:
        if line.drop(entry):
            line.put(entry, entry.count)
            line.items.move_to_end(entry, last=False)
            line.put(first, first.count)


class Slru:
    """Segmented LRU: a queue of several segments, in which a hit moves an entry up by one segment.

    Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994), with
    four equal segments as in libCacheSim. A full segment passes its least recently used entry to
    the segment below. The victim is the least recently used entry of the lowest segment.
    """

    def __init__(self, world: World | None, capacity: float, *, segments: float = 4) -> None:
        self._limit = capacity if capacity == inf else capacity // segments
        self._lines = [Line() for _ in range(int(segments))]

    def insert(self, entry: Entry) -> None:
        roomy = (line for line in self._lines if line.size + entry.count <= self._limit)
        next(roomy, self._lines[0]).put(entry, entry.count)

    def hit(self, entry: Entry) -> None:
        lines = self._lines
        place = next(n for n, line in enumerate(lines) if entry in line.items)
        lines[place].drop(entry)
        top = min(place + 1, len(lines) - 1)
        lines[top].put(entry, entry.count)
        for above in range(top, 0, -1):
            line = lines[above]
            while line.size > self._limit and len(line.items) > 1:
                oldest = next(iter(line.items))
                line.drop(oldest)
                lines[above - 1].put(oldest, oldest.count)

    def split(self, entry: Entry, first: Entry) -> None:
        _split(self._lines, entry, first)

    def evict(self, entry: Entry) -> None:
        for line in self._lines:
            line.drop(entry)

    def victim(self, queue: Container[Entry]) -> Entry | None:
        return next((e for e in (line.first(queue) for line in self._lines) if e is not None), None)


class S3Fifo:
    """S3-FIFO eviction: a small queue, a main queue, and a ghost queue of evicted keys.

    Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023). New data enters the
    small queue, or the main queue if its key is a ghost. Data at the end of the small queue moves
    to the main queue if it had `moves` hits. Otherwise it is evicted, and its key becomes a ghost.
    Data at the end of the main queue is evicted if it had no recent hits. `small` and `ghosts` are
    shares of the capacity.
    """

    def __init__(
        self,
        world: World | None,
        capacity: float,
        *,
        small: float = 0.1,
        ghosts: float = 0.9,
        moves: float = 2,
    ) -> None:
        self._small_limit = capacity if capacity == inf else int(capacity * small)
        self._main_limit = capacity - (0 if capacity == inf else self._small_limit)
        self._has_evicted = False
        self._ghost_limit = inf if capacity == inf else int(capacity * ghosts)
        self._moves = moves
        self._small, self._main, self._ghosts = Line(), Line(), Line()
        self._freq: dict[Entry, int] = {}
        self._back: set[int] = set()  # missed keys that were ghosts

    def insert(self, entry: Entry) -> None:
        self._freq[entry] = 0
        key = entry.key
        # as in libCacheSim, the main queue takes the overflow until the first eviction
        is_full = not self._has_evicted and self._small.size >= self._small_limit
        line = self._main if is_full or key in self._back else self._small
        self._back.discard(key)
        line.put(entry, entry.count)

    def hit(self, entry: Entry) -> None:
        self._freq[entry] += 1

    def miss(self, keys: Iterable[int]) -> None:
        self._back = {key for key in keys if self._ghosts.drop(key)}

    def split(self, entry: Entry, first: Entry) -> None:
        _split((self._small, self._main), entry, first)
        self._freq[first] = self._freq[entry]

    def evict(self, entry: Entry) -> None:
        del self._freq[entry]
        self._main.drop(entry)
        if self._small.drop(entry):
            while self._ghosts.items and self._ghosts.size + entry.count > self._ghost_limit:
                self._ghosts.drop_oldest()
            if entry.count <= self._ghost_limit:
                self._ghosts.put(entry.key, entry.count)

    def victim(self, queue: Container[Entry]) -> Entry | None:
        self._has_evicted = True
        if self._main.size <= self._main_limit:
            while (entry := self._small.first(queue)) is not None:
                if self._freq[entry] < self._moves:
                    return entry
                self._small.drop(entry)
                self._main.put(entry, entry.count)
                self._freq[entry] = 0
        while (entry := self._main.first(queue)) is not None:
            if not self._freq[entry]:
                return entry
            self._freq[entry] = min(self._freq[entry], 3) - 1  # a clock
            self._main.put(entry, entry.count)
        return self._small.first(queue)


class Arc:
    """ARC eviction: two LRU queues, for data used once and for data used again.

    Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). The policy
    remembers the keys of data that a queue has evicted, as ghosts of the queue. If a request misses
    data whose key is a ghost, the target size of that queue grows. The two target sizes add up to
    the capacity.
    """

    def __init__(self, world: World | None, capacity: float) -> None:
        self._capacity = capacity
        self._target = 0.0  # of T1
        self._once, self._again = Line(), Line()  # T1 and T2 of the paper, their ghosts B1 and B2
        self._once_ghosts, self._again_ghosts = Line(), Line()
        self._back: set[int] = set()
        self._is_again = False  # the last ghost was one of T2
        self._leaves_ghost = True

    def insert(self, entry: Entry) -> None:
        key = entry.key
        (self._again if key in self._back else self._once).put(entry, entry.count)
        self._back.discard(key)

    def hit(self, entry: Entry) -> None:
        self._once.drop(entry)
        self._again.put(entry, entry.count)

    def miss(self, keys: Iterable[int]) -> None:
        self._back = set()
        for key in keys:
            once, again = self._once_ghosts, self._again_ghosts
            if key in once.items:
                self._target = min(self._target + max(again.size / once.size, 1), self._capacity)
            elif key in again.items:
                self._target = max(self._target - max(once.size / again.size, 1), 0)
            else:
                continue
            self._is_again = key in again.items
            once.drop(key)
            again.drop(key)
            self._back.add(key)

    def split(self, entry: Entry, first: Entry) -> None:
        _split((self._once, self._again), entry, first)

    def evict(self, entry: Entry) -> None:
        ghosts = self._once_ghosts if self._once.drop(entry) else self._again_ghosts
        self._again.drop(entry)
        if self._leaves_ghost:
            ghosts.put(entry.key, entry.count)
        self._leaves_ghost = True

    def victim(self, queue: Container[Entry]) -> Entry | None:
        once, again = self._once, self._again
        ghosts = self._once_ghosts.size + self._again_ghosts.size
        if not self._back and once.size + self._once_ghosts.size >= self._capacity:
            if not self._once_ghosts.items:
                self._leaves_ghost = False
                return once.first(queue) or again.first(queue)
            self._once_ghosts.drop_oldest()
        elif not self._back and once.size + again.size + ghosts >= 2 * self._capacity:
            self._again_ghosts.drop_oldest()
        at_target = once.size == self._target and bool(self._back) and self._is_again
        lines = (once, again) if once.size > self._target or at_target else (again, once)
        return lines[0].first(queue) or lines[1].first(queue)


class LeCaR:
    """LeCaR eviction: chooses LRU or LFU at random for each eviction, and learns their weights.

    Vietri et al., "Driving cache replacement with ML-based LeCaR" (HotStorage 2018). If a request
    needs data that LRU evicted, the weight of LFU rises, and vice versa. The weight is multiplied
    by exp(`rate` * d^t) if the eviction was t requests ago, with d = 0.005^(1 / capacity).
    """

    def __init__(self, world: World | None, capacity: float, *, rate: float = 0.45) -> None:
        self._capacity = capacity
        self._rate = rate
        self._discount = 0.005 ** (1 / max(capacity, 1))
        self._rng = Random(0 if world is None else world.seed)
        self._line = Line()
        self._ghosts = {"lru": Line(), "lfu": Line()}
        self._evicted_at: dict[int, int] = {}
        self._weight = {"lru": 0.5, "lfu": 0.5}
        self._uses: dict[Entry, int] = {}
        self._now = 0
        self._chooser = "lfu"

    @property
    def weights(self) -> Mapping[str, float]:
        return self._weight

    def insert(self, entry: Entry) -> None:
        self._uses[entry] = 1
        self._line.put(entry, entry.count)

    def hit(self, entry: Entry) -> None:
        self._now += 1
        self._uses[entry] += 1
        self._line.put(entry, entry.count)

    def miss(self, keys: Iterable[int]) -> None:
        self._now += 1
        for key in keys:
            for name, other in (("lru", "lfu"), ("lfu", "lru")):
                if self._ghosts[name].drop(key):
                    age = self._now - self._evicted_at[key]
                    self._weight[other] *= exp(self._rate * self._discount**age)
        total = sum(self._weight.values())
        self._weight = {name: weight / total for name, weight in self._weight.items()}

    def split(self, entry: Entry, first: Entry) -> None:
        _split((self._line,), entry, first)
        self._uses[first] = self._uses[entry]

    def evict(self, entry: Entry) -> None:
        self._line.drop(entry)
        del self._uses[entry]
        ghosts, key = self._ghosts[self._chooser], entry.key
        ghosts.put(key, entry.count)
        self._evicted_at[key] = self._now
        while ghosts.size > self._capacity:
            ghosts.drop_oldest()

    def rank(self, entry: Entry) -> tuple[float, ...]:
        return (self._uses[entry], entry.used)

    def victim(self, queue: Container[Entry]) -> Entry | None:
        # the victim of LRU; None leaves the choice to the ranks, which are those of LFU
        self._chooser = "lru" if self._rng.random() < self._weight["lru"] else "lfu"
        return self._line.first(queue) if self._chooser == "lru" else None
