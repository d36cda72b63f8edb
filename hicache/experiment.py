"""Builds all that a config names, runs it, and returns what came of it."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hicache.cache import invariants
from hicache.cache.named import LENGTHS, RANKING, make_policy
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.reasons.inquest import Setting
from hicache.cache.reasons.judge import Judge
from hicache.cache.tiers.capacity import Capacity, capacities, make_pools, page_bytes
from hicache.cache.tree.census import Census
from hicache.cache.tree.eviction import POLICIES, EvictionPolicy
from hicache.cache.tree.fates import Fates
from hicache.cache.tree.keys import Digests, Numbers, PageNames
from hicache.cache.tree.node import FULL, KIND_NAMES, MAMBA, SWA
from hicache.cache.tree.radix_tree import RadixTree
from hicache.clock import SECOND_NS
from hicache.config import ExperimentConfig, StartState, WritePolicy
from hicache.engine.loop import Engine, serve
from hicache.engine.ports import Io
from hicache.engine.ranks.lockstep import RankedEngine, lockstep
from hicache.engine.routing import ROUTERS
from hicache.engine.runtime import Runtime, SimulatedRuntime, make_runtime
from hicache.engine.warm import warm_census, warm_storage
from hicache.executor.simulated.cost import CostModel
from hicache.models import GIB, ComponentKind
from hicache.models.shapes import describe
from hicache.request import Request, TokenSpans
from hicache.results.chronicle import Chronicle
from hicache.results.keys import COUNTERS
from hicache.results.metrics import REQUIRED_MEASURES, Progress, RequestRecord, Result
from hicache.results.recorder import Recorder
from hicache.scheduler.checkpoints import PLACEMENTS
from hicache.scheduler.scheduler import Scheduler
from hicache.workload.arrivals import Feeder, Releases
from hicache.workload.build import Workload, load_workload, repeat_sessions, sample_sessions
from hicache.workload.page_numbers import page_numbers
from hicache.workload.patience import patience_of
from hicache.workload.rounds import RoundFeeder

ENGINE_TIMES = ("engine/busy_ns", "engine/prefill_ns", "engine/backlog_ns")  # not keys themselves
OFFERED_BATCH = 32  # answers decoded together, where an isolated request's decode cost is needed


def run(
    config: ExperimentConfig,
    *,
    workload: Workload | None = None,
    progress: Callable[[Progress], None] | None = None,
    chronicle: Chronicle | None = None,
) -> Result:
    """One run of `config`, of `workload` in place of the one it names if one is given.

    `chronicle`: takes down what happens.

    Raises:
        ValueError: a value that cannot be used, named.
        FileNotFoundError: a trace that is not there.
    """
    started = time.perf_counter()
    notes: list[str] = []
    tp = config.parallel.tp or config.model.default_tp
    cost = CostModel(config.model, config.hardware, tp=tp)
    if workload is None:
        workload = _workload(config, cost, notes)
    notes += _too_long(workload.requests, config.model.max_len)
    if config.model.from_hf is not None:
        notes.append(describe(config.model))
    if config.hardware.table is not None:
        notes.append(f"{config.hardware.name}, with what {config.hardware.table} has measured")
    sizes = page_bytes(config.model, config.cache.page_size, tp)
    device, host = capacities(config.cache, config.model, sizes, cost.free_device_bytes)
    notes += _describe(config, device, host, sizes, tp)
    runtime = make_runtime(config, cost=cost, sizes=sizes, device=device, host=host, tp=tp)
    num_ranks = config.parallel.ranks
    num_engines = config.parallel.replicas * num_ranks
    pages = page_numbers(workload.requests, config.cache.page_size)
    names = _page_names(config, pages)
    census = Census(pages, config.cache.page_size) if config.engine.explain else None
    parts = [
        _engine(
            config,
            names,
            # ranks decide alike, so the first one speaks for all
            census if number % num_ranks == 0 else None,
            cost=cost,
            runtime=runtime,
            sizes=sizes,
            device=device,
            host=host,
            names_evictions=chronicle is not None,
        )
        for number in range(num_engines)
    ]
    if chronicle is not None:
        for number, part in enumerate(parts[::num_ranks]):
            part.executor = chronicle.watch(part, number, part.executor)
    engines = _in_lockstep(parts, config)
    if config.workload.start is StartState.warm_storage:
        _warm(config, runtime, workload, parts[0].cache.tree, explains=census is not None)
    recorder = Recorder(
        engines,
        num_requests=len(workload.requests),
        interval_s=config.tracker.interval_s,
        warm_up_s=config.workload.warm_up_s,
        is_timed=config.workload.is_timed,
        progress=progress,
        counters=[runtime.counters],
        chronicle=chronicle,
    )
    io = runtime.io if chronicle is None else chronicle.watch_io(runtime.io)
    _serve(config, workload, engines, runtime, io, recorder)
    recorder.close()
    for part in parts:
        invariants.check_drained(part.cache, part.prefetcher)
    for engine in engines:
        if isinstance(engine, RankedEngine):
            engine.check_equal()
    records = sorted(recorder.records, key=lambda record: record.id)
    measures = _measures(config, records, engines, recorder, cost, tp)
    measures |= _working_set(workload.requests, sizes, host, config)
    found, more = runtime.report()
    notes += found
    measures |= more
    return Result(
        records=records, measures=measures, wall_s=time.perf_counter() - started, notes=notes
    )


def _in_lockstep(parts: Sequence[Engine], config: ExperimentConfig) -> Sequence[Engine]:
    """An engine of each group of ranks."""
    num_ranks = config.parallel.ranks
    if num_ranks == 1:
        return parts
    return [
        lockstep(parts[first : first + num_ranks], config.parallel, config.storage)
        for first in range(0, len(parts), num_ranks)
    ]


def _warm(
    config: ExperimentConfig,
    runtime: Runtime,
    workload: Workload,
    tree: RadixTree,
    *,
    explains: bool,
) -> None:
    """Put into storage what a first pass over the workload would leave there."""
    if not isinstance(runtime, SimulatedRuntime) or not runtime.storages:
        raise ValueError(
            "workload.start=warm_storage needs a storage and executor=simulated, got "
            f"storage.kind={config.storage.kind} and executor.kind={config.executor.kind}"
        )
    for storage in runtime.storages:
        warm_storage(storage.engine, workload.requests, tree)
    if explains:
        warm_census(workload.requests, tree)


def _serve(
    config: ExperimentConfig,
    workload: Workload,
    engines: Sequence[Engine],
    runtime: Runtime,
    io: Io,
    recorder: Recorder,
) -> None:
    """Serve the workload, and close what it ran on."""
    collects = gc.isenabled()
    gc.disable()  # the loop leaves no cycles behind, and looking for them took 5 % of its time
    try:
        serve(
            engines,
            _feeder(config, workload),
            clock=runtime.clock,
            io=io,
            router=ROUTERS[config.parallel.router](),
            observer=recorder,
            patience_ns=patience_of(workload.requests, config.workload, seed=config.seed),
        )
    finally:
        if collects:
            gc.enable()
        runtime.close()


def _workload(config: ExperimentConfig, cost: CostModel, notes: list[str]) -> Workload:
    workload = load_workload(config.workload, data_dir=config.data_dir, seed=config.seed)
    if config.workload.load is not None:
        asked = config.workload.load
        share = asked / _cold_load(workload, cost, config.parallel.replicas)
        change = sample_sessions if share <= 1 else repeat_sessions
        workload = change(workload, share, config.seed)
        reached = _cold_load(workload, cost, config.parallel.replicas)
        notes.append(
            f"workload.load: {asked:g} asked, {reached:.3g} reached (without a cache) with "
            f"{share:.3g} of the sessions"
        )
    notes += workload.notes
    notes.insert(0, workload.description)
    return workload


def _too_long(requests: Sequence[Request], max_len: int) -> list[str]:
    count = sum(request.prompt_len + request.output_len > max_len for request in requests)
    if not count:
        return []
    return [
        f"{count:,} requests are longer than model.max_len={max_len:,}: they are rejected, with "
        f"all that follow them"
    ]


def _feeder(config: ExperimentConfig, workload: Workload) -> Releases:
    knobs = config.workload
    if knobs.kind != "multi_turn":
        return Feeder(
            workload.requests,
            knobs.arrivals,
            concurrency=knobs.concurrency,
            stagger_ns=round(knobs.stagger_s * SECOND_NS),
        )
    return RoundFeeder(
        workload.requests,
        rate=knobs.request_rate,
        parallel=knobs.parallel,
        barrier=knobs.barrier,
        seed=config.seed,
    )


def _cold_load(workload: Workload, cost: CostModel, num_engines: int) -> float:
    """Utilisation of the GPUs by this workload, if nothing were ever hit."""
    lengths = [(0, request.prompt_len, request.output_len) for request in workload.requests]
    span_s = _span_s([request.arrival_ns for request in workload.requests])
    return _utilisation(cost, lengths, span_s, num_engines)


def _page_names(config: ExperimentConfig, pages: Mapping[int, TokenSpans]) -> PageNames:
    """Numbers, where no page outlives the run."""
    if config.executor.kind == "simulated":
        return Numbers(pages)
    return Digests(config.cache.page_size)


def _engine(
    config: ExperimentConfig,
    names: PageNames,
    census: Census | None,
    *,
    cost: CostModel,
    runtime: Runtime,
    sizes: tuple[int, int, int],
    device: Capacity,
    host: Capacity,
    names_evictions: bool,
) -> Engine:
    model, cache_config = config.model, config.cache
    policy: EvictionPolicy = make_policy(
        "cache.eviction",
        cache_config.eviction,
        POLICIES,
        wants={"priority": RANKING},
        knobs=cache_config.eviction_args,
    )
    tree = RadixTree(
        page_size=cache_config.page_size,
        names=names,
        policy=policy,
        window_len=model.window_len,
        has_states=ComponentKind.mamba in model.components,
        split_refreshes=cache_config.split_refreshes,
        leaving_refreshes=cache_config.leaving_refreshes,
        reclaims_duplicates=cache_config.write_policy is WritePolicy.write_back,
        fates=Fates(census),
    )
    has_storage = runtime.has_storage
    cache = PrefixCache(
        tree,
        make_pools(device, host, model, is_traced=config.parallel.ranks > 1),
        page_bytes=sizes,
        write_policy=cache_config.write_policy,
        load_back_threshold=cache_config.load_back_threshold,
        storage_queue_bytes=_queue_bytes(config) if has_storage else None,
        tiering=config.storage.tiering,
        storage_writes=config.storage.write,
        write_hits=config.storage.write_hits,
    )
    prefetcher = None
    if has_storage:
        capacity = host.counts[FULL]
        tokens = None if capacity is None else capacity * cache_config.page_size
        prefetcher = Prefetcher(cache, config.prefetch, tokens)
    setting = Setting(
        page_size=tree.page_size,
        window_pages=tree.window_pages,
        has_states=tree.has_states,
        has_storage=has_storage,
        prefetch_threshold=config.prefetch.threshold,
        load_back_threshold=cache_config.load_back_threshold,
        names_evictions=names_evictions,
    )
    is_real = config.executor.kind != "simulated"
    scheduler = Scheduler(
        cache,
        prefetcher,
        config.scheduler,
        max_len=model.max_len,
        checkpoints=make_policy(
            "cache.checkpoints",
            cache_config.checkpoints,
            PLACEMENTS,
            cache_config.page_size,
            cache_config.checkpoint_tokens,
            wants={"lengths": LENGTHS},
            knobs=cache_config.checkpoints_args,
        ),
        may_jump=config.engine.jump and not is_real,
        takes_decode_pages_first=is_real,
        estimate_s=cost.prefill_s,
        judge=None if census is None else Judge(tree.fates, setting),
    )
    check = _check if config.engine.check_invariants else None
    return Engine(cache, prefetcher, scheduler, runtime.executor(cache), check=check)


def _queue_bytes(config: ExperimentConfig) -> int:
    queue_gib = config.storage.write_queue_gib
    return int((config.cache.host_gib / 2 if queue_gib is None else queue_gib) * GIB)


def _check(engine: Engine) -> None:
    scheduler = engine.scheduler
    reqs = [*scheduler.running, *([scheduler.partial] if scheduler.partial else [])]
    reqs += [extend.req for extend in engine.extending]
    slots = [slot for extend in engine.extending for _, slot in extend.saves]
    invariants.check(engine.cache, engine.prefetcher, {req.sequence for req in reqs}, slots)
    for req in reqs:
        if req.blocked_since_ns is not None:
            raise invariants.BrokenLawError(
                f"law 9: request {req.request.id} has begun, and its wait for storage goes on"
            )


def _describe(
    config: ExperimentConfig, device: Capacity, host: Capacity, sizes: Sequence[int], tp: int
) -> list[str]:
    if config.cache.unlimited:
        return [f"{config.model.name} on {tp} device(s): pools that never fill"]
    notes = []
    for word, capacity in (("device", device), ("host", host)):
        parts = []
        for kind in (FULL, SWA, MAMBA):
            number = capacity.counts[kind]
            if sizes[kind] and number is not None:
                if kind == MAMBA:
                    parts.append(f"{number:,} states")
                else:
                    parts.append(f"{number * config.cache.page_size:,} {KIND_NAMES[kind]} tokens")
        notes.append(
            f"{config.model.name} on {tp} device(s), {word}: "
            f"{_gib(capacity.total_bytes)} = {' + '.join(parts)}"
        )
    return notes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def _measures(
    config: ExperimentConfig,
    records: Sequence[RequestRecord],
    engines: Sequence[Engine],
    recorder: Recorder,
    cost: CostModel,
    tp: int,
) -> dict[str, float]:
    counters = recorder.totals()
    measures: dict[str, float] = {
        name: count
        for name, count in counters.items()
        if not name.startswith("cache/") and name not in ENGINE_TIMES
    }
    discarded = [
        count for name, count in counters.items() if name.startswith("prefetch/discarded_")
    ]
    measures["prefetch/discarded_pages"] = sum(discarded)
    span_s = _span_s([record.arrival_ns for record in records])
    hits = [
        (record.prompt_len - record.computed_len, record.prompt_len, record.output_len)
        for record in records
        if record.output_len  # finished, or aborted when its answer had begun
    ]
    storage = config.storage
    measures |= {
        "load/rho_gpu": _utilisation(cost, hits, span_s, len(engines)),
        "load/rho_read": counters["transfer/storage_read_bytes"]
        / span_s
        / (storage.read_gbps * 1e9),
        "load/rho_write": counters["transfer/storage_write_bytes"]
        / span_s
        / (storage.write_gbps * 1e9),
        # the time in which somebody could have begun, had there been room: in the step or in memory
        "load/rho_queue": counters["engine/backlog_ns"] / SECOND_NS / span_s / len(engines),
        "gpu/busy_s": counters["engine/busy_ns"] / SECOND_NS * tp,
        "gpu/prefill_s": counters["engine/prefill_ns"] / SECOND_NS * tp,
        "engine/steps_count": sum(engine.num_steps for engine in engines),
        "engine/span_s": recorder.now_ns / SECOND_NS,
        "tree/nodes_count": sum(engine.cache.tree.num_nodes for engine in engines),
    }
    return dict.fromkeys((*REQUIRED_MEASURES, *COUNTERS), 0) | measures


def _utilisation(
    cost: CostModel, requests: Sequence[tuple[int, int, int]], span_s: float, num_engines: int
) -> float:
    """Seconds of work offered a second: (cached, prompt, answer) lengths, decoded in batches."""
    offered = sum(cost.offered_s(*lengths, OFFERED_BATCH) for lengths in requests)
    return offered / span_s / num_engines


def _span_s(arrivals_ns: Sequence[int]) -> float:
    if not arrivals_ns:
        return 1.0
    return max((max(arrivals_ns) - min(arrivals_ns)) / SECOND_NS, 1.0)


def _working_set(
    requests: Sequence[Request],
    sizes: tuple[int, int, int],
    host: Capacity,
    config: ExperimentConfig,
) -> dict[str, float]:
    """Distinct tokens of the workload, and how much of their full KV the host could hold."""
    parts = [part for each in requests for part in (each.prompt, each.output)]
    starts = np.concatenate([part.starts for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    order = np.argsort(starts, kind="stable")
    firsts = starts[order].astype(np.int64)
    ends = np.maximum.accumulate(firsts + counts[order])
    before = np.concatenate(([firsts[0]], ends[:-1]))
    tokens = int(np.maximum(ends - np.maximum(firsts, before), 0).sum())
    capacity = host.counts[FULL]
    measures: dict[str, float] = {"workload/distinct_tokens": tokens}
    if capacity is not None:
        measures["load/host_over_working_set"] = capacity * config.cache.page_size / tokens
    return measures
