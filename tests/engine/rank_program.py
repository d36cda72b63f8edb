"""A rank in a process of its own: an engine that serves random requests and agrees on each step.

`run_ranks` starts one process a rank and gathers what each found; nothing there depends on how
long anything takes, except which of the faults meet.
"""

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from hicache.cache import invariants
from hicache.clock import WallClock
from hicache.config import FaultsConfig, HitAgreement, PrefetchConfig, SchedulerConfig
from hicache.engine.build import check_laws
from hicache.engine.loop import Engine
from hicache.engine.ranks.agreement import RankAgreement, tree_digest
from hicache.engine.ranks.processes import GlooChannel, RankedReader, join, leave
from hicache.request import Request
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.checked import CheckedStorage
from hicache.storage.guards.faults import FaultyStorage
from tests.scheduler.world import Plot, engine_of, request_of

PAGE = 4
STEP_NS = 1_000_000
CLOCK_SKEW_NS = 3 * STEP_NS  # by which each rank's clock is ahead of the one before
CHECK_EVERY = 25  # steps
QUIET = FaultsConfig()
FAULTS = FaultsConfig(
    delay_ms=0.1,
    delay_sigma=1.0,
    missing_rate=0.02,
    short_rate=0.01,
    corrupt_rate=0.01,
    full_rate=0.05,
    error_rate=0.01,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks do. `faults[rank]` is what its storage suffers."""

    num_ranks: int
    num_steps: int
    faults: Sequence[FaultsConfig] = ()
    stop: str = "timeout"
    rule: HitAgreement = HitAgreement.restorable
    abort_share: float = 0.02  # of steps, in which one rank hears that a request is gone
    has_states: bool = True
    axes: Sequence[Sequence[Sequence[int]]] | None = None  # none: one axis of all ranks
    timeout_base_s: float = 0.01
    diverges_at: int | None = None  # step in which the last rank drops a page by itself


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank found, or why it failed."""

    rank: int
    failure: str = ""
    num_steps: int = 0
    digests: tuple[int, ...] = ()  # of the whole tree, after every 25th step and at the end
    num_collectives: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    num_wrong_pages: int = 0
    num_injected: int = 0
    num_ended: int = 0  # answered, rejected or dropped
    num_submitted: int = 0


def payload(key: bytes) -> bytes:
    """What a page holds: 32 bytes that only its key gives."""
    return blake2b(key, digest_size=32).digest()


def plot_of(plan: Plan) -> Plot:
    """An engine of small pools."""
    return Plot(
        window_len=12,
        has_states=plan.has_states,
        device=(120, 80, 12),
        host=(160, 64, 12),
        page_size=PAGE,
        load_back_threshold=4,
        checkpoints="end",
        prefetch=PrefetchConfig(
            stop=plan.stop,
            threshold=8,
            timeout_base_s=plan.timeout_base_s,
            timeout_per_ki_token_s=0.1,
        ),
        scheduler=SchedulerConfig(chunk_tokens=64, max_running=6),
    )


def random_request(rng: Random, number: int) -> Request:
    """A prompt that shares its start with others of its family, and goes on by itself or not."""
    family, shared = rng.randrange(10), rng.choice((25, 41, 57, 73))
    own = rng.choice((0, 0, rng.randrange(1, 40)))
    first, answer = 100_000 + number * 100, 200_000 + number * 100
    prompt = [*range(family * 1000, family * 1000 + shared), *range(first, first + own)]
    return request_of(number, prompt, range(answer, answer + rng.randrange(1, 9)))


def storage_of(rank: int, plan: Plan) -> FaultyStorage:
    """What a rank reads from and writes to."""
    return FaultyStorage(
        MemoryStorage(capacity_bytes=1500 * 32),
        plan.faults[rank] if plan.faults else QUIET,
        seed=rank,
        clock=WallClock(),
    )


def is_quiet(engine: Engine) -> bool:
    """Whether nothing is left to be done, copied or read."""
    assert engine.prefetcher is not None
    prefetcher = engine.prefetcher
    under_way = engine.cache.in_flight or prefetcher.active or prefetcher.lingering
    return engine.is_idle and not under_way


def serve(rank: int, plan: Plan, channels: dict[str, GlooChannel]) -> Report:
    """Carry the plan out as one of its ranks."""
    engine = engine_of(plot_of(plan), None, checks=False)  # type: ignore[arg-type]
    assert engine.prefetcher is not None
    agreement = RankAgreement(engine.cache, engine.prefetcher, whole_digest_every=1)
    memory = storage_of(rank, plan)
    reader = RankedReader(
        CheckedStorage(memory), agreement, channels, payload=payload, batch_pages=4, rule=plan.rule
    )
    engine.executor = reader
    shared_rng = Random(0)  # ranks draw the same
    num_submitted = num_ended = 0
    dropped: set[int] = set()
    digests = []
    step = 0
    while step < plan.num_steps or not is_quiet(engine):
        now_ns = step * STEP_NS + rank * CLOCK_SKEW_NS
        reader.check()
        for request_id in agreement.apply(channels["step"].minimum(agreement.pack(now_ns))):
            engine.abort(request_id, now_ns)
            dropped.add(request_id)
        if step < plan.num_steps:
            if shared_rng.random() < 0.35:
                engine.submit(random_request(shared_rng, num_submitted), now_ns)
                num_submitted += 1
            undecided = list(agreement.ballot(now_ns))
            if shared_rng.random() < plan.abort_share and undecided:
                gone, first = shared_rng.choice(undecided), shared_rng.randrange(plan.num_ranks)
                if rank == first:
                    agreement.ask_abort(gone)
        outcome = engine.wake(now_ns)
        num_ended += len(outcome.finished) + len(outcome.rejected)
        if step == plan.diverges_at and rank == plan.num_ranks - 1:
            engine.cache.pools[0][0].allocate(1)
        if step % CHECK_EVERY == 0:
            check_laws(engine)
            digests.append(tree_digest(engine.cache.tree))
        step += 1
    reader.close()
    invariants.check_drained(engine.cache, engine.prefetcher)
    digests.append(tree_digest(engine.cache.tree))
    return Report(
        rank=rank,
        num_steps=step,
        digests=tuple(digests),
        num_collectives={name: each.num_collectives for name, each in channels.items()},
        counters=dict(engine.cache.counters),
        num_wrong_pages=reader.num_wrong_pages,
        num_injected=sum(memory.injected.values()),
        num_ended=num_ended + len(dropped),
        num_submitted=num_submitted,
    )


def run_rank(rank: int, plan: Plan, store_path: str, results: Any) -> None:
    """The body of a process."""
    try:
        axes = plan.axes or [[list(range(plan.num_ranks))]]
        channels = join(rank, plan.num_ranks, store_path, axes, timeout_s=60)
        report = serve(rank, plan, channels)
        leave()
    except BaseException as error:
        report = Report(rank=rank, failure=f"{type(error).__name__}: {error}")
    results.put(report)


def run_ranks(plan: Plan, directory: Path, timeout_s: float = 240) -> list[Report]:
    """One process a rank, in order of rank. A rank that hangs raises `queue.Empty` here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])  # imported once for all ranks
    results = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, plan, str(directory / "store"), results))
        for rank in range(plan.num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        reports = [results.get(timeout=timeout_s) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
    return sorted(reports, key=lambda report: report.rank)
