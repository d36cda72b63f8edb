"""The interfaces of the serving loop: executor, shared I/O and observer."""

from collections.abc import Sequence
from typing import Protocol

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Work
from hicache.clock import Clock
from hicache.executor.completions import Delivery, StepRun
from hicache.request import Request
from hicache.scheduler.batch import Batch
from hicache.scheduler.request_state import RequestState


class Executor(Protocol):
    """The forward pass, copies and storage I/O of one engine.

    Finished work is reported to the engine's `deliver`. Nothing blocks the engine, except `forward`
    of a real executor.
    """

    @property
    def is_fenced(self) -> bool:
        """True while a copy is in flight whose source pages are already free."""
        ...

    def submit(self, work: Work, now_ns: int) -> None: ...

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        """Start to ask storage which pages it has; sets `restorable`."""
        ...

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        """Start to read into the staged pages, in batches, until all are read or it is stopped."""
        ...

    def forward(self, batch: Batch, now_ns: int) -> StepRun: ...


class Io(Protocol):
    """The copy links and storages that engines share."""

    def pass_by(self, limit_ns: int | None, clock: Clock) -> int | None:
        """Time (ns) of the next event; None if there is none.

        Simulated time may pass up to `limit_ns`, as long as no engine gets a report. Events at
        `limit_ns` are left to `advance`.
        """
        ...

    def advance(self, now_ns: int) -> list[Delivery]:
        """Apply all events up to now; return the finished works, each with its engine."""
        ...


class Observer(Protocol):
    """Records the results of a run."""

    def next_look_ns(self) -> int | None:
        """Next time (ns) at which `at` must be called, before any event of that time."""
        ...

    def at(self, now_ns: int) -> None:
        """The time has reached `next_look_ns` or the end of the run.

        No event of this time has been reported yet.
        """
        ...

    def finished(self, req: RequestState, engine: int, now_ns: int) -> None: ...

    def rejected(
        self, req: RequestState, reason: str, followers: Sequence[Request], engine: int, now_ns: int
    ) -> None:
        """A request can never run, nor can `followers`, the requests that wait for its answer."""
        ...

    def aborted(
        self, req: RequestState, followers: Sequence[Request], engine: int, now_ns: int
    ) -> None:
        """A client gave up on a request, and so on `followers`, which wait for its answer."""
        ...
