"""What the serving loop asks of others: who carries out steps, moves bytes and keeps the score."""

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
    """The forward pass, the copies and the storage I/O of one engine.

    What is submitted is reported to the engine's `deliver` when it is done; nothing here blocks
    the engine but `forward` of a real executor.
    """

    @property
    def is_fenced(self) -> bool:
        """Whether a copy is under way whose source pages have been given away already."""
        ...

    def submit(self, work: Work, now_ns: int) -> None:
        """Begin a copy."""
        ...

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        """Ask storage what it has; sets `restorable`."""
        ...

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        """Read into the staged pages, batch by batch, until all is read or it is terminated."""
        ...

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        """Compute a batch."""
        ...


class Io(Protocol):
    """The machinery that engines share."""

    def pass_by(self, limit_ns: int | None, clock: Clock) -> int | None:
        """When something there will happen next.

        Simulated time may pass meanwhile, up to `limit_ns`, as long as nobody is told of anything;
        what happens at `limit_ns` is left to `advance`.
        """
        ...

    def advance(self, now_ns: int) -> list[Delivery]:
        """Let everything up to now happen; what is done, for which engine."""
        ...


class Observer(Protocol):
    """Whoever keeps the score."""

    def next_look_ns(self) -> int | None:
        """From when on it must be told of a point in time before anything of it happens."""
        ...

    def at(self, now_ns: int) -> None:
        """Time has come to where it wanted to look, or to an end.

        Nothing of this moment has happened that anybody was told of.
        """
        ...

    def finished(self, req: RequestState, engine: int, now_ns: int) -> None:
        """A request is answered."""
        ...

    def rejected(
        self, req: RequestState, reason: str, followers: Sequence[Request], engine: int, now_ns: int
    ) -> None:
        """A request can never run; neither can those that wait for its answer."""
        ...

    def aborted(
        self, req: RequestState, followers: Sequence[Request], engine: int, now_ns: int
    ) -> None:
        """Somebody has given up on a request, and on those that wait for its answer."""
        ...
