"""Random requests through real memory in simulated time.

The cost model says when a transfer ends, and the data runner moves its bytes as late or as early
as is allowed (`PlacedStream`). So a run is the same every time, and a missing wait makes a logit
wrong.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from hicache import config as conf
from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import BackUp, LoadBack, StorageWrite
from hicache.clock import SimulatedClock
from hicache.engine.loop import Engine, serve
from hicache.executor.completions import StepRun
from hicache.executor.real.copy_streams import CudaStream
from hicache.executor.real.model_runner import CopyStreams, ModelRunner
from hicache.executor.real.plane import REFERENCE, TRITON, Plane
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import PoolSpec
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.verify import Verdict, Verifier
from hicache.executor.simulated.executor import SimulatedExecutor, SimulatedIo
from hicache.memory import model_kinds
from hicache.models import HardwareConfig, ModelConfig
from hicache.models.cost import CostModel
from hicache.observe import invariants
from hicache.request import Request
from hicache.storage.engines.memory import MemoryStorage
from hicache.workload.feeder import Feeder
from tests.cache.small import make_pools
from tests.executor.streams import PlacedStream
from tests.models.test_shapes import load, model
from tests.scheduler.world import Plot, Watch, engine_of, random_requests

PATTERNS = ("F S M D", "F S M D", "S D F M", "F S", "M F", "F", "D S F")
Fault = Callable[[ModelRunner], None]


@dataclass(frozen=True, slots=True)
class Mix:
    """The results of one run: verdict, counters, and how often each event was seen."""

    verdict: Verdict
    counters: Counter[str]
    seen: Counter[str]


def tiny(pattern: str, page_size: int, **more: Any) -> ModelConfig:
    """A tiny hybrid model with the layers of `pattern`; `more` are further fields."""
    words = pattern.split()
    num_swa = words.count("S")
    fields: dict[str, Any] = {
        "pattern": pattern,
        "num_layers": len(words),
        "num_full_layers": words.count("F") + words.count("FtI"),
        "num_swa_layers": num_swa,
        "num_mamba_layers": words.count("M") + words.count("D"),
        "window_len": 2 * page_size + page_size // 2 if num_swa else 0,
        "hidden_size": 32,
        "head_dim": 8,
        "recurrent_head_dim": 8,
        "recurrent_state_dim": 8,
        "dense_params": 50_000,
        "dense_param_bytes": 2.0,
        "head_params": 32 * 64,
        "embedding_params": 0,
        "max_len": 4096,
    }
    return replace(model("tiny_hybrid"), **fields | more)


def run_mix(
    seed: int,
    *,
    fault: Fault | None = None,
    device: str = "cpu",
    computes: bool = True,
    form: str = "plain",
    plane: Plane | None = None,
    most: int | None = None,
    num_stages: int = 1,
) -> Mix:
    """Run a random configuration with random requests (`most` at most), all drawn from `seed`.

    `fault` spoils a data runner. Without `computes`, the events are the same but no bytes move.
    `form` is the format of pages on the host and in storage. All stages have the same layers.
    """
    rng = Random(seed)
    plane = plane or (REFERENCE if device == "cpu" else TRITON)
    page_size = rng.choice([4, 8])
    pattern = rng.choice(PATTERNS)
    shape = tiny(" ".join([pattern] * num_stages), page_size)
    if form != "plain" or plane is not REFERENCE:  # what kernels multiply or code is 16 at least
        shape = replace(shape, head_dim=16, recurrent_head_dim=16)
    gap_ns = rng.choice([10**5, 3 * 10**7, 3 * 10**8])
    requests = random_requests(seed, rng.randint(6, 11), gap_ns=gap_ns, longest=14 * page_size)
    requests = requests[:most]
    for each in requests:
        each.namespace = "tenant" if rng.random() < 0.1 else ""
    tp = rng.choice([1, 1, 2, 4])
    plot = _draw_plot(rng, shape, page_size, requests, tp)
    storages = [
        # some ranks keep less than others
        MemoryStorage(capacity_bytes=1 << 30 if rng.random() < 0.7 else 6 * max(plot.page_bytes))
        for _ in range(tp * num_stages if plot.has_storage else 0)
    ]
    spec = PoolSpec(
        model=shape,
        page_size=page_size,
        device_counts=plot.device,
        host_counts=plot.host,
        device=torch.device(device),
        tp=tp,
        stage_layers=[len(pattern.split())] * num_stages,
        host_format=form,
        storage_format=form,
        plane=plane,
    )
    reference = ReferenceModel(shape, page_size=page_size, device=device)
    verifier = Verifier(reference, plane)
    cost = CostModel(shape, load(HardwareConfig, "hardware", "h200"), tp=1)
    num_engines = rng.choice([1, 2, 2])  # with one storage: what one has computed, the other reads
    io = CarriedIo(plot.storage, storages, rng.choice([1e6, 1e8, 1e10]), num_engines)
    io.computes = computes
    layers_at_once = rng.randint(1, len(shape.layer_words))
    engines: list[Engine] = []
    for number in range(num_engines):
        pages = make_pools(plot.device, plot.host)
        pools, streams = TorchPools(spec), _streams(rng, device)
        runner = ModelRunner(reference, pools, streams, verifier=verifier, allocators=pages)
        if plane is REFERENCE:
            # a late stream brings so many layers at a time, not before the model waits for them
            late = functools.partial(streams.load.load_items, layers_at_once=layers_at_once)
            pools.plane = plane._replace(load_items=late)
        if fault is not None:
            fault(runner)
        io.runners.append(runner)
        sizes = {"page_size": page_size, "page_bytes": plot.page_bytes}
        executor = CarriedExecutor(number, cost, io, load_rate=io.rate, slowdown=1.0, **sizes)
        engines.append(engine_of(plot, executor, checks=True, pools=pages))
    share = rng.choice([0.0, 0.0, 0.2])
    patience_ns = {each.id: int(rng.expovariate(1e-8)) for each in requests if rng.random() < share}
    watch = Watch()
    serve(
        engines,
        Feeder(requests, conf.WorkloadConfig(arrivals=conf.Arrivals.open)),
        clock=SimulatedClock(),
        io=io,
        route=lambda request: request.id % num_engines,
        observer=watch,
        patience_ns=patience_ns,
    )
    counters: Counter[str] = Counter(io.counters)
    for engine, runner in zip(engines, io.runners, strict=True):
        runner.close()
        invariants.check_drained(engine.cache, engine.prefetcher)
        counters += engine.cache.counters
    return Mix(verifier.verify(), counters, io.seen + _ends(watch))


def _draw_plot(
    rng: Random, model: ModelConfig, page_size: int, requests: list[Request], tp: int
) -> Plot:
    """Memory, storage and policies, the same for all engines of a run."""
    longest = max(each.prompt_len + each.output_len for each in requests)
    pages, window_pages = -(-longest // page_size) + 2, -(-model.window_len // page_size)
    full = rng.randint(pages, 2 * pages)
    swa = rng.randint(window_pages + 4, 2 * pages + window_pages)
    device = (full, swa * (model.num_swa_layers > 0), rng.randint(6, 23))
    scale = rng.choice([0.7, 1.0, 3.0])
    kinds = model_kinds(model, page_size, tp)
    return Plot(
        device=device,
        host=tuple(int(count * scale) + 1 for count in device),
        page_size=page_size,
        page_bytes=kinds.page_bytes,
        cache={
            "kinds": kinds,
            "write_policy": rng.choice([*conf.WRITE_POLICIES, "write_through"]),
            "load_back_threshold": rng.choice([1, 10]),
        },
        has_storage=rng.random() < 0.85,
        storage=conf.StorageConfig(
            kind="memory",
            read_gbps=rng.choice([1e-3, 1e-1, 10]),
            write_gbps=rng.choice([1e-3, 10]),
            query_s=rng.choice([1e-5, 1e-3]),
            operation_s=1e-5,
            batch_pages=rng.choice([1, 4]),
        ),
        checkpoints=rng.choice(["end", "end_branch", "every", "every"]),
        checkpoint_pages=1,
        may_jump=False,
        takes_decode_pages_first=True,
        prefetch=conf.PrefetchConfig(
            stop=rng.choice([*conf.STOP_POLICIES, "wait_complete"]),
            threshold=page_size * rng.choice([1, 2]),
            cut=rng.choice(list(conf.CutPolicy)),
            stage_at=rng.choice(list(conf.StageAt)),
            commit=rng.choice(list(conf.CommitPolicy)),
            timeout_base_s=rng.choice([1e-4, 1e-2]),
            timeout_per_ki_token_s=1e-3,
            occupied_share=1.0,
        ),
        scheduler=conf.SchedulerConfig(
            chunk_tokens=page_size * rng.choice([1, 3, 100]),
            batching=_batching(rng, full),
            new_token_ratio=rng.choice([0.0, 0.7]),
        ),
    )


def _batching(rng: Random, full: int) -> conf.Batching:
    drawn = rng.choice([conf.Batching.prefill_first, conf.Batching.mixed])
    return drawn if full % 4 else conf.Batching.running_first


class CarriedIo(SimulatedIo):
    """Simulated links and storage that move real bytes."""

    computes = True

    def __init__(self, config, storages, rate: float, num_engines: int) -> None:
        rates = {"to_device": rate, "to_host": rate, "host_memory": 4 * rate}
        storage = SimpleNamespace(contains=self._on_all_ranks)
        super().__init__(config, [storage], [rates] * num_engines, seed=0)
        self.rate = rate
        self.runners: list[ModelRunner] = []
        self.seen: Counter[str] = Counter()
        self._rank_storages = storages

    def advance(self, now_ns):
        done = super().advance(now_ns)
        for engine, work in done:
            if self.computes and isinstance(work, BackUp | LoadBack):
                runner = self.runners[engine]
                runner.launch()
                runner._events.pop(work).wait()
                if runner.pools.device.type == "cuda":  # so far a stream waits, and not this thread
                    torch.cuda.synchronize()
        return done

    def _on_all_ranks(self, keys):
        flags = [storage.contains(keys) for storage in self._rank_storages]
        return [all(each) for each in zip(*flags, strict=True)]

    def _store(self, engine, work, keys):
        item_of = dict(zip(work.keys, work.pages, strict=True))
        items = [item_of[key] for key in keys]
        stored = [True] * len(keys)
        for storage, payloads in self._parts(engine, items):
            flags = storage.write(keys, payloads)
            stored = [all(each) for each in zip(stored, flags, strict=True)]
        return stored.count(False)

    def _load(self, engine, prefetch, load):
        keys, items = load.keys, load.items
        least = len(keys)
        for storage, payloads in self._parts(engine, items):
            flags = storage.read(keys, payloads)
            least = min(least, flags.index(False) if False in flags else len(flags))
        return least

    def _parts(self, engine, items):
        ranks = self.runners[engine].pools.ranks
        for storage, rank in zip(self._rank_storages, ranks, strict=True):
            yield storage, [rank.payload(*item) for item in items]


class CarriedExecutor(SimulatedExecutor):
    """An executor whose data runner moves bytes and whose cost model gives times."""

    is_fenced = False  # streams keep the order, as in real time

    def submit(self, work, now_ns) -> None:
        super().submit(work, now_ns)
        seen, runner = self._io.seen, self._io.runners[self._engine]
        if not isinstance(work, StorageWrite) and self._io.computes:
            runner.submit(work)
        seen[type(work).__name__] += 1
        seen["fence"] += isinstance(work, BackUp) and work.is_fence
        if isinstance(work, LoadBack):
            full, swa, state = (work.counts[kind] for kind in (FULL, SWA, MAMBA))
            seen["load back of a window alone"] += bool(swa and not full)
            seen["load back of a state alone"] += bool(state and not full and not swa)

    def forward(self, batch, now_ns) -> StepRun:
        run = super().forward(batch, now_ns)
        if self._io.computes:
            self._io.runners[self._engine].compute(batch)
        return run


def _ends(watch: Watch) -> Counter[str]:
    seen: Counter[str] = Counter()
    for req, _ in watch.all_finished:
        for tier in ("device", "host", "storage"):
            seen[f"{tier} hit"] += getattr(req, f"{tier}_len") > 0
        seen["retracted"] += req.retractions > 0
    for req, _ in watch.all_aborted:
        seen[f"aborted while {'waiting' if req.admitted_ns is None else 'running'}"] += 1
    seen["finished"], seen["rejected"] = len(watch.all_finished), len(watch.all_rejected)
    return seen


def _streams(rng: Random, device: str) -> CopyStreams:
    are_late = [rng.random() < 0.5 for _ in range(2)]
    if device == "cuda":
        place = torch.device(device)
        return CopyStreams(*(CudaStream(place, is_urgent=each) for each in (True, False)))
    return CopyStreams(*(PlacedStream(is_late=each) for each in are_late))
