"""The runtime of a run: its clock, copies, storage and executors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hicache.cache.kinds import FULL, KEY_TAGS
from hicache.cache.prefix_cache import PrefixCache
from hicache.clock import SimulatedClock, Stall, to_ns
from hicache.config import ExperimentConfig
from hicache.engine.deployment import Deployment, Place, places_of
from hicache.engine.ports import Runtime
from hicache.engine.stages import joined_rates, joined_stores, shard_sizes
from hicache.executor.simulated.cut import CuttingExecutor
from hicache.executor.simulated.executor import SimulatedExecutor, SimulatedIo
from hicache.executor.simulated.peers import PeerIo
from hicache.executor.simulated.pipeline import PipelineExecutor, Stage
from hicache.executor.simulated.sidecars import DRAFT, WithSidecars
from hicache.executor.simulated.sparse import SparseExecutor
from hicache.executor.simulated.stores import EndlessStore, KeyStore, StandIns
from hicache.models.copy_rates import CopyPath, copy_rates, shared_load_rate
from hicache.models.draft import DRAFT_NAME, with_draft_layers
from hicache.storage.factory import GuardedStorage, open_rank_storages


class SimulatedRuntime:
    def __init__(
        self, config: ExperimentConfig, deployment: Deployment, places: Sequence[Place] = ()
    ) -> None:
        """Build the runtime of engines at `places`; none means those that `config` describes."""
        places = places or places_of(config, deployment)
        num_ranks = config.parallel.ranks
        # of one rank, by kind
        page_bytes = [-(-size // num_ranks) for size in deployment.storage_kinds.page_bytes]
        rates = {each: _rates(each) for each in dict.fromkeys(places)}
        self.clock = SimulatedClock()
        speculation = config.speculation
        self.has_sidecars = speculation.drafts > 0 and speculation.draft_kv == "sidecar"
        self.storages: list[GuardedStorage] = []
        is_unbounded = config.storage.kind == "memory" and config.storage.capacity_gib is None
        has_peers = config.storage.kind == "peers"
        if has_peers or (is_unbounded and config.storage.faults.is_harmless):
            stores = [EndlessStore() for _ in range(num_ranks)]
            self.stores: list[KeyStore] = [] if has_peers else [*stores]
        else:
            sizes = {tag: size for tag, size in zip(KEY_TAGS, page_bytes, strict=False) if size}
            if self.has_sidecars:
                stored = deployment.storage_kinds.all
                size = sum(each.page_bytes for each in stored if each.name == DRAFT_NAME)
                sizes[KEY_TAGS[DRAFT]] = -(-size // num_ranks)
                sizes[KEY_TAGS[FULL]] -= sizes[KEY_TAGS[DRAFT]]
            shards = shard_sizes(deployment, num_ranks) or [sizes] * num_ranks
            self.storages = open_rank_storages(config, shards, self.clock)
            self.stores = [StandIns(each.storage) for each in self.storages]
        self.stores = [self.beside(each) for each in self.stores]
        self.has_storage = bool(self.stores)
        stalls: list[Stall] = [each.stall for each in self.storages]
        if deployment.stages and stalls:
            self.stores, stalls = joined_stores(self.stores, stalls, num_ranks)
        parts = {
            each: {link: rate / num_ranks for link, rate in own.items()}
            for each, own in rates.items()
        }
        ranks = [each for each in places for _ in range(num_ranks)]
        self.io = (PeerIo if has_peers else SimulatedIo)(
            config.storage,
            self.stores,
            [parts[each] for each in ranks],
            stalls=stalls,
            overlaps_loads=config.compat.rules.overlaps_loads,
            seed=config.seed,
            link_s=config.parallel.link_s,
            faults=config.parallel.faults if config.parallel.prefill else None,
        )
        self.counters = self.io.counters
        self._executors = (
            _executor(number, each, self.io, page_bytes, rates[each])
            for number, each in enumerate(ranks)
        )

    def beside(self, store: KeyStore) -> KeyStore:
        """Return `store` with a page of the draft's KV for each page, if the run has such pages."""
        return WithSidecars(store) if self.has_sidecars else store

    def executor(self, cache: PrefixCache) -> SimulatedExecutor:
        return next(self._executors)

    def close(self) -> None:
        for each in self.storages:
            each.forget()

    def report(self) -> tuple[list[str], dict[str, float]]:
        counts: Counter[str] = Counter()
        for each in self.storages:
            counts.update(each.counts())
        return [], dict(counts)


def make_runtime(
    config: ExperimentConfig, deployment: Deployment, places: Sequence[Place] = ()
) -> Runtime:
    """Return the clock, copy links, storage and executors of a run.

    `places` are those of its engines; none means those that `config` describes.

    The runtime is simulated, unless `config.executor.kind` is "torch".

    Raises:
        ValueError: the configured storage cannot be used.
    """
    if config.executor.kind == "torch":
        from hicache.executor.real.runtime import TorchRuntime  # torch only if needed

        counts = deployment.device.counts, deployment.host.counts
        if config.speculation.drafts:
            model = with_draft_layers(config.model, config.speculation.layers)
            config = replace(config, model=model)
        layers = [len(each.cost.model.layer_words) for each in deployment.stages]
        return TorchRuntime(config, *counts, tp=deployment.tp, stage_layers=layers)
    return SimulatedRuntime(config, deployment, places)


def link_rates(config: ExperimentConfig, deployment: Deployment) -> dict[str, float]:
    """Return the bytes per second of the links of one engine, as `copy_rates` does."""
    return copy_rates(
        config.model,
        config.hardware,
        CopyPath(config.executor.copy_path),
        tp=deployment.tp,
        page_size=config.cache.page_size,
        form=config.cache.host_format,
        coded_share=_load_shares(deployment)[FULL],
    )


def _load_shares(deployment: Deployment) -> list[float]:
    sizes = zip(deployment.host_kinds.page_bytes, deployment.kinds.page_bytes, strict=True)
    return [on_host / on_device if on_device else 1.0 for on_host, on_device in sizes]


def _rates(place: Place) -> dict[str, float]:
    # bytes per second of the links of an engine
    config = place.config
    rates = link_rates(config, place.deployment)
    if place.deployment.stages:
        rates = joined_rates(rates, place)
    if place.role != "both" or config.storage.kind == "peers":
        rates |= dict.fromkeys(("sends", "receives"), config.parallel.link_gbps * 1e9)
    return rates


def _executor(
    number: int, place: Place, io: SimulatedIo, page_bytes: Sequence[int], rates: dict[str, float]
) -> SimulatedExecutor:
    config = place.config
    is_staged = CopyPath(config.executor.copy_path) is CopyPath.staged
    kind = CuttingExecutor if config.executor.capture == "cut" else SimulatedExecutor
    parallel = config.parallel
    is_sparse = place.role == "decode" and parallel.sparse_tokens is not None
    if place.deployment.stages:
        kind, rates = PipelineExecutor, link_rates(config, place.deployment)
    executor = (SparseExecutor if is_sparse else kind)(
        number,
        place.deployment.cost,
        io,
        page_size=config.cache.page_size,
        page_bytes=page_bytes,
        load_shares=_load_shares(place.deployment),
        load_rate=rates["to_device"],
        shared_load_rate=shared_load_rate(rates),
        # a staged copy uses no SMs, so it does not slow computing
        slowdown=1.0 if is_staged else config.hardware.copy_slowdown.value,
        begin_ns=to_ns(config.scheduler.begin_s),
        drafting=place.deployment.drafting,
    )
    if isinstance(executor, PipelineExecutor):
        executor.stages = [
            Stage(cost=each.cost, page_bytes=each.host_kinds.page_bytes)
            for each in place.deployment.stages
        ]
    if isinstance(executor, SparseExecutor):
        kv_bytes = place.deployment.kinds.page_bytes[FULL] * config.model.kv_share
        executor.buffer_tokens, executor.miss = parallel.sparse_tokens or 0, parallel.sparse_miss
        executor.top_bytes = int(config.compat.rules.sparse_top * kv_bytes / config.cache.page_size)
    return executor
