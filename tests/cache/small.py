"""Builders of small caches, and the steps of a request in them."""

from collections.abc import Iterable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from hicache import config as conf
from hicache.cache.kinds import FULL, MAMBA, SWA, Extent, Kind, Kinds
from hicache.cache.pages import PageAllocator, Pools
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefetch.rates import RateEstimator
from hicache.cache.prefix_cache import Acquired, PrefixCache
from hicache.cache.tree.digests import Digests
from hicache.cache.tree.entry import Entries, EntryPolicy
from hicache.cache.tree.eviction import Ranking
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.residency import by_last_use
from hicache.cache.tree.sequence import Sequence
from hicache.policies.policy import METHODS, Policy, presets, with_methods
from hicache.policies.stock import STOCK
from hicache.rules import Rules

PAGE = 4
RANKED = conf.STOCK_POLICIES[:5]  # they only rank entries, or leave them to LRU


def tokens_of(count: int, first: int = 0) -> bytes:
    """`count` consecutive token ids from `first` on, as bytes."""
    return np.arange(first, first + count, dtype="<i4").tobytes()


def named_kinds(
    page_size: int, *, window_len: int = 0, has_states: bool = False, page_bytes: Iterable[int] = ()
) -> Kinds:
    """Kinds of a model: full KV, and a window and states if set; by default a page has one byte."""
    sizes = dict(enumerate(page_bytes))
    kinds = [Kind(name="full", number=FULL, page_bytes=sizes.get(FULL, 1))]
    if window_len:
        extent, size = Extent.window, sizes.get(SWA, 1)
        kinds.append(
            Kind(name="swa", number=SWA, extent=extent, window_len=window_len, page_bytes=size)
        )
    if has_states:
        size = sizes.get(MAMBA, 1)
        kinds.append(Kind(name="mamba", number=MAMBA, extent=Extent.point, page_bytes=size))
    return Kinds(kinds, page_size)


Counts = tuple[int | None, ...]


def make_pools(device: Counts, host: Counts, kind: type[PageAllocator] = PageAllocator) -> Pools:
    """The pools of device and host, with these numbers of pages and state slots by kind."""
    return [kind(count) for count in device], [kind(count) for count in host]


def world_of(kinds: Kinds | None = None, **groups: Any) -> Any:
    """What a built-in policy is built from: these groups of settings; a token takes 1 ms."""
    kinds = kinds or named_kinds(PAGE)
    config = SimpleNamespace(
        model=SimpleNamespace(num_mamba_layers=len(kinds.points)),
        cache=conf.CacheConfig(),
        prefetch=conf.PrefetchConfig(),
        scheduler=conf.SchedulerConfig(),
        storage=conf.StorageConfig(),
        parallel=conf.ParallelConfig(),
        compat=conf.CompatConfig(rules=groups.pop("rules", Rules())),
    )
    rates, seed = groups.pop("rates", RateEstimator()), groups.pop("seed", 0)
    vars(config).update(groups)
    return SimpleNamespace(
        config=config,
        page_size=kinds.page_size,
        kinds=[kinds.names[kind] for kind in kinds.numbers],
        rates=rates,
        seconds=lambda cached, total: (total - cached) * 1e-3,
        seed=seed,
    )


def methods_of(own: object) -> dict[str, Any]:
    """The policy methods that an object defines, by name."""
    return {name: getattr(own, name) for name in METHODS if hasattr(own, name)}


def policies_of(kinds: Kinds, own: object = None, **groups: Any) -> Policy:
    """The policies of these groups of settings, with the methods of `own` in place of theirs."""
    policy = presets(world_of(kinds, **groups))
    return policy if own is None else with_methods(policy, methods_of(own))


def prefetcher_of(
    cache: PrefixCache,
    config: conf.PrefetchConfig,
    host_tokens: int | None = None,
    policy: object = None,
) -> Prefetcher:
    """A prefetcher with the stop policy of `config`, or with the methods that `policy` has."""
    rates = RateEstimator()
    reads = policies_of(
        cache.tree.kinds, policy, prefetch=config, rates=rates, rules=cache.rules
    ).reads
    return Prefetcher(cache, config, reads, host_tokens, rates)


class SmallCache(PrefixCache):
    """A cache with steps for tests."""

    def serve(
        self, num_tokens: int, first: int = 0, prompt_len: int | None = None, **how: Any
    ) -> None:
        """Compute and publish `num_tokens` consecutive tokens from `first` on."""
        run_request(self, tokens_of(num_tokens, first), prompt_len or num_tokens, **how)

    def begin(self, num_tokens: int, first: int = 0) -> tuple[Sequence, Acquired]:
        """Begin a request of `num_tokens` tokens: match and acquire its cached prefix."""
        sequence = Sequence(tokens_of(num_tokens, first))
        match = self.match(sequence, num_tokens)
        acquired = self.acquire(sequence, match, prompt_len=num_tokens)
        assert acquired is not None
        return sequence, acquired

    def complete_all(self) -> None:
        complete_all(self)

    def evict_all(self, tier: int, *kinds: int) -> None:
        for kind in kinds:
            evict_all(self, tier, kind)

    def move_to_host(self, *kinds: int) -> None:
        """Complete all copies, and evict all data of these kinds (or all full pages)."""
        complete_all(self)
        self.evict_all(DEVICE, *(kinds or (FULL,)))

    def node_at(self, end: int) -> Node:
        """The node that ends after `end` pages; there is one."""
        (node,) = [node for node in self.tree.nodes() if node.end == end]
        return node

    def path_of(self, *ends: int) -> list[Node]:
        """Publish prefixes of one sequence that end after these pages; the nodes of its path."""
        for end in ends:
            self.serve(end * self.page_size)
        return [self.node_at(end) for end in ends]

    def resident(self, tier: int) -> list[int]:
        """Pages and states that a tier holds, by kind."""
        return self.tree.residency.resident[tier]


def make_cache(
    pools: Pools | None = None,
    *,
    device: Counts = (0, 0, 0),
    host: Counts = (0, 0, 0),
    window_len: int = 0,
    has_states: bool = False,
    policy: object = None,
    eviction: str = "lru",
    page_size: int = PAGE,
    page_bytes: tuple[int, ...] = (),
    kinds: Kinds | None = None,
    storage: conf.StorageConfig | None = None,
    storage_queue_bytes: int | None = None,
    rules: Rules | None = None,
    listener: Any = None,
    **knobs: Any,
) -> SmallCache:
    """A cache with these pools, or with new ones; by default a page has one byte.

    `policy`: methods in place of those of the built-in policies. `eviction`: one of `RANKED`.
    `knobs`: settings of the cache, and rules of engines.
    """
    own = {each.name: knobs.pop(each.name) for each in fields(Rules) if each.name in knobs}
    rules = replace(rules or Rules(), **own)
    kinds = kinds or named_kinds(
        page_size, window_len=window_len, has_states=has_states, page_bytes=page_bytes
    )
    config = conf.CacheConfig(**{"page_size": kinds.page_size, **knobs})
    if eviction != "lru" and policy is None:
        policy = ranked_by(eviction)
    told = {"cache": config, "storage": storage or conf.StorageConfig(), "rules": rules}
    made = policies_of(kinds, policy, **told)
    tree = RadixTree(
        kinds=kinds,
        policy=made.entries,
        demotes=made.writes.demotes,
        knobs=config,
        rules=rules,
        listener=listener,
    )
    pools = pools or make_pools(device, host)
    return SmallCache(tree, pools, made.writes, storage, storage_queue_bytes=storage_queue_bytes)


def run_request(
    cache: PrefixCache,
    tokens: bytes,
    prompt_len: int,
    *,
    namespace: str = "",
    state_ends: tuple[int, ...] = (),
) -> None:
    """Compute a whole request and publish all its whole pages.

    States are kept at their end, and after the pages in `state_ends`.
    """
    sequence = Sequence(tokens, namespace)
    total_len = len(tokens) // 4
    assert cache.acquire(sequence, cache.match(sequence, prompt_len)) is not None
    assert cache.extend(sequence, total_len)
    num_pages = total_len // cache.page_size
    if cache.tree.kinds.points and num_pages > sequence.tree_pages:
        assert sequence.boundary_slot is not None
        sequence.states[num_pages] = sequence.boundary_slot
        sequence.boundary_slot = None
    for end in state_ends:
        slot = cache.take_state_slot(sequence)
        assert slot is not None
        sequence.states[end] = slot
    cache.finish(sequence, num_pages)


def are_held(node: Node, tier: int) -> list[bool]:
    """By kind, whether the tier holds the data of a node."""
    return [page_ids is not None for page_ids in node.held[tier]]


def complete_all(cache: PrefixCache) -> None:
    """Complete all copies, and the copies that follow from them."""
    while cache.in_flight:
        cache.outbox.clear()
        for work in list(cache.in_flight):
            cache.complete(work)


def evict_all(cache: PrefixCache, tier: int, kind: int) -> None:
    """Allocate as many pages of a pool as evictions can free, and free them."""
    pool = cache.pools[tier][kind]
    for count in range(pool.capacity or 0, 0, -1):
        page_ids = (cache.device, cache.host)[tier].allocate(kind, count)
        if page_ids is not None:
            pool.free(page_ids)
            return


def ranked_by(policy: str, seed: int = 0) -> Any:
    """The built-in eviction policy named `policy`, one of `RANKED`."""
    make = STOCK[policy]
    return make(world_of(seed=seed)) if policy == "random" else make()


def ranking_of(policy: str, seed: int = 0) -> Ranking:
    """The sort key by which a built-in eviction policy orders leaves of the host for eviction."""
    rank = None if policy == "lru" else ranked_by(policy, seed).rank
    entries = Entries(EntryPolicy(rank=rank), named_kinds(PAGE), Digests(PAGE))
    return entries.ranking(HOST, FULL, by_last_use(FULL))
