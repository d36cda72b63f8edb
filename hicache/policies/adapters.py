"""Runs eviction policies of other caches in this one, and policies of this one in SGLang.

Each adapter needs only the methods of the other project's interface; none of their packages is
imported. To run a class of another project, name it in a module of your own:

    from functools import partial
    from lmcache.v1.storage_backend.cache_policy.mru import MRUCachePolicy
    Theirs = partial(PerPool, partial(FromLMCache, MRUCachePolicy))    # cache.policy=mine:Theirs
"""

from collections.abc import Callable, Container, Iterable
from itertools import count
from types import SimpleNamespace
from typing import Any

from hicache.cache.tree.entry import Entry, Evictable
from hicache.policies.world import World


class FromSGLang:
    """Runs an `EvictionStrategy` of SGLang as an eviction policy of this package.

    `make` creates the strategy. The radix-tree leaf with the lowest `get_priority(node)` is evicted
    first. As in SGLang, all leaves are ranked anew at each eviction. The strategy ranks
    full-attention KV only; sliding windows and Mamba states keep LRU order.
    """

    def __init__(self, make: Callable[[], Any], world: World | None) -> None:
        self._strategy = make()

    def victim(self, tier: str, kind: str, need: int, queue: Evictable) -> Entry | None:
        return min(queue, key=self._priority, default=None) if kind == "full" else None

    def _priority(self, entry: Entry) -> Any:
        node = SimpleNamespace(
            last_access_time=entry.used,
            creation_time=entry.created,
            hit_count=entry.uses,
            priority=0,
            key=range(entry.count),
        )
        return self._strategy.get_priority(node)


class ToSGLang:
    """Wraps an eviction policy of this package as an `EvictionStrategy` of SGLang.

    The policy must have a method `rank`.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def get_priority(self, node: Any) -> Any:
        entry = SimpleNamespace(
            used=node.last_access_time,
            created=node.creation_time,
            uses=node.hit_count,
            hits=max(node.hit_count - 1, 0),
            count=len(node.key),
        )
        return self._policy.rank(entry, "device", "full")


class FromLMCache:
    """Runs a `BaseCachePolicy` of LMCache as the eviction policy of one page pool.

    `make` creates the LMCache policy.
    """

    def __init__(self, make: Callable[[], Any], world: World | None, capacity: float) -> None:
        self._policy = make()
        self._held = self._policy.init_mutable_mapping()

    def insert(self, entry: Entry) -> None:
        self._held[entry] = SimpleNamespace(can_evict=True)
        self._policy.update_on_put(entry)

    def hit(self, entry: Entry) -> None:
        self._policy.update_on_hit(entry, self._held)

    def miss(self, keys: Iterable[int]) -> None: ...

    def split(self, entry: Entry, first: Entry) -> None:
        self.insert(first)

    def evict(self, entry: Entry) -> None:
        del self._held[entry]
        self._policy.update_on_force_evict(entry)

    def victim(self, queue: Container[Entry]) -> Entry | None:
        for entry, item in self._held.items():
            item.can_evict = entry in queue
        candidates: list[Entry] = self._policy.get_evict_candidates(self._held, 1)
        return candidates[0] if candidates else None


class FromVllm:
    """Runs a `CachePolicy` of vLLM's KV offloading as the eviction policy of one page pool.

    `make(capacity)` creates the vLLM policy. `chunk(number)` creates an unused `ChunkStatus` of
    vLLM. `context()` creates a `ReqContext` of vLLM.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        chunk: Callable[[int], Any],
        context: Callable[[], Any],
        world: World | None,
        capacity: float,
    ) -> None:
        self._policy = make(int(min(capacity, 1 << 40)))
        self._chunk, self._context = chunk, context
        self._numbers = count()
        self._held: dict[bytes, Entry] = {}
        self._names: dict[Entry, bytes] = {}

    def insert(self, entry: Entry) -> None:
        name = b"%d" % entry.key
        self._held[name], self._names[entry] = entry, name
        self._policy.insert(name, self._chunk(next(self._numbers)), self._context())
        self._policy.mark_evictable(name)

    def hit(self, entry: Entry) -> None:
        self._policy.touch([self._names[entry]], self._context())

    def miss(self, keys: Iterable[int]) -> None:
        self._policy.on_store_miss([b"%d" % key for key in keys], self._context())

    def split(self, entry: Entry, first: Entry) -> None:
        # the entry has a new key now, that of its last pages
        self.evict(entry)
        self.insert(first)
        self.insert(entry)

    def evict(self, entry: Entry) -> None:
        name = self._names.pop(entry)
        del self._held[name]
        if self._policy.get(name) is not None:
            self._policy.remove(name)

    def victim(self, queue: Container[Entry]) -> Entry | None:
        protected = {name for name, entry in self._held.items() if entry not in queue}
        evicted = self._policy.evict(1, protected)
        return self._held[evicted[0][0]] if evicted else None
