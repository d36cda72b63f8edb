"""Policies of the literature miss as often as their originals, and so do policies in adapters.

`peers.json` has the misses that libcachesim 0.3.5, lmcache 0.5.6, vllm 0.33.0 and sglang 0.5.23
count on the streams; `tests/policies/peers.py` at 09ab7c4b runs them.
"""

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.policies.adapters import (
    FromLibCacheSim,
    FromLMCache,
    FromSGLang,
    FromVllm,
    ToLibCacheSim,
    ToSGLang,
    ToVllm,
)
from hicache.policies.eviction import Fifo, Lfu, UsedAgain
from hicache.policies.queues import PerPool
from hicache.policies.stock import STOCK
from tests.policies.single import WORLD, misses_of
from tests.policies.streams import CAPACITY, STREAMS

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())


class MostRecent:
    """Of SGLang's interface: the one used last goes first."""

    def get_priority(self, node):
        return -node.last_access_time


class Newest:
    """Of LMCache's interface: the one used last goes first."""

    def init_mutable_mapping(self):
        return OrderedDict()

    def update_on_hit(self, key, cache_dict):
        cache_dict.move_to_end(key)

    def update_on_put(self, key):
        pass

    def update_on_force_evict(self, key):
        pass

    def get_evict_candidates(self, cache_dict, num_candidates=1):
        able = [key for key in reversed(cache_dict) if cache_dict[key].can_evict]
        return able[:num_candidates]


class Recency:
    """Of vLLM's interface: LRU."""

    def __init__(self, cache_capacity):
        self.chunks = OrderedDict()

    def get(self, key):
        return self.chunks.get(key)

    def insert(self, key, chunk, req_context):
        self.chunks[key] = chunk

    def remove(self, key):
        del self.chunks[key]

    def touch(self, keys, req_context):
        for key in keys:
            if key in self.chunks:
                self.chunks.move_to_end(key)

    on_store_miss = touch

    def mark_evictable(self, key):
        pass

    def evict(self, n, protected):
        idle = [key for key in self.chunks if self.chunks[key].ref_cnt == 0]
        keys = [key for key in idle if key not in protected][:n]
        return [(key, self.chunks.pop(key)) for key in keys]


# hooks of libCacheSim's PluginCache: the one used last goes first
MRU_HOOKS = (
    lambda params: OrderedDict(),
    lambda held, request: held.move_to_end(request.obj_id),
    lambda held, request: held.update({request.obj_id: request.obj_size}),
    lambda held, request: held.popitem()[0],
    lambda held, obj_id: held.pop(obj_id),
)


def misses_elsewhere(stream, hit, make_room, insert):
    """Misses of another cache, which asks a policy of ours for its victims."""
    held = set()
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


def chunk_of(number):
    return SimpleNamespace(chunk_id=number, ref_cnt=-1)


newest = partial(FromLMCache, Newest)
mru_hooks = partial(FromLibCacheSim, MRU_HOOKS)
recency = partial(FromVllm, Recency, chunk_of, dict)


ALL = tuple(STREAMS)
OURS = {  # with the peers that must miss as often, and the streams
    "none": (lambda: None, ["libcachesim LRU", "lmcache LRU", "sglang LRU", "vllm LRU"], ALL),
    "fifo": (Fifo, ["libcachesim FIFO", "lmcache FIFO", "sglang FIFO"], ["scans"]),
    "lfu": (Lfu, ["libcachesim LFU", "plugin our LFU", "lmcache LFU", "sglang LFU"], ["zipf"]),
    "slru of two segments": (UsedAgain, ["sglang SLRU"], ["scans"]),
    "slru": (partial(STOCK["slru"], WORLD), ["libcachesim SLRU"], ALL),
    "arc": (partial(STOCK["arc"], WORLD), ["libcachesim ARC"], ALL),
    "s3fifo": (partial(STOCK["s3fifo"], WORLD), ["libcachesim S3FIFO"], ALL),
    "MRU from SGLang": (partial(FromSGLang, MostRecent, WORLD), ["sglang MRU"], ["scans"]),
    "MRU from LMCache": (partial(PerPool, newest, WORLD), ["lmcache MRU"], ["phases"]),
    "MRU from libCacheSim": (partial(PerPool, mru_hooks, WORLD), ["plugin MRU"], ["scans"]),
    "LRU from vLLM": (partial(PerPool, recency, WORLD), ["vllm LRU"], ["scans"]),
}


@pytest.mark.parametrize(
    ("name", "stream"), [(name, stream) for name in OURS for stream in OURS[name][2]]
)
def test_a_policy_misses_as_often_as_in_these_peers(name: str, stream: str) -> None:
    make, peers, _ = OURS[name]
    misses = misses_of(STREAMS[stream](), CAPACITY, make())
    assert {peer: PEERS[stream][peer] for peer in peers} == dict.fromkeys(peers, misses)


def test_gdsf_is_that_of_libcachesim_except_that_it_inserts_after_an_eviction() -> None:
    accesses = STREAMS["phases"]()
    assert gdsf_misses(accesses, inserts_first=True) == PEERS["phases"]["libcachesim GDSF"]
    ours = misses_of(accesses, CAPACITY, STOCK["gdsf"](WORLD))
    assert ours == gdsf_misses(accesses, inserts_first=False)


def of_sglang_nodes():
    strategy = ToSGLang(Lfu())
    nodes: dict[int, SimpleNamespace] = {}
    clock = iter(range(20_000))

    def hit(page: int) -> None:
        nodes[page].hit_count += 1
        nodes[page].last_access_time = next(clock)

    def insert(page: int) -> None:
        now = next(clock)
        nodes[page] = SimpleNamespace(
            last_access_time=now, creation_time=now, hit_count=1, key=range(1)
        )

    def make_room() -> int:
        page = min(nodes, key=lambda each: strategy.get_priority(nodes[each]))
        del nodes[page]
        return page

    return hit, make_room, insert


class VllmLfu(ToVllm):
    make = Lfu


def of_vllm_chunks():
    policy = VllmLfu(CAPACITY)
    policy.insert("loading", SimpleNamespace(ref_cnt=1), None)
    assert policy.evict(1, set()) is None

    def hit(page: int) -> None:
        assert policy.get(page) is not None
        policy.on_request_finished([[page], ["unknown"]], set(), {page}, None)

    def insert(page: int) -> None:
        policy.insert(page, SimpleNamespace(ref_cnt=0), None)

    return hit, lambda: policy.evict(1, set())[0][0], insert


def of_libcachesim_hooks():
    hooks = ToLibCacheSim(Lfu)
    init, hit, miss, evict, remove = hooks.init, hooks.hit, hooks.miss, hooks.evict, hooks.remove
    ranked = init(None)
    miss(ranked, SimpleNamespace(obj_id=-1, obj_size=1))
    remove(ranked, -1)
    asked = [SimpleNamespace(obj_id=page, obj_size=1) for page in range(2_000)]
    return (
        lambda page: hit(ranked, asked[page]),
        lambda: evict(ranked, None),
        lambda page: miss(ranked, asked[page]),
    )


@pytest.mark.parametrize("other", [of_sglang_nodes, of_vllm_chunks, of_libcachesim_hooks])
def test_a_policy_of_ours_misses_as_often_in_another_cache(other) -> None:
    stream = STREAMS["zipf"]()[:2_000]
    assert misses_elsewhere(stream, *other()) == misses_of(stream, CAPACITY, Lfu())


def test_a_policy_without_a_rank_for_full_pages_is_lru_in_sglang() -> None:
    strategy = ToSGLang(SimpleNamespace(rank=lambda entry, tier, kind: None))
    node = SimpleNamespace(last_access_time=7, creation_time=1, hit_count=2, key=range(1))
    assert strategy.get_priority(node) == (7,)


def gdsf_misses(accesses: list[int], *, inserts_first: bool) -> int:
    """Misses of GDSF with pages of equal size and cost, by search of the lowest value."""
    floor = misses = 0
    held: dict[int, tuple[int, int, int]] = {}  # page: value, last access, accesses
    for now, page in enumerate(accesses):
        uses = 1 + held.get(page, (0, 0, 0))[2]
        misses += page not in held
        if page in held or inserts_first:
            held[page] = (floor + uses, now, uses)
        if len(held) + (page not in held) > CAPACITY:
            victim = min(held, key=lambda each: held[each])
            floor = held.pop(victim)[0]
        if not inserts_first:
            held[page] = (floor + uses, now, uses)
    return misses
