"""Builds what a config describes, runs it, and returns the results."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hicache.cache.tree.digests import Digests
from hicache.cache.tree.keys import Numbers
from hicache.clock import to_ns
from hicache.config import ExperimentConfig, StartState
from hicache.engine.build import build_engine, world_of
from hicache.engine.deployment import Deployment, Place, deploy, places_of
from hicache.engine.loop import Engine, serve
from hicache.engine.ports import Io, Runtime
from hicache.engine.ranks.lockstep import RankedEngine, joined
from hicache.engine.roles import route_pairs
from hicache.engine.simulated_runtime import make_runtime
from hicache.engine.warm import warm_storages
from hicache.executor.simulated.peers import PeerIo
from hicache.models.cost import CostModel
from hicache.observe import invariants
from hicache.observe.explainer import Case, Explainer
from hicache.observe.history import PageRegistry
from hicache.observe.timeline import Timeline
from hicache.policies.policy import policy_of
from hicache.policies.routing import Replica, Route, router_of
from hicache.request import Request
from hicache.results.jobs import job_measures
from hicache.results.measures import run_measures, scaled_to_load, working_set
from hicache.results.metrics import Progress, RequestRecord, Result
from hicache.results.recorder import Recorder, Tally
from hicache.results.remarks import remarks
from hicache.user_code import user_code
from hicache.workload.clients import patience_of
from hicache.workload.kept import no_collection
from hicache.workload.page_numbers import page_numbers
from hicache.workload.rounds import make_feeder, rounds_of, stages_of
from hicache.workload.workload import Workload, load_workload


def build(config: ExperimentConfig) -> tuple[Engine, Runtime]:
    """Build one serving engine and its runtime, for a program that runs the engine itself.

    The program calls `hicache.engine.loop.serve` as often as it needs, and closes the runtime. The
    program need not know all requests in advance.

    Raises:
        ValueError: a setting cannot be used; the message names it.
    """
    deployment = deploy(config)
    runtime = make_runtime(config, deployment)
    names = Digests(config.cache.page_size, overlap=config.overlap)
    world = world_of(config, deployment, runtime.clock.now)
    check = _check(config)
    place = Place(role="both", config=config, deployment=deployment)
    engine = build_engine(world, policy_of(world), place, runtime, names, check=check)
    return engine, runtime


def run(
    config: ExperimentConfig,
    *,
    workload: Workload | None = None,
    progress: Callable[[Progress], None] | None = None,
    timeline: Timeline | None = None,
) -> Result:
    """Run the experiment that `config` describes, and return its results.

    Args:
        config: the settings of the run.
        workload: the requests to replay; None means the workload that `config` names.
        progress: a function that is called with the progress of the run; None means no calls.
        timeline: an object that records the events of the run; None means no recording.

    Raises:
        ValueError: a setting cannot be used; the message names it.
        FileNotFoundError: a trace file does not exist.
        UserCodeError: a class of the user failed, or ended the program.
    """
    # SystemExit may also come from a property of a user's class: no run without results ends well;
    # a run leaves no cycles, and the search for them took 5 % of its time
    with user_code("a class of the user", Exception), no_collection():
        return _run(config, workload, progress, timeline)


def _run(
    config: ExperimentConfig,
    workload: Workload | None,
    progress: Callable[[Progress], None] | None,
    timeline: Timeline | None,
) -> Result:
    started = time.perf_counter()
    notes: list[str] = []
    deployment = deploy(config)
    if workload is None:
        workload = workload_of(config, deployment.cost, notes)
    notes += remarks(config, deployment, workload)
    places = places_of(config, deployment)
    played = play(config, deployment, places, workload, progress, timeline)
    measures = {
        **run_measures(config, places, played.records, played.tally),
        **working_set(workload.requests, deployment, config.cache.page_size),
        **played.measures,
        **workload.counts,
    }
    if config.workload.jobs:
        measures |= job_measures(config, deployment.cost, workload.requests, played.records)
    wall_s = time.perf_counter() - started
    return Result(
        records=played.records, measures=measures, wall_s=wall_s, notes=notes + played.notes
    )


class Played(NamedTuple):
    """What the engines have done with a workload: `records` by request id, and what they counted.

    `notes` and `measures` are those of the runtime.
    """

    records: list[RequestRecord]
    tally: Tally
    notes: list[str]
    measures: dict[str, float]


def play(
    config: ExperimentConfig,
    deployment: Deployment,
    places: Sequence[Place],
    workload: Workload,
    progress: Callable[[Progress], None] | None = None,
    timeline: Timeline | None = None,
) -> Played:
    """Serve all requests of `workload` with the engines of `places`."""
    runtime = make_runtime(config, deployment, places)
    cases: dict[int, Case] = {}
    engines, route = _engines(config, places, runtime, workload, cases, timeline)
    if config.workload.start is StartState.warm_storage:
        warm_storages(config, runtime, workload.requests, engines[0].cache.tree)
    recorder = Recorder(
        engines,
        config,
        num_requests=len(workload.requests),
        progress=progress,
        counters=[runtime.counters],
        cases=cases,
        timeline=timeline,
        rounds=rounds_of(workload.requests),
        stage_of=stages_of(workload.requests, config.workload),
    )
    io = runtime.io if timeline is None else timeline.watch_io(runtime.io)
    _serve(config, workload, engines, route, runtime, io, recorder)
    recorder.close()
    ranks = [rank for engine in engines for rank in (engine, *engine.followers)]
    for rank in ranks:
        invariants.check_drained(rank.cache, rank.prefetcher)
    for engine in engines:
        if isinstance(engine, RankedEngine):
            engine.check_equal()
    records = sorted(recorder.records, key=lambda record: record.id)
    played = Played(records, recorder.tally(), *runtime.report())
    for rank in ranks:
        rank.cache.tree.take_apart()
    return played


def _engines(
    config: ExperimentConfig,
    places: Sequence[Place],
    runtime: Runtime,
    workload: Workload,
    cases: dict[int, Case],
    timeline: Timeline | None,
) -> tuple[list[Engine], Callable[[Request], int]]:
    # also the function that returns the number of the engine for a request
    num_ranks, page_size = config.parallel.ranks, config.cache.page_size
    requests, kinds = workload.requests, places[0].deployment.kinds
    overlap = config.overlap
    pages = page_numbers(requests, page_size, overlap)
    numbers = pages if config.cache.policy != "lru" else None
    # simulated pages do not outlive the run, so numbers suffice
    is_simulated = config.executor.kind == "simulated"
    names = Numbers(pages, overlap) if is_simulated else Digests(page_size, numbers, overlap)
    registry = PageRegistry(pages, kinds.size, overlap) if config.engine.explain else None
    if registry is not None and config.workload.start is StartState.warm_storage:
        registry.warm(requests, names, kinds)
    engines: list[Engine] = []
    routes: list[Route] = []
    for number, place in enumerate(places):
        listener = None
        if registry is not None and place.role != "decode":
            is_named = timeline is not None
            listener = Explainer(registry, kinds, config, cases, names_evictions=is_named)
        # ranks decide alike, so a listener for the first one suffices
        ranks: list[Engine] = []
        for each in (listener, *[None] * (num_ranks - 1)):
            world = world_of(place.config, place.deployment, runtime.clock.now, requests)
            policy = policy_of(world)
            routes.append(policy.route)
            ranks.append(build_engine(world, policy, place, runtime, names, each, _check(config)))
        first, *others = ranks
        if timeline is not None:
            first.executor = timeline.watch(first, number, first.executor)
        if others:
            first = joined(ranks, config.parallel.hit_agreement, config.storage.batch_pages)
        engines.append(first)

    now = runtime.clock.now

    def show(each: Engine) -> Replica:
        return Replica(each.scheduler, each.num_requests, lambda: each.catch_up(now()), each.role)

    replicas = [show(each) for each in engines]
    if isinstance(runtime.io, PeerIo):
        runtime.io.connect(engines)
    if config.parallel.prefill:
        return engines, route_pairs(engines, replicas, config.parallel.prefill, routes)
    return engines, router_of(routes[0], replicas)


def _check(config: ExperimentConfig) -> Callable[[Engine], None] | None:
    return invariants.check_laws if config.engine.check_invariants else None


def _serve(
    config: ExperimentConfig,
    workload: Workload,
    engines: Sequence[Engine],
    route: Callable[[Request], int],
    runtime: Runtime,
    io: Io,
    recorder: Recorder,
) -> None:
    try:
        serve(
            engines,
            make_feeder(workload.requests, config.workload, seed=config.seed),
            clock=runtime.clock,
            io=io,
            route=route,
            observer=recorder,
            patience_ns=patience_of(workload.requests, config.workload, seed=config.seed),
            server_ns=to_ns(config.scheduler.server_s),
        )
    finally:
        runtime.close()


def workload_of(config: ExperimentConfig, cost: CostModel, notes: list[str]) -> Workload:
    """Load the workload of `config` at its load, and add what the user should know to `notes`."""
    workload = load_workload(config.workload, data_dir=config.data_dir, seed=config.seed)
    if config.workload.load is not None:
        workload, note = scaled_to_load(workload, config.workload.load, config, cost)
        notes.append(note)
    notes += workload.notes
    notes.insert(0, workload.description)
    return workload
