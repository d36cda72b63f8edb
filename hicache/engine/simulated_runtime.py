"""The runtime of a run: its clock, copies, storage and executors."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import count
from math import inf

from hicache.cache.kinds import KEY_TAGS
from hicache.cache.prefix_cache import PrefixCache
from hicache.clock import SimulatedClock
from hicache.config import ExperimentConfig
from hicache.engine.deployment import Deployment
from hicache.engine.ports import Runtime
from hicache.executor.simulated.cut import CuttingExecutor
from hicache.executor.simulated.executor import SimulatedExecutor, SimulatedIo
from hicache.executor.simulated.links import CopyPath, pcie_rate
from hicache.executor.simulated.stores import EndlessStore, KeyStore, StandIns
from hicache.models import PLAIN, LayerKind
from hicache.storage.factory import GuardedStorage, open_rank_storages

STAGED_PARTS = 4  # groups of layers of a staged load-back


class SimulatedRuntime:
    def __init__(self, config: ExperimentConfig, deployment: Deployment) -> None:
        num_ranks = config.parallel.ranks
        # of one rank, by kind
        page_bytes = [-(-size // num_ranks) for size in deployment.storage_kinds.page_bytes]
        rates = _copy_rates(config, deployment)
        self.clock = SimulatedClock()
        self.storages: list[GuardedStorage] = []
        is_unbounded = config.storage.kind == "memory" and config.storage.capacity_gib is None
        if is_unbounded and config.storage.faults.is_harmless:
            self.stores: list[KeyStore] = [EndlessStore() for _ in range(num_ranks)]
            self.unguarded = self.stores
        else:
            sizes = {tag: size for tag, size in zip(KEY_TAGS, page_bytes, strict=False) if size}
            self.storages = open_rank_storages(config, sizes, self.clock)
            self.stores = [StandIns(each.storage) for each in self.storages]
            self.unguarded = [StandIns(each.engine) for each in self.storages]
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
        self._numbers = count()
        is_staged = config.executor.copy_path == CopyPath.staged.value
        self._executor = partial(
            CuttingExecutor if config.executor.capture == "cut" else SimulatedExecutor,
            cost=deployment.cost,
            io=self.io,
            page_size=config.cache.page_size,
            page_bytes=page_bytes,
            load_shares=_load_shares(deployment),
            load_rate=rates["to_device"],
            shared_load_rate=_shared_load_rate(rates),
            # a staged copy uses no SMs, so it does not slow computing
            slowdown=1.0 if is_staged else config.hardware.copy_slowdown.value,
        )

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
        return TorchRuntime(config, *counts, tp=deployment.tp)
    return SimulatedRuntime(config, deployment)


def _load_shares(deployment: Deployment) -> list[float]:
    sizes = zip(deployment.host_kinds.page_bytes, deployment.kinds.page_bytes, strict=True)
    return [on_host / on_device if on_device else 1.0 for on_host, on_device in sizes]


def _copy_rates(config: ExperimentConfig, deployment: Deployment) -> dict[str, float]:
    # bytes/s of an engine's links; its devices copy in parallel
    model, hardware, tp = config.model, config.hardware, deployment.tp
    is_coded = config.cache.host_format != PLAIN
    layer_page = model.full_layer_token_bytes * config.cache.page_size
    num_copies = model.kv_copies(LayerKind.full, tp)
    path = CopyPath(config.executor.copy_path)
    # a device's part of one layer's page is contiguous. A staged copy crosses the link in pieces of
    # several layers: a quarter of them to the device, all layers to the host
    piece = max(layer_page * num_copies // tp, 1)
    if is_coded:
        full_share, *_ = _load_shares(deployment)
        piece = max(round(piece * full_share), 1)
    pieces = [piece, piece]
    if path is CopyPath.staged:
        num_layers = max(model.num_full_layers, 1)
        pieces = [piece * -(-num_layers // STAGED_PARTS), piece * num_layers]
    num_hosts = -(-tp // hardware.devices_per_host)
    rates = {
        "to_device": tp * pcie_rate(hardware, pieces[0], path, to_device=True, is_coded=is_coded),
        "to_host": tp * pcie_rate(hardware, pieces[1], path, to_device=False, is_coded=is_coded),
        "host_memory": num_hosts * hardware.host_bandwidth.value,
    }
    if hardware.both_ways_bandwidth.value:
        rates["both_ways"] = tp * hardware.both_ways_bandwidth.value
    return rates


def _shared_load_rate(rates: Mapping[str, float]) -> float:
    # bytes/s to the device during a back-up: a fair share of the rate of both directions
    both = rates.get("both_ways", inf)
    return min(rates["to_device"], max(both / 2, both - rates["to_host"]))
