"""The interfaces of the serving loop: executor, shared I/O, runtime and observer."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefix_cache import PrefixCache
from hicache.clock import Clock
from hicache.executor.completions import Delivery, StepRun
from hicache.request import Request
from hicache.scheduler.batch import Batch
from hicache.scheduler.handover import Sent
from hicache.scheduler.request_state import RequestState


class Executor(Protocol):
    """Carries out the forward passes, copies and storage operations of one engine.

    The engine's method `deliver` is called when a copy or storage operation has finished. No method
    of the executor blocks, except `forward` if it computes on a real device.
    """

    @property
    def is_fenced(self) -> bool:
        """True while the engine's next step must wait for a copy from device to host.

        The copy still reads device pages that were already freed, and the step may overwrite them.
        """

    def submit(self, work: Sent, now_ns: int) -> None:
        """Start a copy or a storage operation, or send a parcel to another engine.

        The target learns of the arrival of a parcel, and the source, too, if it carries KV.
        """

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        """Start to ask storage which pages of the prefetch it has.

        The answer arrives later. It sets `prefetch.restorable`, the prefix lengths in pages that
        storage can restore.
        """

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        """Start to read the pages of the prefetch from storage into host memory, in batches.

        The read goes on until all pages are read, a page is missing, or the prefetch is stopped.
        """

    def forward(self, batch: Batch, now_ns: int) -> StepRun: ...


class Io(Protocol):
    """Runs the copies and storage operations of several engines, on links shared by all of them."""

    def pass_by(self, limit_ns: int, clock: Clock) -> int:
        """Return the time (ns) of the next I/O event; `hicache.clock.NEVER` if none is pending.

        In simulated time, the method first processes events before `limit_ns` and moves `clock`,
        until some work is complete. Events at `limit_ns` or later wait for a call of `advance`.
        """

    def advance(self, now_ns: int) -> list[Delivery]:
        """Process all I/O events up to `now_ns`; return the work that has finished.

        Each element of the result is a pair: the index of the engine, and its finished work.
        """


class Runtime(Protocol):
    """The clock, copies, storage and executors of a run; `counters` count what storage did."""

    @property
    def clock(self) -> Clock: ...

    @property
    def io(self) -> Io: ...

    counters: Counter[str]
    has_storage: bool

    def executor(self, cache: PrefixCache) -> Executor: ...

    def close(self) -> None: ...

    def report(self) -> tuple[list[str], dict[str, float]]: ...


class Observer(Protocol):
    """Records the results of a run."""

    def next_look_ns(self) -> int:
        """Return the time (ns) at which the loop shall call the method `at` next.

        `hicache.clock.NEVER` means not before the end of the run.
        """

    def at(self, now_ns: int) -> None:
        """Record the state of the run at `now_ns`.

        The serving loop calls this method at the time that `next_look_ns` has returned, before it
        reports the events of that time. It also calls the method at the end of the run.
        """

    def finished(self, req: RequestState, engine: int, now_ns: int) -> None: ...

    def rejected(
        self, req: RequestState, reason: str, followers: Sequence[Request], engine: int, now_ns: int
    ) -> None:
        """Record a request that can never run.

        `followers` are the requests that wait for the answer to this request. They are dropped as
        well.
        """

    def aborted(
        self, req: RequestState, followers: Sequence[Request], engine: int, now_ns: int
    ) -> None:
        """Record a request whose client gave up.

        `followers` are the requests that wait for the answer to this request. They are dropped as
        well.
        """
