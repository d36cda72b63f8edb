"""Runs eviction policies of other caches in this one, and policies of this one in other caches.

Each adapter needs only the methods of the other project's interface; none of their packages is
imported. To run a class of another project, name it in a module of your own:

    from functools import partial
    from lmcache.v1.storage_backend.cache_policy.mru import MRUCachePolicy
    Theirs = partial(PerPool, partial(FromLMCache, MRUCachePolicy))    # cache.policy=mine:Theirs

Adapters to other caches (`ToSGLang`, `ToVllm`, `ToLibCacheSim`) run policies with a method `rank`.
"""

from collections.abc import Callable, Container, Iterable
from heapq import nsmallest
from itertools import chain, count
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
    """Wraps an eviction policy of this package as an `EvictionStrategy` of SGLang."""

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
        return _rank(self._policy, entry, "device")


def _rank(policy: Any, entry: Any, tier: str) -> tuple[float, ...]:
    given = policy.rank(entry, tier, "full")
    if given is None:  # LRU
        return (entry.used,)
    return given if isinstance(given, tuple) else (given,)


class Ranked:
    """Keeps the items of another cache, and ranks them by an eviction policy of this package.

    An item is a page or an object. The policy sees it as an `Entry` without the attributes that
    need a radix tree.
    """

    def __init__(self, policy: Any, tier: str) -> None:
        self._policy, self._tier = policy, tier
        self._clock = count()
        self._items: dict[Any, SimpleNamespace] = {}

    def insert(self, key: Any, size: int = 1) -> None:
        now = next(self._clock)
        self._items[key] = SimpleNamespace(
            id=now, key=key, kind="full", created=now, used=now, uses=1, hits=0, count=size
        )

    def use(self, key: Any) -> None:
        item = self._items[key]
        item.used, item.uses, item.hits = next(self._clock), item.uses + 1, item.hits + 1

    def remove(self, key: Any) -> None:
        self._items.pop(key, None)

    def lowest(self, number: int, keys: Iterable[Any] | None = None) -> list[Any]:
        """Return the `number` items of `keys` (by default of all) to be evicted first."""
        policy, items, tier = self._policy, self._items, self._tier
        return nsmallest(
            number, items if keys is None else keys, lambda key: _rank(policy, items[key], tier)
        )


class ToVllm:
    """Makes an eviction policy of this package a `CachePolicy` of vLLM's KV offloading.

    A class in a module of your own names the policy. vLLM finds it by `cache_policy` and
    `cache_policy_module_path`:

        class Mine(ToVllm, CachePolicy):
            make = Lfu
    """

    make: Callable[[], Any]

    def __init__(self, cache_capacity: int) -> None:
        self.clear()

    def clear(self) -> None:
        self._ranked, self._chunks = Ranked(type(self).make(), "host"), dict[bytes, Any]()

    def get(self, key: bytes) -> Any:
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any) -> None:
        self._chunks[key] = chunk
        self._ranked.insert(key)

    def remove(self, key: bytes) -> None:
        del self._chunks[key]
        self._ranked.remove(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        for key in reversed([key for key in keys if key in self._chunks]):  # the head was used last
            self._ranked.use(key)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None: ...

    def on_request_finished(
        self, key_groups: Any, insertion_only_keys: Any, reused_keys: set[bytes], req_context: Any
    ) -> None:
        self.touch((key for key in chain(*key_groups) if key in reused_keys), req_context)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        chunks = self._chunks
        idle = [key for key in chunks if chunks[key].ref_cnt == 0 and key not in protected]
        if len(idle) < n:
            return None
        evicted = [(key, chunks[key]) for key in self._ranked.lowest(n, idle)]
        for key, _ in evicted:
            self.remove(key)
        return evicted


class ToLibCacheSim:
    """Makes the hooks of libCacheSim's `PluginCache` from an eviction policy of this package.

        hooks = ToLibCacheSim(Lfu)
        cache = PluginCache(size, hooks.init, hooks.hit, hooks.miss, hooks.evict, hooks.remove)

    The policy sees the size of an object as `Entry.count`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def init(self, params: Any) -> Ranked:
        return Ranked(self._make(), "device")

    def hit(self, ranked: Ranked, request: Any) -> None:
        ranked.use(request.obj_id)

    def miss(self, ranked: Ranked, request: Any) -> None:
        ranked.insert(request.obj_id, request.obj_size)

    def evict(self, ranked: Ranked, request: Any) -> int:
        (key,) = ranked.lowest(1)
        ranked.remove(key)
        return int(key)

    def remove(self, ranked: Ranked, obj_id: int) -> None:
        ranked.remove(obj_id)


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


class FromLibCacheSim:
    """Runs the hooks of libCacheSim's `PluginCache` as the eviction policy of one page pool.

    `hooks` are the functions for initialization, hit, miss, eviction and removal, in this order.
    `obj_id` is an entry's `key`, and `obj_size` its `count`. If the eviction hook names an entry
    that is in use, the entry is inserted anew.
    """

    def __init__(
        self, hooks: tuple[Callable[..., Any], ...], world: World | None, capacity: float
    ) -> None:
        init, self._hit, self._miss, self._evict, self._remove = hooks
        self._data = init(SimpleNamespace(cache_size=int(min(capacity, 1 << 40))))
        self._held: dict[int, Entry] = {}
        self._keys: dict[Entry, int] = {}

    def insert(self, entry: Entry) -> None:
        self._keys[entry] = entry.key
        self._held[entry.key] = entry
        self._miss(self._data, self._request(entry))

    def hit(self, entry: Entry) -> None:
        self._hit(self._data, self._request(entry))

    def split(self, entry: Entry, first: Entry) -> None:
        # the entry has a new key now, that of its last pages
        self.evict(entry)
        self.insert(first)
        self.insert(entry)

    def evict(self, entry: Entry) -> None:
        key = self._keys.pop(entry)
        if self._held.pop(key, None) is not None:  # it is not the victim
            self._remove(self._data, key)

    def victim(self, queue: Container[Entry]) -> Entry | None:
        for _ in range(len(self._held)):
            entry = self._held.pop(self._evict(self._data, SimpleNamespace()))
            if entry in queue:
                return entry
            self.insert(entry)
        return None

    def _request(self, entry: Entry) -> SimpleNamespace:
        return SimpleNamespace(obj_id=self._keys[entry], obj_size=entry.count)


class FromVllm:
    """Runs a `CachePolicy` of vLLM's KV offloading as the eviction policy of one page pool.

    `make(capacity)` creates the vLLM policy. `chunk(number)` creates an unused `ChunkStatus`
    of vLLM; `number` is another in each call. `context()` creates a `ReqContext` of vLLM.
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
        chunk = self._chunk(next(self._numbers))
        self._policy.insert(name, chunk, self._context())
        chunk.ref_cnt = 0  # the store is complete
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
