"""Runs the replicas of a fleet in several processes, with the results of one process.

Replicas that share nothing but the router do not affect each other if the router knows nothing of
their state. Each is then a run of its own. A worker process serves one replica after another and
writes the rows of its requests to a file, so memory does not grow with the number of replicas. A
trace that names its sessions is divided line by line, and is never in memory as a whole.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

from hicache.config import Arrivals, ExperimentConfig, TraceConfig
from hicache.engine.build import world_of
from hicache.engine.deployment import Deployment, deploy, places_of
from hicache.experiment import play, workload_of
from hicache.policies.policy import policy_of
from hicache.policies.routing import RoundRobin, Route, Sticky
from hicache.request import Request
from hicache.results.measures import run_measures, working_set
from hicache.results.metrics import Progress, Result
from hicache.results.recorder import Tally
from hicache.results.remarks import remarks
from hicache.results.requests_file import TableRecords, write_requests
from hicache.user_code import user_code
from hicache.workload.kept import no_collection
from hicache.workload.parts import Part, divide
from hicache.workload.rounds import rounds_of
from hicache.workload.workload import Workload

# the requests of one replica: a part of a trace, or a list
Share = Part | list[Request]


def run(config: ExperimentConfig, *, progress: Callable[[Progress], None] | None = None) -> Result:
    """Run the replicas of `config` in `parallel.workers` processes, and return their results.

    The results equal those of one process, but there are no rows of time intervals. If the trace is
    divided line by line, its distinct tokens are not counted: that would need the names of all
    blocks in one process.

    Raises:
        ValueError: replicas depend on each other with these settings, or a worker was killed.
    """
    started, deployment = time.perf_counter(), deploy(config)
    route = _route_of(config, deployment)
    with TemporaryDirectory(prefix="hicache-") as name:
        folder = Path(name)
        shares, notes, measures, rounds = _divided(config, deployment, route, folder)
        tally: Tally | None = None
        num_done, num_requests = 0, sum(map(len, shares))
        outs = [folder / f"replica_{number}" for number in range(len(shares))]
        jobs = ((config, place, each, outs[place], rounds) for place, each in enumerate(shares))
        for share, part in zip(shares, _served(jobs, config.parallel.workers or 1), strict=True):
            tally = part if tally is None else tally.merged(part)
            num_done += len(share)
            if progress is not None:
                progress(Progress(done_count=num_done, total_count=num_requests, time_s=0.0))
        records = TableRecords.read(outs)
    assert tally is not None  # there is a replica
    measures |= run_measures(config, places_of(config, deployment), records, tally)
    return Result(
        records=records, measures=measures, wall_s=time.perf_counter() - started, notes=notes
    )


def _route_of(config: ExperimentConfig, deployment: Deployment) -> Route:
    # refuses replicas that depend on each other
    workload, route = config.workload, policy_of(world_of(config, deployment, lambda: 0)).route
    router = getattr(route, "__self__", None)
    bonds = {
        "executor.kind=torch": config.executor.kind != "simulated",
        f"storage={config.storage.kind}, which all replicas share": config.storage.kind != "none",
        "a router that looks at the replicas": not isinstance(router, Sticky | RoundRobin),
        "arrivals that wait for answers of other sessions": not workload.is_timed,
        "stages of the load": bool(workload.stage_ends_s),
        "engine.explain=true": config.engine.explain,
        "workload.jobs=true": workload.jobs,
        "parallel.prefill, whose engines share a link": bool(config.parallel.prefill),
        "cache.policy=oracle, which knows all requests": config.cache.policy == "oracle",
        "goodput.num_rates": bool(config.goodput.num_rates),
    }
    for what, holds in bonds.items():
        if holds:
            raise ValueError(f"parallel.workers does not work with {what}")
    return route


def _divided(
    config: ExperimentConfig, deployment: Deployment, route: Route, folder: Path
) -> tuple[Sequence[Share], list[str], dict[str, float], dict[int, int]]:
    # the requests of each replica, notes, measures of the workload, and the number of earlier turns
    # of each request, if a replica may lack them
    num_parts = config.parallel.replicas
    if isinstance(config.workload, TraceConfig) and config.workload.kind == "trace":
        is_sticky = isinstance(getattr(route, "__self__", None), Sticky)
        parts = divide(config.workload, folder, num_parts) if is_sticky else None
        if parts is not None:
            num = sum(map(len, parts))
            return parts, [f"trace: {num:,} requests, divided line by line"], {}, {}
    notes: list[str] = []
    workload = workload_of(config, deployment.cost, notes)
    notes += remarks(config, deployment, workload)
    lists: list[list[Request]] = [[] for _ in range(num_parts)]
    unseen: list[Any] = [None] * num_parts  # the router only counts the replicas
    homes: dict[int, int] = {}  # by request
    for each in sorted(workload.requests, key=lambda request: (request.arrival_ns, request.id)):
        home = homes[each.id] = route(each, unseen)
        before = [] if each.parent_id is None else [each.parent_id, *each.joins]
        if any(homes[other] != home for other in before):
            if config.workload.arrivals is not Arrivals.open:
                raise ValueError(
                    f"parallel.workers: request {each.id} waits for an answer of another replica: "
                    "set workload.arrivals=open"
                )
            each = replace(each, parent_id=None, joins=())
        lists[home].append(each)
    measures = working_set(workload.requests, deployment, config.cache.page_size)
    return lists, notes, {**measures, **workload.counts}, rounds_of(workload.requests)


def _serve(
    config: ExperimentConfig, number: int, share: Share, out: Path, rounds: Mapping[int, int]
) -> Tally:
    # runs in a worker: serves the requests of one replica, and writes their rows
    own = replace(config, parallel=replace(config.parallel, replicas=1, workers=None))
    with (
        user_code("a class of the user", Exception),
        no_collection(),
        # the kept results of a part would replace those of whole workloads
        patch.dict(os.environ, XDG_CACHE_HOME=str(out.parent)),
    ):
        if isinstance(share, Part):
            assert isinstance(config.workload, TraceConfig)
            share = share.requests(config.workload, config.seed)
        deployment, workload = deploy(own), Workload(name=config.workload.kind, requests=share)
        played = play(own, deployment, places_of(own, deployment), workload)
    for record in played.records:
        record.engine, record.round = number, rounds.get(record.id, record.round)
    out.mkdir(exist_ok=True)  # a killed worker may have made it
    write_requests(out, played.records)
    return played.tally


class _Worker:
    """A process of a Ray cluster."""

    serve = staticmethod(_serve)


def _served(jobs: Iterable[tuple[Any, ...]], num_workers: int) -> Iterator[Tally]:
    # what the replicas of `jobs` counted, in this order
    try:
        if "RAY_ADDRESS" not in os.environ:
            pool = Parallel(num_workers, return_as="generator", batch_size=1)
            yield from pool(delayed(_serve)(*job) for job in jobs)
            get_reusable_executor().shutdown()  # the summary needs the memory of its processes
        else:  # not by joblib, whose backend of Ray does not start a killed worker again
            import ray

            ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False)
            begin = ray.remote(max_restarts=3, max_task_retries=3)(_Worker).remote
            workers = ray.util.ActorPool([begin() for _ in range(num_workers)])
            yield from workers.map(lambda worker, job: worker.serve.remote(*job), jobs)
    except Exception as error:
        if hasattr(error, "cause"):  # Ray's error, which holds that of the worker
            raise error.cause from None
        if type(error).__module__.partition(".")[0] not in ("joblib", "ray"):
            raise
        raise ValueError(
            "parallel.workers: a worker process was killed, perhaps for lack of memory: repeat the "
            f"run with fewer than {num_workers} workers"
        ) from error
