"""The runtime of a run: its clock, copies, storage and executors."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count

from hicache.cache.kinds import FULL, KEY_TAGS, Kinds
from hicache.cache.prefix_cache import PrefixCache
from hicache.clock import SimulatedClock, to_ns
from hicache.config import ExperimentConfig
from hicache.engine.deployment import Deployment
from hicache.engine.ports import Runtime
from hicache.executor.simulated.cut import CuttingExecutor
from hicache.executor.simulated.drafting import Drafting
from hicache.executor.simulated.executor import SimulatedExecutor, SimulatedIo
from hicache.executor.simulated.sidecars import DRAFT, WithSidecars
from hicache.executor.simulated.stores import EndlessStore, KeyStore, StandIns
from hicache.models.copy_rates import CopyPath, copy_rates, shared_load_rate
from hicache.models.draft import DRAFT_NAME, with_draft_layers
from hicache.storage.factory import GuardedStorage, open_rank_storages


class SimulatedRuntime:
    def __init__(self, config: ExperimentConfig, deployment: Deployment) -> None:
        num_ranks = config.parallel.ranks
        # of one rank, by kind
        page_bytes = [-(-size // num_ranks) for size in deployment.storage_kinds.page_bytes]
        path = CopyPath(config.executor.copy_path)
        load_shares = _load_shares(deployment)
        rates = copy_rates(
            config.model,
            config.hardware,
            path,
            tp=deployment.tp,
            page_size=config.cache.page_size,
            form=config.cache.host_format,
            coded_share=load_shares[FULL],
        )
        self.clock = SimulatedClock()
        speculation = config.speculation
        self.has_sidecars = speculation.drafts > 0 and speculation.draft_kv == "sidecar"
        self.storages: list[GuardedStorage] = []
        is_unbounded = config.storage.kind == "memory" and config.storage.capacity_gib is None
        if is_unbounded and config.storage.faults.is_harmless:
            self.stores: list[KeyStore] = [EndlessStore() for _ in range(num_ranks)]
        else:
            sizes = {tag: size for tag, size in zip(KEY_TAGS, page_bytes, strict=False) if size}
            if self.has_sidecars:
                sizes[KEY_TAGS[DRAFT]] = -(-draft_bytes(deployment.storage_kinds) // num_ranks)
                sizes[KEY_TAGS[FULL]] -= sizes[KEY_TAGS[DRAFT]]
            self.storages = open_rank_storages(config, sizes, self.clock)
            self.stores = [StandIns(each.storage) for each in self.storages]
        self.stores = [self.beside(each) for each in self.stores]
        self.has_storage = bool(self.stores)
        parts = {link: rate / num_ranks for link, rate in rates.items()}
        self.io = SimulatedIo(
            config.storage,
            self.stores,
            [parts] * (config.parallel.replicas * num_ranks),
            stalls=[each.stall for each in self.storages],
            seed=config.seed,
        )
        self.counters = self.io.counters
        drafting = None
        if deployment.draft_cost is not None:
            drafting = Drafting(deployment.cost, deployment.draft_cost, speculation.drafts)
        self._numbers = count()
        self._executor = partial(
            CuttingExecutor if config.executor.capture == "cut" else SimulatedExecutor,
            cost=deployment.cost,
            io=self.io,
            page_size=config.cache.page_size,
            page_bytes=page_bytes,
            load_shares=load_shares,
            load_rate=rates["to_device"],
            shared_load_rate=shared_load_rate(rates),
            # a staged copy uses no SMs, so it does not slow computing
            slowdown=1.0 if path is CopyPath.staged else config.hardware.copy_slowdown.value,
            begin_ns=to_ns(config.scheduler.begin_s),
            drafting=drafting,
        )

    def beside(self, store: KeyStore) -> KeyStore:
        """Return `store` with a page of the draft's KV for each page, if the run has such pages."""
        return WithSidecars(store) if self.has_sidecars else store

    def executor(self, cache: PrefixCache) -> SimulatedExecutor:
        return self._executor(next(self._numbers))

    def close(self) -> None:
        for each in self.storages:
            each.forget()

    def report(self) -> tuple[list[str], dict[str, float]]:
        counts: Counter[str] = Counter()
        for each in self.storages:
            counts.update(each.counts())
        return [], dict(counts)


def make_runtime(config: ExperimentConfig, deployment: Deployment) -> Runtime:
    """Return the clock, copy links, storage and executors of a run.

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
        return TorchRuntime(config, *counts, tp=deployment.tp)
    return SimulatedRuntime(config, deployment)


def draft_bytes(kinds: Kinds) -> int:
    return sum(kind.page_bytes for kind in kinds.all if kind.name == DRAFT_NAME)


def _load_shares(deployment: Deployment) -> list[float]:
    sizes = zip(deployment.host_kinds.page_bytes, deployment.kinds.page_bytes, strict=True)
    return [on_host / on_device if on_device else 1.0 for on_host, on_device in sizes]
