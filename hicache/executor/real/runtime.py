"""Builds a real run from its configuration: memory, model, threads, verifier."""

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import torch

from hicache.cache.kinds import KEY_TAGS
from hicache.cache.prefix_cache import PrefixCache
from hicache.clock import SECOND_NS, WallClock
from hicache.config import ExperimentConfig
from hicache.executor.real import fla_scan
from hicache.executor.real.copy_streams import CudaStream, ThreadStream
from hicache.executor.real.io import TorchExecutor, TorchIo
from hicache.executor.real.model_runner import CopyStreams, ModelRunner
from hicache.executor.real.page_origin import PageOrigin
from hicache.executor.real.plane import REFERENCE, TRITON, Plane, interpreted
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import Counts, PoolSpec
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.verify import Model, Verifier
from hicache.storage.factory import GuardedStorage, open_guarded_storage


class TorchRuntime:
    """Builds a run on real memory: storage, the model, and one executor per engine.

    Raises:
        ValueError: the model or the machine does not support the configuration.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        device_counts: Counts,
        host_counts: Counts,
        *,
        tp: int,
        stage_layers: Sequence[int] = (),
    ) -> None:
        self._config = config
        self._device = _device(config.executor.device)
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # blocks are small: a second thread costs more than it saves
        self._verifier: Verifier | None = None
        self._plane = _plane(config.executor.kernels, self._device)
        page_size = config.cache.page_size
        self._model = _model(config, self._device, tp * max(len(stage_layers), 1))
        if config.is_lossy:
            self._model.tolerance = inf
        if config.executor.verify:
            in_use = {"host": any(host_counts), "storage": config.storage.kind != "none"}
            tiers = ["device", *(tier for tier, is_used in in_use.items() if is_used)]
            self._verifier = Verifier(self._model, self._plane, tiers)
        self._spec = PoolSpec(
            model=config.model,
            page_size=page_size,
            device_counts=device_counts,
            host_counts=host_counts,
            device=self._device,
            tp=tp,
            stage_layers=stage_layers,
            link_programs=config.hardware.copy_kernel.link_programs,
            plane=self._plane,
            host_format=config.cache.host_format,
            storage_format=config.storage_format,
        )
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        first = TorchPools(self._spec)  # the namespace in storage depends on the layout of items
        self._spare: TorchPools | None = first
        opened = [self._open(rank, first) for rank in range(len(first.ranks))]
        self._storages = [each for each in opened if each is not None]
        self.has_storage = bool(self._storages)
        self.io = TorchIo(config.storage, [each.storage for each in self._storages])
        self.clock = self.io
        self.counters: Counter[str] = self.io.counters

    def executor(self, cache: PrefixCache) -> TorchExecutor:
        device, host = ([pool.capacity for pool in tier] for tier in cache.pools)
        spec = replace(self._spec, device_counts=device, host_counts=host)  # decode has its own
        pools, self._spare = self._spare or TorchPools(spec), None
        if self._device.type == "cuda":
            streams = CopyStreams(
                CudaStream(self._device, is_urgent=True), CudaStream(self._device, is_urgent=False)
            )
        else:
            streams = CopyStreams(ThreadStream("load"), ThreadStream("save"))
        runner = ModelRunner(
            self._model,
            pools,
            streams,
            verifier=self._verifier,
            allocators=cache.pools if self._config.engine.check_invariants else None,
        )
        if self._device.type == "cuda":
            runner.warm_up()
        return TorchExecutor(runner, self.io)

    def close(self) -> None:
        self.io.close()
        if self._directory is not None:
            self._directory.cleanup()

    def report(self) -> tuple[list[str], dict[str, float]]:
        notes = [
            f"computed on {self._device} with torch {torch.__version__}",
            f"ρ gpu is that of {self._config.hardware.name}, ρ read and write those of the rates "
            f"in storage.*: none of them was measured here",
        ]
        copied_ns = sum(runner.total_copied_ns for runner in self.io.runners)
        exposed_ns = sum(runner.total_exposed_ns for runner in self.io.runners)
        measures: dict[str, float] = {
            "load_back/copy_s": copied_ns / SECOND_NS,
            "load_back/exposed_s": exposed_ns / SECOND_NS,
        }
        if copied_ns:
            hidden = max(1 - exposed_ns / copied_ns, 0.0)
            measures["load_back/hidden_share"] = hidden
            notes.append(
                f"copies into the device took {copied_ns / 1e6:,.1f} ms, "
                f"{hidden:.0%} of it behind the layers"
            )
        counts: Counter[str] = Counter()
        for each in self._storages:
            counts.update(each.counts())
        measures |= counts
        if self._verifier is not None:
            verdict = self._verifier.verify()
            notes.append(str(verdict))
            measures |= verdict.measures()
        return notes, measures

    def _open(self, rank: int, pools: TorchPools) -> GuardedStorage | None:
        config = self._config.storage
        if config.kind in ("slab", "file") and config.root is None:
            self._directory = self._directory or tempfile.TemporaryDirectory(prefix="hicache-")
            config = replace(config, root=str(Path(self._directory.name)))
        if config.capacity_gib is not None:
            config = replace(config, capacity_gib=config.capacity_gib / len(pools.ranks))
        ours = pools.ranks[rank]
        origin = PageOrigin(
            model=self._config.model,
            page_size=self._config.cache.page_size,
            rank=rank,
            tp=len(pools.ranks),
            weights=self._model.origin,
            arithmetic=_arithmetic(self._device),
            layout=ours.layout,
        )
        sizes = {KEY_TAGS[kind]: ours.stored.page_bytes(kind) for kind in ours.host}
        return open_guarded_storage(
            config,
            namespace=origin.namespace,
            page_bytes=sizes,
            clock=WallClock(),
            seed=self._config.seed * len(pools.ranks) + rank,
        )


def _model(config: ExperimentConfig, device: torch.device, num_ranks: int) -> Model:
    sizes = {"page_size": config.cache.page_size, "seed": config.seed}
    if config.executor.model == "reference":
        return ReferenceModel(config.model, **sizes, device=str(device))
    if num_ranks > 1:
        raise ValueError(f"executor.model=hf needs parallel.tp=1 and pp=1, got {num_ranks} ranks")
    try:
        from hicache.executor.real.hf_model import HfModel
    except ImportError as error:
        raise ValueError(f"executor.model=hf: pip install 'hicache[hf]' ({error})") from error
    is_cut = config.executor.call == "page"
    return HfModel(config.model, **sizes, device=str(device), is_cut=is_cut)


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("executor.device=cuda, but torch finds no CUDA device")
    return torch.device("cuda", 0) if wanted == "cuda" else torch.device("cpu")


def _plane(wanted: str, device: torch.device) -> Plane:
    on_cpu = device.type == "cpu"
    if wanted == "triton" and on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "executor.kernels=triton on a CPU needs the interpreter: set TRITON_INTERPRET=1"
        )
    if wanted == "fla":
        if on_cpu:
            raise ValueError("executor.kernels=fla needs a GPU")
        try:
            fla_scan.library()
        except ImportError as error:
            raise ValueError(
                f"executor.kernels=fla: pip install 'hicache[fla]' ({error})"
            ) from error
        return TRITON._replace(scan=fla_scan.fla_scan)
    if wanted == "reference" or (wanted == "auto" and on_cpu):
        return REFERENCE
    return interpreted() if on_cpu else TRITON


def _arithmetic(device: torch.device) -> str:
    if device.type == "cuda":
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
