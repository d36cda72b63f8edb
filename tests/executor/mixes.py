"""Random requests through real memory in simulated time.

The cost model says when a thing is done, the data runner does it: as late as it may be done or as
early (`PlacedStream`). So a run is the same every time, and a wait that is missing somewhere is a
wrong logit.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import torch

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import BackUp, LoadBack, StorageWrite
from hicache.clock import SimulatedClock
from hicache.config import (
    STOP_POLICIES,
    WRITE_POLICIES,
    Arrivals,
    Batching,
    CommitPolicy,
    CutPolicy,
    PrefetchConfig,
    SchedulerConfig,
    StageAt,
    StorageConfig,
    WorkloadConfig,
)
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
from tests.scheduler.world import Plot, Watch, engine_of, request_of

PATTERNS = ("F S M D", "F S M D", "S D F M", "F S", "M F", "F", "D S F")
Fault = Callable[[ModelRunner], None]


@dataclass(frozen=True, slots=True)
class Mix:
    """What came of one run."""

    verdict: Verdict
    counters: Counter[str]
    seen: Counter[str]


def tiny(pattern: str, page_size: int) -> ModelConfig:
    """The small hybrid model, smaller still, with these layers."""
    words = pattern.split()
    num_swa, num_mamba = words.count("S"), words.count("M") + words.count("D")
    return replace(
        model("tiny_hybrid"),
        pattern=pattern,
        num_layers=len(words),
        num_full_layers=words.count("F"),
        num_swa_layers=num_swa,
        num_mamba_layers=num_mamba,
        window_len=2 * page_size + page_size // 2 if num_swa else 0,
        hidden_size=32,
        head_dim=8,
        recurrent_head_dim=8,
        recurrent_state_dim=8,
        dense_params=50_000,
        dense_param_bytes=2.0,
        head_params=32 * 64,
        embedding_params=0,
        max_len=4096,
    )


def requests_of(rng: np.random.Generator, page_size: int) -> list[Request]:
    """Prompts that fork off each other, and some that ask again for the same."""
    known: list[np.ndarray] = []
    requests = []
    arrival_ns = 0
    gap_ns = float(rng.choice([1e5, 3e7, 3e8]))
    for number in range(int(rng.integers(6, 12))):
        head = np.empty(0, np.int32)
        floods = number > 2 and rng.random() < 0.25  # pushes the others off device and host
        if known and not floods and rng.random() < 0.95:
            base = known[int(rng.integers(len(known)))]
            is_turn = rng.random() < 0.8  # the whole of it, its answer included
            head = base if is_turn else base[: int(rng.integers(1, len(base) + 1))]
        most = 9 if floods else 4 if len(head) < 9 * page_size else 1
        fresh_len = int(rng.integers(most * page_size // 2, most * page_size + 1))
        fresh = rng.integers(0, 1000, fresh_len, dtype=np.int32)
        prompt = np.concatenate([head, fresh])
        output_len = 1 if rng.random() < 0.3 else int(rng.integers(1, page_size + 3))
        output = rng.integers(0, 1000, output_len, dtype=np.int32)
        known.append(np.concatenate([prompt, output]))
        arrival_ns += int(rng.exponential(gap_ns))
        namespace = "tenant" if rng.random() < 0.1 else ""
        requests.append(request_of(number, prompt, output, arrival_ns, namespace))
    return requests


def run_mix(
    seed: int,
    *,
    fault: Fault | None = None,
    device: str = "cpu",
    computes: bool = True,
    form: str = "plain",
    plane: Plane | None = None,
    most: int | None = None,
) -> Mix:
    """One random configuration with random requests, `most` at most; all follows from the seed.

    `fault` spoils a data runner. Without `computes` no byte moves: the same events, sooner.
    `form` is that of pages on the host.
    """
    rng = np.random.default_rng(seed)
    plane = plane or (REFERENCE if device == "cpu" else TRITON)
    page_size = int(rng.choice([4, 8]))
    shape = tiny(str(rng.choice(PATTERNS)), page_size)
    if form != "plain" or plane is not REFERENCE:  # what kernels multiply or code is 16 at least
        shape = replace(shape, head_dim=16, recurrent_head_dim=16)
    reference = ReferenceModel(shape, page_size=page_size, device=device)
    requests = requests_of(rng, page_size)[:most]
    plot, tp = _draw_room(rng, shape, page_size, requests)
    layers_at_once = int(rng.integers(1, len(shape.layer_words) + 1))
    verifier = Verifier(reference, plane)
    seen: Counter[str] = Counter()
    # two engines with one storage: what one has computed, the other reads
    spec = _spec(shape, plot, torch.device(device), tp)
    spec = replace(spec, host_format=form, storage_format=form, plane=plane)
    pools = [TorchPools(spec) for _ in range(int(rng.choice([1, 2, 2])))]
    allocators = [make_pools(plot.device, plot.host) for _ in pools]
    runners = [
        ModelRunner(
            reference,
            each,
            _streams(rng, torch.device(device)),
            verifier=verifier,
            allocators=pages,
        )
        for each, pages in zip(pools, allocators, strict=True)
    ]
    for runner in runners if plane is REFERENCE else ():
        # a late stream brings so many layers at a time, not before the model waits for them
        late = functools.partial(runner._streams.load.load_items, layers_at_once=layers_at_once)
        runner.pools.plane = plane._replace(load_items=late)
    for runner in runners if fault is not None else ():
        fault(runner)
    rate = float(rng.choice([1e6, 1e8, 1e10]))
    storage_config, storages = _draw_storage(rng, plot, tp)
    io = CarriedIo(storage_config, storages, runners, rate, computes=computes)
    plot = _with_policies(rng, plot, has_storage=bool(storages))
    abort_share = float(rng.choice([0.0, 0.0, 0.03]))
    engines: list[AbortingEngine] = []
    for number, (runner, pages) in enumerate(zip(runners, allocators, strict=True)):
        executor = CarriedExecutor(
            number,
            CostModel(shape, load(HardwareConfig, "hardware", "h200"), tp=1),
            io,
            page_size=page_size,
            page_bytes=plot.page_bytes,
            load_rate=rate,
            slowdown=1.0,
        )
        executor.carry(runner, seen, computes=computes)
        engine = engine_of(plot, executor, checks=True, kind=AbortingEngine, pools=pages)
        engine.begin_aborting(np.random.default_rng(rng.integers(1 << 30)), abort_share, seen)
        engines.append(engine)
    watch, turns = Watch(), count()
    serve(
        engines,
        Feeder(requests, WorkloadConfig(arrivals=Arrivals.open)),
        clock=SimulatedClock(),
        io=io,
        route=lambda request: next(turns) % len(engines),
        observer=watch,
    )
    _count_ends(watch, seen)
    counters: Counter[str] = Counter(io.counters)
    for engine, runner in zip(engines, runners, strict=True):
        runner.close()
        invariants.check_drained(engine.cache, engine.prefetcher)
        counters += engine.cache.counters
    return Mix(verifier.verify(), counters, seen)


def _spec(shape: ModelConfig, plot: Plot, device: torch.device, tp: int) -> PoolSpec:
    return PoolSpec(
        model=shape,
        page_size=plot.page_size,
        device_counts=plot.device,
        host_counts=plot.host,
        device=device,
        tp=tp,
    )


def _draw_room(
    rng: np.random.Generator, model: ModelConfig, page_size: int, requests: list[Request]
) -> tuple[Plot, int]:
    """How large the memory of an engine is, and over how many ranks."""
    longest = max(each.prompt_len + each.output_len for each in requests)
    pages, window_pages = -(-longest // page_size) + 2, -(-model.window_len // page_size)
    full = int(rng.integers(pages, 2 * pages))
    swa = int(rng.integers(window_pages + 4, 2 * pages + window_pages))
    device = (full, swa * (model.num_swa_layers > 0), int(rng.integers(6, 24)))
    scale = float(rng.choice([0.7, 1.0, 3.0]))
    tp = int(rng.choice([1, 1, 2, 4]))
    kinds = model_kinds(model, page_size, tp)
    plot = Plot(
        cache={"kinds": kinds},
        device=device,
        host=tuple(int(count * scale) + 1 for count in device),
        page_size=page_size,
        page_bytes=kinds.page_bytes,
    )
    return plot, tp


def _draw_storage(
    rng: np.random.Generator, plot: Plot, tp: int
) -> tuple[StorageConfig, list[MemoryStorage]]:
    """How fast storage is, and that of each rank, if there is any."""
    config = StorageConfig(
        kind="memory",
        read_gbps=float(rng.choice([1e-3, 1e-1, 10])),
        write_gbps=float(rng.choice([1e-3, 10])),
        query_s=float(rng.choice([1e-5, 1e-3])),
        operation_s=1e-5,
        batch_pages=int(rng.choice([1, 4])),
    )
    storages = [
        # some ranks keep less than others
        MemoryStorage(capacity_bytes=1 << 30 if rng.random() < 0.7 else 6 * max(plot.page_bytes))
        for _ in range(tp if rng.random() < 0.85 else 0)
    ]
    return config, storages


def _with_policies(rng: np.random.Generator, plot: Plot, *, has_storage: bool) -> Plot:
    """Policies, the same for all engines of a run."""
    write_policy = _draw(rng, [*WRITE_POLICIES, "write_through"])
    checkpoints = _draw(rng, ["end", "end_branch", "every", "every"])
    drawn = {"write_policy": write_policy, "load_back_threshold": int(rng.choice([1, 10]))}
    return replace(
        plot,
        has_storage=has_storage,
        cache={**plot.cache, **drawn},
        checkpoints=checkpoints,
        checkpoint_pages=1,
        may_jump=False,
        takes_decode_pages_first=True,
        prefetch=PrefetchConfig(
            stop=_draw(rng, [*STOP_POLICIES, "wait_complete"]),
            threshold=plot.page_size * int(rng.choice([1, 2])),
            cut=_draw(rng, CutPolicy),
            stage_at=_draw(rng, StageAt),
            commit=_draw(rng, CommitPolicy),
            timeout_base_s=float(rng.choice([1e-4, 1e-2])),
            timeout_per_ki_token_s=1e-3,
            occupied_share=1.0,
        ),
        scheduler=SchedulerConfig(
            chunk_tokens=plot.page_size * int(rng.choice([1, 3, 100])),
            batching=_draw(rng, Batching),
            new_token_ratio=float(rng.choice([0.0, 0.7])),
            new_token_ratio_floor=0.0,
        ),
    )


class CarriedIo(SimulatedIo):
    """Simulated links and storage, through which real bytes go."""

    def __init__(self, config, storages, runners, rate: float, *, computes: bool) -> None:
        rates = {"to_device": rate, "to_host": rate, "host_memory": 4 * rate}
        storage = SimpleNamespace(contains=self._on_all_ranks)
        super().__init__(config, [storage], [rates] * len(runners), seed=0)
        self._rank_storages = storages
        self._runners = runners
        self._computes = computes

    def advance(self, now_ns):
        done = super().advance(now_ns)
        for engine, work in done:
            if self._computes and isinstance(work, BackUp | LoadBack):
                runner = self._runners[engine]
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

    def _load(self, engine, load):
        keys, items = load.keys, load.items
        least = len(keys)
        for storage, payloads in self._parts(engine, items):
            flags = storage.read(keys, payloads)
            least = min(least, flags.index(False) if False in flags else len(flags))
        return least

    def _parts(self, engine, items):
        ranks = self._runners[engine].pools.ranks
        for storage, rank in zip(self._rank_storages, ranks, strict=True):
            yield storage, [rank.payload(*item) for item in items]


class CarriedExecutor(SimulatedExecutor):
    """Bytes by the data runner, time by the cost model."""

    is_fenced = False  # streams keep the order, as in real time

    def carry(self, runner: ModelRunner, seen: Counter[str], *, computes: bool) -> None:
        self._runner, self._seen, self._computes = runner, seen, computes

    def submit(self, work, now_ns) -> None:
        super().submit(work, now_ns)
        if not isinstance(work, StorageWrite) and self._computes:
            self._runner.submit(work)
        self._seen[type(work).__name__] += 1
        self._seen["fence"] += isinstance(work, BackUp) and work.is_fence
        if isinstance(work, LoadBack):
            full, swa, state = (work.counts[kind] for kind in (FULL, SWA, MAMBA))
            self._seen["load back of a window alone"] += bool(swa and not full)
            self._seen["load back of a state alone"] += bool(state and not full and not swa)

    def forward(self, batch, now_ns) -> StepRun:
        run = super().forward(batch, now_ns)
        if self._computes:
            self._runner.compute(batch)
        return run


class AbortingEngine(Engine):
    """Now and then a request is taken back, wherever it is."""

    def begin_aborting(self, rng: np.random.Generator, share: float, seen: Counter[str]) -> None:
        self._rng, self._share, self._events = rng, share, seen

    def _take_in(self, now_ns: int) -> None:
        super()._take_in(now_ns)
        if self._batch is not None or self._rng.random() >= self._share:
            return
        scheduler = self.scheduler
        waiting = list(scheduler.waiting)
        partial = [scheduler.partial] if scheduler.partial else []
        for name, reqs in (("waiting", waiting), ("running", [*scheduler.running, *partial])):
            if reqs and self._rng.random() < 0.5:
                req = reqs[int(self._rng.integers(len(reqs)))]
                assert scheduler.abort(req.request.id, now_ns) is req
                self._events[f"aborted while {name}"] += 1
                return


def _count_ends(watch: Watch, seen: Counter[str]) -> None:
    for req, _ in watch.all_finished:
        for tier in ("device", "host", "storage"):
            seen[f"{tier} hit"] += getattr(req, f"{tier}_len") > 0
        seen["retracted"] += req.retractions > 0
    for end in ("finished", "rejected", "aborted"):
        seen[end] += len(getattr(watch, f"all_{end}"))


def _streams(rng: np.random.Generator, device: torch.device) -> CopyStreams:
    kinds = rng.integers(2, size=2)
    if device.type == "cuda":
        return CopyStreams(CudaStream(device, is_urgent=True), CudaStream(device, is_urgent=False))
    return CopyStreams(*(PlacedStream(is_late=kind == 0) for kind in kinds))


def _draw(rng: np.random.Generator, kinds):
    return list(kinds)[int(rng.integers(len(kinds)))]
