"""All events of a run with their times, from which a request is explained or a trace is drawn.

Recording makes a run slower, but changes no decision. Use it with `engine.jump=false`, so that
every step ends at its planned time.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import BackUp, LoadBack, StorageWrite
from hicache.clock import Clock
from hicache.engine.loop import Engine
from hicache.engine.ports import Executor, Io
from hicache.executor.completions import Delivery, StepRun
from hicache.observe.explainer import Case
from hicache.scheduler.batch import Batch
from hicache.scheduler.handover import Outage, Parcel, Sent
from hicache.scheduler.queue_waits import NO_STEP, QueueWaits, Shortage
from hicache.scheduler.request_state import RequestState

KINDS = {LoadBack: "load-back", BackUp: "back-up", StorageWrite: "storage write"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    engine: int
    start_ns: int
    end_ns: int
    extends: tuple[tuple[int, int, int], ...]  # (request, first token, end) of each prompt
    decodes: tuple[int, ...]  # requests
    load_stall_ns: int
    number: int = 0  # of the batch, among those in flight


@dataclass(slots=True, kw_only=True)
class Transfer:
    """A copy between cache tiers or engines, or a storage query, with its start and end.

    Attributes:
        kind: what happened, such as `back-up` (device to host), `storage read`, or `handover` of
            KV from a prefill engine to a decode engine.
        engine: the number of the engine; of a handover, the one that sends.
        start_ns: when the engine submitted the transfer.
        end_ns: when the engine learned that the transfer had ended. None means that it has not
            ended.
        about: `request` and `pages` of a storage query or read, and the engine whose host is read
            instead (`source`); `bytes` of a copy; `request`, `bytes` and the engine that receives
            (`to`) of a handover.
    """

    kind: str
    engine: int
    start_ns: int
    end_ns: int | None = None
    about: dict[str, int | None]


class Turn(NamedTuple):
    at_ns: int
    lacks: Shortage


class RecordedWaits(QueueWaits):
    """Also adds to the list `turns` what an engine's queue waits for, whenever that changes."""

    def __init__(self, turns: list[Turn]) -> None:
        super().__init__()
        self._turns = turns

    def turn(self, now_ns: int, lacks: Shortage) -> None:
        if lacks != self.lacks:
            self._turns.append(Turn(now_ns, lacks))
        super().turn(now_ns, lacks)


@dataclass(slots=True)
class Timeline:
    """Collects the events of a run in order of time, to explain or to plot them.

    Attributes:
        steps: the forward passes of all engines.
        transfers: the copies between cache tiers and the storage queries.
        lives: the final state of each request, by request id.
        cases: why each request had to compute tokens, by request id.
        turns: what the queue of each engine waited for, and since when, by engine.
        open: the transfers that have not ended.
    """

    steps: list[Step] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    lives: dict[int, RequestState] = field(default_factory=dict)  # final states of requests
    cases: dict[int, Case] = field(default_factory=dict)  # why requests computed their tokens
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    open: dict[Sent | Prefetch, Transfer] = field(default_factory=dict)  # transfers under way

    def watch(self, engine: Engine, number: int, executor: Executor) -> Executor:
        self.turns[number] = [Turn(0, NO_STEP)]
        engine.scheduler.prefill.queue_waits = RecordedWaits(self.turns[number])
        return _WatchedExecutor(executor, number, self)

    def watch_io(self, io: Io) -> Io:
        return _WatchedIo(io, self)

    def begin(
        self, what: Sent | Prefetch, kind: str, engine: int, now_ns: int, **about: int | None
    ) -> None:
        transfer = Transfer(kind=kind, engine=engine, start_ns=now_ns, about=about)
        self.transfers.append(transfer)
        self.open[what] = transfer

    def ended(self, req: RequestState, case: Case) -> None:
        self.lives[req.request.id] = req
        self.cases[req.request.id] = case


class _WatchedExecutor:
    def __init__(self, inner: Executor, engine: int, timeline: Timeline) -> None:
        self._inner = inner
        self._engine = engine
        self._timeline = timeline

    @property
    def is_fenced(self) -> bool:
        return self._inner.is_fenced

    def submit(self, work: Sent, now_ns: int) -> None:
        if isinstance(work, Parcel) and work.num_bytes:
            about = {"request": work.handover.req.request.id, "bytes": work.num_bytes}
            self._begin(work, "handover", now_ns, **about, to=work.target)
        if isinstance(work, LoadBack | BackUp | StorageWrite):
            self._begin(work, KINDS[type(work)], now_ns, bytes=work.num_bytes)
        self._inner.submit(work, now_ns)

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        self._begin(prefetch, "storage query", now_ns, **_about(prefetch))
        self._inner.query(prefetch, now_ns)

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        self._begin(prefetch, "storage read", now_ns, **_about(prefetch))
        self._inner.read(prefetch, now_ns)

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        run = self._inner.forward(batch, now_ns)
        self._timeline.steps.append(
            Step(
                engine=self._engine,
                start_ns=now_ns,
                end_ns=run.ends[batch.num_steps - 1],
                extends=tuple(
                    (each.req.request.id, each.start, each.end) for each in batch.extends
                ),
                decodes=tuple(req.request.id for req in batch.decodes),
                load_stall_ns=run.load_stall_ns,
                number=batch.number,
            )
        )
        return run

    def _begin(self, what: Sent | Prefetch, kind: str, now_ns: int, **about: int | None) -> None:
        self._timeline.begin(what, kind, self._engine, now_ns, **about)


def _about(prefetch: Prefetch) -> dict[str, int | None]:
    about: dict[str, int | None] = {"request": prefetch.request_id, "pages": prefetch.num_pages}
    return about if prefetch.source is None else about | {"source": prefetch.source}


class _WatchedIo:
    def __init__(self, inner: Io, timeline: Timeline) -> None:
        self._inner = inner
        self._timeline = timeline

    def pass_by(self, limit_ns: int, clock: Clock) -> int:
        return self._inner.pass_by(limit_ns, clock)

    def advance(self, now_ns: int) -> list[Delivery]:
        deliveries = self._inner.advance(now_ns)
        for _, done in deliveries:
            if isinstance(done, Outage) or (transfer := self._timeline.open.get(done)) is None:
                continue
            is_batch = isinstance(done, Prefetch) and not done.is_read
            if transfer.kind != "storage read" or not is_batch:
                transfer.end_ns = now_ns
                del self._timeline.open[done]
        return deliveries
