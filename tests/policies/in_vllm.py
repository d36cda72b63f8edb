"""Victims of vLLM's own offloading manager and of this cache, on streams of single pages.

`test_engines.py` runs this module in the environment of vLLM. It prints a JSON object: by case, the
pages that vLLM's manager evicts, and those that this cache evicts, in order.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from hicache.policies.adapters import FromVllm, ToVllm
from hicache.policies.eviction import Lfu, UsedAgain
from hicache.policies.queues import PerPool
from tests.policies.single import WORLD, victims_of
from tests.policies.streams import CAPACITY, STREAMS


class OurLfu(ToVllm, CachePolicy):
    make = Lfu


class OurSlru(ToVllm, CachePolicy):
    make = UsedAgain


def vllm_arc() -> PerPool:
    make = partial(FromVllm, ARCCachePolicy, ChunkStatus, partial(ReqContext, "any"))
    return PerPool(make, WORLD)


CASES: dict[str, tuple[str, Callable[[], Any]]] = {  # cache_policy there, and the policy here
    "our LFU in both": ("OurLfu", Lfu),
    "our SLRU in both": ("OurSlru", UsedAgain),
    "vLLM's ARC in both": ("arc", vllm_arc),
    "vLLM's LRU and our LRU": ("lru", lambda: None),
}


def victims_in_vllm(name: str, stream: list[int]) -> list[int]:
    manager = CPUOffloadingManager(CAPACITY, name, __spec__.name)
    victims: list[int] = []
    for number, page in enumerate(stream):
        context = ReqContext(f"{number}")
        keys = [make_offload_key(b"%d" % page, 0)]
        manager.on_new_request(context)
        if manager.lookup(keys[0], context) is LookupResult.HIT:
            manager.prepare_load(keys, context)
            manager.complete_load(keys, context)
        else:
            stored = manager.prepare_store(keys, context)
            assert stored is not None
            victims += [int(key[:-4]) for key in stored.evicted_keys]
            manager.complete_store(keys, context)
        manager.on_request_finished(context)
    return victims


def main() -> None:
    found = {
        f"{case}, {name}": (victims_in_vllm(theirs, make()), victims_of(make(), CAPACITY, ours()))
        for case, (theirs, ours) in CASES.items()
        for name, make in STREAMS.items()
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
