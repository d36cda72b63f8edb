"""Misses that other caches count on the streams, kept in peers.json.

PYTHON -m tests.policies.peers DIRECTORY > tests/policies/peers.json

PYTHON is one of an environment with libcachesim 0.3.5, sortedcontainers, numpy and
typing_extensions (`pip install`).
DIRECTORY has the wheels of lmcache 0.5.6, vllm 0.33.0 and sglang 0.5.23, unpacked
(`pip download --no-deps`, `unzip`): their policies are loaded without the rest of the packages.
"""

import importlib
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hicache.policies.adapters import ToLibCacheSim
from hicache.policies.eviction import Lfu
from tests.policies.streams import CAPACITY, STREAMS

LIBCACHESIM = ("LRU", "FIFO", "LFU", "SLRU", "ARC", "S3FIFO", "GDSF")
LMCACHE = ("LRU", "FIFO", "LFU", "MRU")
SGLANG = ("LRU", "FIFO", "LFU", "SLRU", "MRU", "FILO")
VLLM = ("LRU", "ARC")
OUR_LFU = ToLibCacheSim(Lfu)
PLUGINS: dict[str, tuple[Callable[..., Any], ...]] = {  # hooks of libCacheSim's PluginCache
    "our LFU": (OUR_LFU.init, OUR_LFU.hit, OUR_LFU.miss, OUR_LFU.evict, OUR_LFU.remove),
    "MRU": (
        lambda params: OrderedDict(),
        lambda held, request: held.move_to_end(request.obj_id),
        lambda held, request: held.update({request.obj_id: request.obj_size}),
        lambda held, request: held.popitem()[0],
        lambda held, obj_id: held.pop(obj_id),
    ),
}


def main() -> None:
    for place in ("lmcache.v1.storage_backend.cache_policy", "sglang.srt.mem_cache"):
        stand_in(place)
    stand_in("lmcache.logging", init_logger=lambda name: SimpleNamespace(info=lambda text: None))
    monitor = SimpleNamespace(on_chunk_reuse=lambda seconds: None)
    stand_in("lmcache.observability", LMCStatsMonitor=SimpleNamespace(GetOrCreate=lambda: monitor))
    stand_in("lmcache.utils", CacheEngineKey=type("CacheEngineKey", (), {}))
    stand_in("vllm.v1.kv_offload.cpu.policies")
    stand_in("vllm.v1.kv_offload.base", OffloadKey=bytes, ReqContext=Context)
    misses: dict[str, dict[str, int]] = {}
    for stream, make in STREAMS.items():
        found = misses[stream] = {}
        for count, names in (
            (of_libcachesim, LIBCACHESIM),
            (of_plugin, tuple(PLUGINS)),
            (of_lmcache, LMCACHE),
            (of_sglang, SGLANG),
            (of_vllm, VLLM),
        ):
            for name in names:
                found[f"{count.__name__[3:]} {name}"] = count(name, make())
    json.dump(misses, sys.stdout, indent=2)


def stand_in(name: str, **contents: object) -> None:
    """Make a module of these contents; it and those above it find others in DIRECTORY."""
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        full = ".".join(parts[:number])
        if full not in sys.modules:
            sys.modules[full] = ModuleType(full)
            sys.modules[full].__path__ = [str(Path(sys.argv[1], *parts[:number]))]
    vars(sys.modules[name]).update(contents)


class Context:
    """A request of vLLM that says nothing of the places of its pages."""

    def get_offload_key_position(self, key: bytes) -> None:
        return None


def counted(
    stream: list[int],
    hit: Callable[[int], None],
    make_room: Callable[[], int],
    insert: Callable[[int], None],
) -> int:
    """Misses of a cache whose pages are kept here."""
    held: set[int] = set()
    misses = 0
    for page in stream:
        if page in held:
            hit(page)
            continue
        misses += 1
        if len(held) == CAPACITY:
            held.remove(make_room())
        held.add(page)
        insert(page)
    return misses


def of_libcachesim(name: str, stream: list[int]) -> int:
    import libcachesim

    return misses_in(getattr(libcachesim, name)(cache_size=CAPACITY), stream)


def of_plugin(name: str, stream: list[int]) -> int:
    import libcachesim

    return misses_in(libcachesim.PluginCache(CAPACITY, *PLUGINS[name], lambda held: None), stream)


def misses_in(cache: Any, stream: list[int]) -> int:
    import libcachesim

    misses = 0
    for number, page in enumerate(stream):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = page, 1, number
        misses += not cache.get(request)
    return misses


def of_lmcache(name: str, stream: list[int]) -> int:
    module = importlib.import_module(f"lmcache.v1.storage_backend.cache_policy.{name.lower()}")
    policy = getattr(module, f"{name}CachePolicy")()
    held = policy.init_mutable_mapping()

    def insert(page: int) -> None:
        held[page] = SimpleNamespace(can_evict=True)
        policy.update_on_put(page)

    def make_room() -> int:
        (page,) = policy.get_evict_candidates(held, 1)
        del held[page]
        policy.update_on_force_evict(page)
        return int(page)

    return counted(stream, lambda page: policy.update_on_hit(page, held), make_room, insert)


def of_sglang(name: str, stream: list[int]) -> int:
    module = importlib.import_module("sglang.srt.mem_cache.evict_policy")
    strategy = getattr(module, f"{name}Strategy")()
    nodes: dict[int, Any] = {}
    clock = iter(range(len(stream)))

    def hit(page: int) -> None:
        nodes[page].hit_count += 1
        nodes[page].last_access_time = next(clock)

    def insert(page: int) -> None:
        now = next(clock)
        nodes[page] = SimpleNamespace(last_access_time=now, creation_time=now, hit_count=1)

    def make_room() -> int:
        page = min(nodes, key=lambda each: strategy.get_priority(nodes[each]))
        del nodes[page]
        return page

    return counted(stream, hit, make_room, insert)


def of_vllm(name: str, stream: list[int]) -> int:
    module = importlib.import_module(f"vllm.v1.kv_offload.cpu.policies.{name.lower()}")
    policy = getattr(module, f"{name}CachePolicy")(CAPACITY)
    context = Context()
    misses = 0
    for number, page in enumerate(stream):
        key = b"%d" % page
        if policy.get(key) is not None:
            policy.touch([key], context)
            continue
        misses += 1
        policy.on_store_miss([key], context)
        if misses > CAPACITY:
            policy.evict(1, set())
        policy.insert(key, SimpleNamespace(ref_cnt=0, chunk_id=number, is_ready=True), context)
        policy.mark_evictable(key)
    return misses


if __name__ == "__main__":
    main()
