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

from hicache import experiment
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
from hicache.runs.schema import config_of
from tests.policies.single import WORLD, misses_of
from tests.policies.streams import CAPACITY, STREAMS

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())


class Newest:
    """A policy with LMCache's interface that evicts the most recently used entry."""

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


newest = partial(FromLMCache, Newest)
ALL = tuple(STREAMS)
OURS = {  # with the peers that must miss as often, and the streams
    "none": (
        lambda: None,
        ["libcachesim LRU", "lmcache LRU", "sglang LRU", "vllm LRU"],
        ["phases"],
    ),
    "fifo": (Fifo, ["libcachesim FIFO", "lmcache FIFO", "sglang FIFO"], ["scans"]),
    "lfu": (Lfu, ["libcachesim LFU", "plugin our LFU", "lmcache LFU", "sglang LFU"], ["zipf"]),
    "slru of two segments": (UsedAgain, ["sglang SLRU"], ["scans"]),
    "slru": (partial(STOCK["slru"], WORLD), ["libcachesim SLRU"], ALL),
    "arc": (partial(STOCK["arc"], WORLD), ["libcachesim ARC"], ALL),
    "s3fifo": (partial(STOCK["s3fifo"], WORLD), ["libcachesim S3FIFO"], ALL),
    "MRU of LMCache": (partial(PerPool, newest, WORLD), ["lmcache MRU"], ["phases"]),
}


@pytest.mark.parametrize(
    ("name", "stream"), [(name, stream) for name in OURS for stream in OURS[name][2]]
)
def test_a_policy_misses_as_often_as_its_originals(name: str, stream: str) -> None:
    make, peers, _ = OURS[name]
    misses = misses_of(STREAMS[stream](), CAPACITY, make())
    assert {peer: PEERS[stream][peer] for peer in peers} == dict.fromkeys(peers, misses)


def test_gdsf_is_that_of_libcachesim_except_that_it_inserts_after_an_eviction() -> None:
    accesses = STREAMS["phases"]()
    assert gdsf_misses(accesses, inserts_first=True) == PEERS["phases"]["libcachesim GDSF"]
    ours = misses_of(accesses, CAPACITY, STOCK["gdsf"](WORLD))
    assert ours == gdsf_misses(accesses, inserts_first=False)


class VllmLfu(ToVllm):
    make = Lfu

    def mark_evictable(self, key):
        pass


def chunk_of(number, ref_cnt=-1):
    return SimpleNamespace(chunk_id=number, ref_cnt=ref_cnt)


HOOKS = ToLibCacheSim(Lfu)
HOOKS = (HOOKS.init, HOOKS.hit, HOOKS.miss, HOOKS.evict, HOOKS.remove)


@pytest.mark.parametrize(
    "adapted",
    [
        FromSGLang(partial(ToSGLang, Lfu()), WORLD),
        PerPool(partial(FromLibCacheSim, HOOKS), WORLD),
        PerPool(partial(FromVllm, VllmLfu, chunk_of, dict), WORLD),
    ],
)
def test_a_policy_adapted_to_another_cache_and_back_misses_as_often(adapted) -> None:
    stream = STREAMS["zipf"]()[:2_000]
    assert misses_of(stream, CAPACITY, adapted) == misses_of(stream, CAPACITY, Lfu())


class Adapted(PerPool):
    """A policy of another cache, for each pool; `last` is the one that was built last."""

    adapter, held = newest, "_held"
    last: "Adapted"

    def __init__(self, world):
        super().__init__(type(self).adapter, world)
        Adapted.last = self


class InLibCacheSim(Adapted):
    adapter, held = partial(FromLibCacheSim, HOOKS), "_keys"


class InVllm(Adapted):
    adapter, held = partial(FromVllm, VllmLfu, chunk_of, dict), "_names"


@pytest.mark.parametrize("policy", [Adapted, InLibCacheSim, InVllm])
def test_an_adapted_policy_knows_after_splits_and_evictions_what_each_pool_holds(policy) -> None:
    config = config_of(
        *("model=qwen3_next_80b", "workload=agents", "workload.limit=40", "storage=none"),
        *("cache.device_gib=4", "cache.host_gib=6", "engine.check_invariants=true"),
        f"cache.policy={policy.__module__}:{policy.__name__}",
    )
    measures = experiment.run(config).measures
    for (tier, kind), pool in policy.last._pools.items():
        entries = getattr(pool, policy.held)
        assert all(tier in entry.tiers and entry.kind == kind for entry in entries)
        assert entries
        assert measures[f"evict/{tier}_{kind}_pages"] > 0


def test_vllm_evicts_first_the_idle_chunks_least_used_by_finished_requests() -> None:
    policy = VllmLfu(CAPACITY)
    policy.insert("loading", chunk_of(0, 1), None)
    assert policy.evict(1, set()) is None
    for number in (1, 2):
        policy.insert(number, chunk_of(number, 0), None)
    policy.on_request_finished([[1, 2], ["unknown"]], set(), {1}, None)
    assert [key for key, _ in policy.evict(1, set())] == [2]


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
