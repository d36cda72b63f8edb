"""Builds an engine: its tree, cache, prefetcher and scheduler."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from hicache.cache.pages import PageAllocator, Pools
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefetch.rates import RateEstimator
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.shared import shared_pools
from hicache.cache.tiers.transfer import WritePolicy
from hicache.cache.tree.keys import PageNames
from hicache.cache.tree.radix_tree import RadixTree
from hicache.config import Batching, ExperimentConfig
from hicache.engine.deployment import Deployment, Place
from hicache.engine.loop import Engine
from hicache.engine.pipeline import PipelineEngine
from hicache.engine.ports import Runtime
from hicache.engine.ranks.agreement import TracedAllocator
from hicache.engine.roles import DecodeEngine, PrefillEngine
from hicache.executor.simulated.pipeline import PipelineExecutor
from hicache.memory import Capacity
from hicache.models import GIB
from hicache.policies.policy import Policy
from hicache.policies.world import World
from hicache.request import Request
from hicache.scheduler.admission import TOGETHER
from hicache.scheduler.drafts import Drafts
from hicache.scheduler.events import Listener
from hicache.scheduler.intake import DecodeScheduler
from hicache.scheduler.prompts_together import PromptsTogether
from hicache.scheduler.running_first import RunningFirst
from hicache.scheduler.scheduler import Scheduler
from hicache.scheduler.sender import PrefillScheduler

ROLES: dict[str, tuple[type[Scheduler], type[Engine]]] = {
    "prefill": (PrefillScheduler, PrefillEngine),
    "decode": (DecodeScheduler, DecodeEngine),
}


def build_engine(
    world: World,
    policy: Policy,
    place: Place,
    runtime: Runtime,
    names: PageNames,
    listener: Listener | None = None,
    check: Callable[[Engine], None] | None = None,
) -> Engine:
    """Build one serving engine, or one tensor-parallel rank of an engine.

    Args:
        world: what the policy knows about the engine, with all settings of the run.
        policy: takes the decisions of the engine.
        place: what the engine is for, its step costs and the sizes of its memory pools.
        runtime: the clock, storage and executors that the engine uses.
        names: computes the names (hashes) of KV-cache pages from their tokens.
        listener: receives the events of the cache and of requests; None means no listener.
        check: a function that is called after each step; None means no calls.
    """
    config, deployment = world.config, place.deployment
    tree = RadixTree(
        kinds=deployment.host_kinds,
        names=names,
        policy=policy.entries,
        demotes=policy.writes.demotes,
        drops_block=config.draft_key == "drop_block",
        marks_cold=config.speculation.drafts > 0 and config.speculation.draft_kv == "none",
        knobs=config.cache,
        rules=config.compat.rules,
        listener=listener,
    )
    has_storage = runtime.has_storage and config.storage.kind != "none"
    cache = _cache(config, deployment, tree, policy.writes, has_storage=has_storage)
    prefetcher = None
    if has_storage or config.storage.kind == "peers":
        capacity = deployment.host.full_pages
        tokens = None if capacity is None else capacity * config.cache.page_size
        prefetcher = Prefetcher(cache, config.prefetch, policy.reads, tokens, world.rates)
    is_real = config.executor.kind != "simulated"
    kind, engine_kind = ROLES.get(place.role, (scheduler_of(config.scheduler.batching), Engine))
    num_batches = 1 if is_real else config.parallel.pp  # real stages compute in turn
    scheduler = kind(
        cache,
        prefetcher,
        config.scheduler,
        policy.requests,
        max_len=config.model.max_len,
        may_jump=config.engine.jump and not (is_real or num_batches > 1),
        num_batches=num_batches,
        takes_decode_pages_first=is_real,
        listener=listener,
        drafts=Drafts(config.speculation, config.seed) if config.speculation.drafts else None,
    )
    executor = runtime.executor(cache)
    if isinstance(executor, PipelineExecutor):
        engine_kind = PipelineEngine
    engine = engine_kind(cache, prefetcher, scheduler, executor, check=check)
    if isinstance(engine, PrefillEngine):
        engine.setup(deployment.kinds.page_bytes)
    if isinstance(engine, DecodeEngine):
        engine.scheduler.decode.setup(config, deployment.kinds.page_bytes)
        engine.scheduler.prefill.decode = engine.scheduler.decode
    if isinstance(engine, PipelineEngine) and isinstance(executor, PipelineExecutor):
        engine.stages = executor
    return engine


def scheduler_of(batching: Batching) -> type[Scheduler]:
    """Return the class of scheduler that plans steps of this kind."""
    kinds: dict[Batching, type[Scheduler]] = dict.fromkeys(TOGETHER, PromptsTogether)
    return {**kinds, Batching.running_first: RunningFirst}.get(batching, Scheduler)


def world_of(
    config: ExperimentConfig,
    deployment: Deployment,
    now_ns: Callable[[], int],
    requests: Sequence[Request] = (),
) -> World:
    """Return what the policy of one engine, or of one of its ranks, knows about the engine.

    `now_ns` is the engine's clock, and `requests` the whole workload.
    """
    kinds, names = deployment.kinds, deployment.kinds.names
    tiers = {"device": (deployment.device, kinds), "host": (deployment.host, deployment.host_kinds)}
    return World(
        page_size=kinds.page_size,
        seed=config.seed,
        kinds=tuple(names[kind] for kind in kinds.numbers),
        capacity={
            tier: {names[kind]: room.counts[kind] for kind in kinds.numbers}
            for tier, (room, _) in tiers.items()
        },
        unit_bytes={
            tier: {names[kind]: own.page_bytes[kind] for kind in kinds.numbers}
            for tier, (_, own) in tiers.items()
        },
        window_tokens={names[kind]: length for kind, length in kinds.window_lens.items()},
        flops=deployment.cost.flops,
        seconds=deployment.cost.prefill_s,
        rates=RateEstimator(num_engines=config.parallel.num_engines),
        now_ns=now_ns,
        config=config,
        requests=requests,
    )


def _cache(
    config: ExperimentConfig,
    deployment: Deployment,
    tree: RadixTree,
    writes: WritePolicy,
    *,
    has_storage: bool,
) -> PrefixCache:
    host = deployment.host
    is_checked = config.engine.check_invariants or config.executor.kind != "simulated"
    pools = make_pools(
        deployment.device, host, is_traced=config.parallel.ranks > 1, is_checked=is_checked
    )
    if config.cache.pools != "split":
        tiers = ((deployment.device, deployment.kinds), (host, deployment.host_kinds))
        shared = [
            shared_pools(tier.counts, kinds.page_bytes, tier.total_bytes, is_checked=is_checked)
            for tier, kinds in tiers
        ]
        pools = (shared[0] if config.cache.pools == "shared_both" else pools[0], shared[1])
    num_bytes = queue_bytes(config, deployment) if has_storage else None
    return PrefixCache(tree, pools, writes, config.storage, storage_queue_bytes=num_bytes)


def make_pools(device: Capacity, host: Capacity, *, is_traced: bool, is_checked: bool) -> Pools:
    # traced allocators keep the checksum by which ranks are compared; checked ones detect double
    # frees
    allocator = partial(TracedAllocator if is_traced else PageAllocator, is_checked=is_checked)
    return [*map(allocator, device.counts)], [*map(allocator, host.counts)]


def queue_bytes(config: ExperimentConfig, deployment: Deployment) -> int:
    """Return how many bytes may wait at a time to be written to storage.

    `config.storage.write_queue_gib` sets the limit. If it is None, the limit is half of the host
    tier's memory, or no limit if `config.cache.unlimited` is set.
    """
    if config.storage.write_queue_gib is not None:
        return int(config.storage.write_queue_gib * GIB)
    return sys.maxsize if config.cache.unlimited else deployment.host.total_bytes // 2
