"""One engine in simulated time on tiny pools."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any

import numpy as np

from hicache.cache.kinds import FULL
from hicache.cache.pages import Pools
from hicache.clock import NEVER, SimulatedClock
from hicache.config import (
    Arrivals,
    HitAgreement,
    PrefetchConfig,
    SchedulerConfig,
    StorageConfig,
    WorkloadConfig,
)
from hicache.engine.build import scheduler_of
from hicache.engine.loop import Engine, serve
from hicache.engine.ports import Executor
from hicache.engine.ranks.agreement import TracedAllocator
from hicache.engine.ranks.lockstep import RankedEngine
from hicache.engine.warm import warm_storage
from hicache.executor.completions import StepEnds, StepRun
from hicache.executor.simulated.executor import SimulatedExecutor, SimulatedIo
from hicache.executor.simulated.stores import StandIns
from hicache.observe import invariants
from hicache.observe.invariants import check_laws
from hicache.request import Request, TokenSpans
from hicache.scheduler.batch import Batch
from hicache.scheduler.request_state import RequestState
from hicache.storage.engines.memory import MemoryStorage
from hicache.workload.feeder import Feeder
from tests.cache.small import make_cache, make_pools, policies_of, prefetcher_of

PAGE_BYTES = (1 << 20, 1 << 20, 1 << 20)
STEP_NS = 10_000_000
TOKEN_NS = 20_000
SCHEDULER = SchedulerConfig(chunk_tokens=64, max_running=8)
# nothing is reserved for answers, so that memory runs out
EAGER = SchedulerConfig(chunk_tokens=256, max_running=16, new_token_ratio=0.0)
PREFETCH = PrefetchConfig(threshold=16, occupied_share=1.0)
STORAGE = StorageConfig(kind="memory", read_gbps=0.5, write_gbps=0.5, batch_pages=4)
KINDS = {"full": (0, False), "full_swa": (20, False), "full_mamba": (0, True), "all": (20, True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """The settings of a world; pools by kind in pages of 8 tokens and slots.

    `cache`: further arguments of `make_cache`.
    """

    device: tuple[int, int, int] = (40, 30, 12)
    host: tuple[int, int, int] = (80, 60, 16)
    page_size: int = 8
    page_bytes: tuple[int, int, int] = PAGE_BYTES
    scheduler: SchedulerConfig = SCHEDULER
    prefetch: PrefetchConfig = PREFETCH
    storage: StorageConfig = STORAGE
    has_storage: bool = True
    checkpoints: str = "end_branch"
    checkpoint_pages: int = 4
    may_jump: bool = True
    takes_decode_pages_first: bool = False
    num_ranks: int = 1
    num_batches: int = 1
    cache: Mapping[str, Any] = field(default_factory=dict)


def plot_of(kind: str, **changes: Any) -> Plot:
    """Settings of a world for one of `KINDS`; `changes` go to `Plot`, scheduler or cache."""
    window_len, has_states = KINDS[kind]
    own = {name: changes.pop(name) for name in Plot.__slots__ if name in changes}
    names = {each.name for each in fields(SchedulerConfig)} & set(changes)
    settings: dict[str, Any] = {name: changes.pop(name) for name in names}
    own["scheduler"] = replace(own.get("scheduler", SCHEDULER), **settings)
    return Plot(**own, cache={"window_len": window_len, "has_states": has_states, **changes})


def spans(tokens: Sequence[int]) -> TokenSpans:
    """Token ids as runs of consecutive ones."""
    ids = np.array(tokens, np.int32)
    firsts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    return TokenSpans(ids[firsts], np.diff(firsts, append=len(ids)).astype(np.int32))


def request_of(
    number: int, prompt: Sequence[int], answer: Sequence[int], arrival_ns: int = 0, **more: Any
) -> Request:
    """A request in a session of its own, by token ids."""
    told = {"id": number, "session_id": number, "arrival_ns": arrival_ns, **more}
    return Request(prompt=spans(prompt), output=spans(answer), **told)


def fresh(
    number: int, length: int = 10, num_answers: int = 9, arrival_ns: int = 0, **more: Any
) -> Request:
    """A request that shares no token with those of other numbers."""
    first = 1000 * number
    prompt, answer = range(first, first + length), [number] * num_answers
    return request_of(number, prompt, answer, arrival_ns, **more)


def random_requests(
    seed: int, count: int = 40, *, gap_ns: int = 60_000_000, longest: int = 200
) -> list[Request]:
    """Conversations that go on and branch, one request a gap, of prompts up to `longest` tokens."""
    rng = Random(seed)
    past: list[list[int]] = [[]]
    requests = []
    fresh = longest * 3 // 10
    for number in range(count):
        before = rng.choice(past[-10:])
        before = before[: rng.randint(0, len(before))] if rng.random() < 0.2 else before
        prompt = (before + [rng.randint(1, 50) for _ in range(rng.randint(1, fresh))])[-longest:]
        answer = [rng.randint(1, 50) for _ in range(rng.randint(1, 30))]
        past.append(prompt + answer)
        requests.append(request_of(number, prompt, answer, number * gap_ns))
    return requests


class PlainExecutor(SimulatedExecutor):
    """An executor whose step takes a fixed time and a time per prompt token."""

    def __init__(self, io: SimulatedIo, page_size: int, number: int, num_ranks: int) -> None:
        sizes = [size // num_ranks for size in PAGE_BYTES]  # a rank has its part of each
        super().__init__(
            number, None, io, page_size=page_size, page_bytes=sizes, load_rate=1.0, slowdown=1.0
        )
        self.batches: list[tuple[int, int]] = []

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        self.batches.append((len(batch.extends), len(batch.decodes)))
        for extend in batch.extends:
            req = extend.req
            assert req.kv_len == extend.start, f"{req.request.id} is not where its extend begins"
            num_pages = req.sequence.num_pages
            assert extend.end <= num_pages * self._page_size, f"{req.request.id} lacks pages"
        tokens = sum(extend.end - extend.start for extend in batch.extends)
        step = STEP_NS + TOKEN_NS * tokens
        return StepRun(StepEnds([now_ns + step * (n + 1) for n in range(batch.num_steps)]), 0)


class World:
    """An engine of one rank or several, with its clock, copies and storage, all simulated.

    `cache`, `prefetcher`, `scheduler` and `executor` are those of the first rank.
    """

    def __init__(self, plot: Plot, *, checks: bool = True) -> None:
        sizes = {ord(tag): size for tag, size in zip("fsm", PAGE_BYTES, strict=True)}
        num_ranks, ranks = plot.num_ranks, range(plot.num_ranks)
        self.storages = [MemoryStorage(capacity_bytes=None, page_bytes=sizes) for _ in ranks]
        stores = [StandIns(each) for each in self.storages] if plot.has_storage else []
        rates = {"to_device": 1e9, "to_host": 1e9, "host_memory": 4e9}
        self.io = SimulatedIo(plot.storage, stores, [rates] * num_ranks, seed=0)
        executors = [PlainExecutor(self.io, plot.page_size, rank, num_ranks) for rank in ranks]
        self.ranks = [engine_of(plot, each, checks=checks) for each in executors]
        self.engine = self.ranks[0]
        self.cache, self.scheduler = self.engine.cache, self.engine.scheduler
        self.prefetcher, self.counters = self.engine.prefetcher, self.cache.counters
        self.executor = executors[0]
        if num_ranks > 1:
            self.engine = RankedEngine(
                self.ranks, HitAgreement.restorable, plot.storage.batch_pages
            )
            self.ranks[0] = self.engine
        watch = self._watch = Watch()
        self.finished, self.rejected = watch.all_finished, watch.all_rejected
        self.aborted, self.hooks = watch.all_aborted, watch.hooks
        self.clock = SimulatedClock()

    def submit(self, request: Request) -> RequestState:
        return self.scheduler.submit(request, 0)

    def step(self) -> Batch:
        """Plan one step and commit it."""
        batch = self.scheduler.plan(0)
        assert batch is not None
        self.scheduler.commit(batch, 1, 0)
        return batch

    def warm(self, requests: Sequence[Request]) -> None:
        """Write all pages of these requests to the storage of each rank."""
        for storage in self.storages:
            warm_storage(StandIns(storage), requests, self.cache.tree)

    def serve(
        self,
        requests: Sequence[Request],
        *,
        route: Callable[[Request], int] = lambda request: 0,
        patience_ns: Mapping[int, int] | None = None,
    ) -> None:
        """Serve all requests until they end; then check that no memory or copy is left."""
        serve(
            [self.engine],
            Feeder(requests, WorkloadConfig(arrivals=Arrivals.open)),
            clock=self.clock,
            io=self.io,
            route=route,
            observer=self._watch,
            patience_ns=patience_ns,
        )
        for rank in self.ranks:
            invariants.check_drained(rank.cache, rank.prefetcher)
        if isinstance(self.engine, RankedEngine):
            self.engine.check_equal()

    def outcome(self) -> dict[str, object]:
        """All times, token counts and counters of the run."""
        return {
            "reqs": [
                (end, {name: each for name, each in vars(req).items() if isinstance(each, int)})
                for req, end in self.finished
            ],
            "aborted": [(req.request.id, end, req.decoded) for req, end in self.aborted],
            "rejected": [(req.request.id, reason) for req, reason in self.rejected],
            "counters": {name: count for name, count in self.counters.items() if count},
            "io": dict(self.io.counters),
            "steps": self.engine.num_steps,
        }


def engine_of(
    plot: Plot, executor: Executor, *, checks: bool, pools: Pools | None = None
) -> Engine:
    """The engine of one rank, with these pools or with new ones."""
    cache = make_cache(
        pools or make_pools(plot.device, plot.host, TracedAllocator),
        page_size=plot.page_size,
        checkpoints=plot.checkpoints,
        checkpoint_tokens=plot.checkpoint_pages * plot.page_size,
        page_bytes=plot.page_bytes,
        storage_queue_bytes=1 << 30 if plot.has_storage else None,
        storage=plot.storage,
        **plot.cache,
    )
    host_tokens = plot.host[FULL] * plot.page_size
    own = plot.cache.get("policy")
    reads = prefetcher_of(cache, plot.prefetch, host_tokens, own) if plot.has_storage else None
    policy = policies_of(
        cache.tree.kinds, own, cache=cache.knobs, scheduler=plot.scheduler, rules=cache.rules
    )
    scheduler = scheduler_of(plot.scheduler.batching)(
        cache,
        reads,
        plot.scheduler,
        policy.requests,
        max_len=100_000,
        may_jump=plot.may_jump,
        takes_decode_pages_first=plot.takes_decode_pages_first,
        num_batches=plot.num_batches,
    )
    return Engine(cache, reads, scheduler, executor, check=check_laws if checks else None)


def bare_world(kind: str = "full", **changes: Any) -> World:
    """A world without storage."""
    return World(plot_of(kind, has_storage=False, **changes))


def ids(reqs: Iterable[RequestState]) -> list[int]:
    return [req.request.id for req in reqs]


def ended(reqs: Iterable[tuple[RequestState, object]]) -> list[int]:
    """The ids of requests that finished, were rejected or aborted."""
    return ids(req for req, _ in reqs)


def chunks(batch: Batch) -> list[tuple[int, int, int]]:
    """The prompt tokens that a step computes: (id, start, end)."""
    return [(each.req.request.id, each.start, each.end) for each in batch.extends]


class Watch:
    """Records how and when requests end; `hooks` are called at every event."""

    def __init__(self) -> None:
        self.all_finished: list[tuple[RequestState, int]] = []
        self.all_rejected: list[tuple[RequestState, str]] = []
        self.all_aborted: list[tuple[RequestState, int]] = []
        self.hooks: list[Callable[[int], None]] = []

    def next_look_ns(self) -> int:
        return 0 if self.hooks else NEVER

    def at(self, now_ns: int) -> None:
        for hook in self.hooks:
            hook(now_ns)

    def finished(self, req: RequestState, engine: int, now_ns: int) -> None:
        self.all_finished.append((req, now_ns))

    def rejected(self, req: RequestState, reason: str, *_: object) -> None:
        self.all_rejected.append((req, reason))

    def aborted(self, req: RequestState, followers: object, engine: int, now_ns: int) -> None:
        self.all_aborted.append((req, now_ns))
