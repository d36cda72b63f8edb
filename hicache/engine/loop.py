"""The serving loop: one engine's steps, and several engines under one clock.

An engine's state changes only at its own step ends; arrivals and finished copies wait until then. A
run of decode steps counts as one step. An event moves its end forward to the next step end, so the
result is the same as with single steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, repeat

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import Reported, StorageWrite
from hicache.clock import NEVER, Clock
from hicache.engine.decode_run import DecodeRun
from hicache.engine.ports import Executor, Io, Observer
from hicache.request import Request
from hicache.scheduler.batch import NOTHING, Batch, Extend, Outcome
from hicache.scheduler.handover import News, Outage, Parcel
from hicache.scheduler.request_state import TokenRun
from hicache.scheduler.scheduler import Scheduler
from hicache.workload.clients import Clients
from hicache.workload.feeder import Releases


@dataclass(slots=True, kw_only=True)
class Flight:
    """A batch of an engine, from its plan to the end of its last step.

    Attributes:
        run: the steps of the batch; None while they wait for a fence.
        is_held: whether the steps have waited for a fence.
        stall_ns: the part of the current step that waits for load-backs, in ns.
        passes_ns: with pipeline stages, when the first has computed the batch, in ns.
        num_passed: tokens of chunks that have left the batch at that time.
    """

    batch: Batch
    planned_ns: int
    run: DecodeRun | None = None
    is_held: bool = False
    started_ns: int = 0
    stall_ns: int = 0
    passes_ns: int = 0
    num_passed: int = 0


class Engine:
    """One serving engine: a scheduler, a KV cache and an executor that runs the steps.

    Requests that arrive and copies that finish during a step take effect at the end of the step.
    With several batches in flight, that is the next end of a step of any of them.
    """

    followers: Sequence["Engine"] = ()  # further ranks, which repeat each step
    role, is_gone, is_returning = "both", False, False  # others for engines of one role

    def __init__(
        self,
        cache: PrefixCache,
        prefetcher: Prefetcher | None,
        scheduler: Scheduler,
        executor: Executor,
        *,
        check: Callable[["Engine"], None] | None = None,
    ) -> None:
        self.cache = cache
        self.prefetcher = prefetcher
        self.scheduler = scheduler
        self.executor = executor
        self.num_steps = 0
        self.check = check
        self._arrived: list[tuple[int, Request]] = []  # (when, what)
        self._aborted: list[int] = []
        self._delivered: list[Reported | Prefetch | News] = []
        self._flights: list[Flight] = []  # in the order of their plans
        self._runs: list[DecodeRun] = []  # of the flights that have begun
        self._num_batches = len(scheduler.decodes)
        self._prefill = scheduler.prefill
        self._deadline_ns = NEVER  # next prefetch deadline of a waiting request
        self._backlog_ns = 0
        self._backlog_since_ns: int | None = None  # when the last plan left a request out
        # a partial read may let a waiting request run
        self._follows_reads = prefetcher is not None and prefetcher.policy.waits
        self._listener = cache.tree.listener
        self.is_explained = self._listener is not None

    # -- what happens to it --------------------------------------------------------------------

    def submit(self, request: Request, now_ns: int, *, came_ns: int | None = None) -> None:
        """Accept a request; the request is queued when the current step ends.

        `came_ns` is the arrival time in ns if it is earlier than `now_ns`; None means `now_ns`.
        """
        self._arrived.append((now_ns if came_ns is None else came_ns, request))
        # counts up to the last arrival: the time to drain the rest says nothing about the load
        self.cache.counters["engine/backlog_ns"] = self.backlog_ns(now_ns)
        self.interrupt(now_ns)

    def abort(self, request_id: int, now_ns: int) -> None:
        self._aborted.append(request_id)
        self.interrupt(now_ns)

    def deliver(self, done: Reported | Prefetch | News, now_ns: int) -> bool:
        """Tell the engine that a copy or storage operation has finished or made progress.

        The report takes effect at the end of the current step. Return False if the engine need not
        wake, because the report cannot change anything yet.
        """
        runs = self._runs
        if (
            isinstance(done, StorageWrite)
            and len(runs) == self._num_batches == 1
            and not (self._flights[0].batch.extends or self._delivered or self.cache.tree.demotes)
        ):
            # it only makes room for other writes, and lets host pages be evicted
            runs[0].note_write(done, now_ns)
            return False
        if not isinstance(done, Prefetch) or done.is_read or not done.is_reading:
            self._delivered.append(done)
        elif not self._follows_reads:
            return False
        # a copy moves no deadline
        wakes = len(runs) < self._num_batches or isinstance(done, Prefetch)
        for run in runs:
            wakes |= run.cut(now_ns)
        return wakes

    def catch_up(self, now_ns: int) -> None:
        """Commit the decode steps of the current run that ended before `now_ns`.

        To commit a step is to apply its results to the scheduler and the cache. Without this call,
        the engine commits a run of several steps only at its end. The run continues unchanged.
        """
        for flight in self._flights:
            if flight.run is not None:
                self._commit(flight, flight.run.take_before(now_ns))
        assert not self.scheduler.ended.outcome.finished, (
            "a run goes on after an answer is complete"
        )

    def interrupt(self, now_ns: int) -> None:
        for run in self._runs:
            run.cut(now_ns)

    def look_on(self, until_ns: int) -> bool:
        for run in self._runs:  # noqa: SIM110 - called for each event
            if run.look_on(until_ns, self._deadline_ns):
                return True
        return False

    @property
    def step_end_ns(self) -> int | None:
        """The first end (ns) of a run of steps that is in flight."""
        runs = self._runs
        return runs[0].end_ns if len(runs) == 1 else min([r.end_ns for r in runs], default=None)

    @property
    def is_held(self) -> bool:
        """Whether a planned batch waits for a fence."""
        return len(self._runs) < len(self._flights)

    def next_wake_ns(self, now_ns: int) -> int:
        """Return the time (ns) at which the engine must wake even if nothing arrives.

        This is the end of a step, or the time at which a queued request stops waiting for storage.
        `NEVER` means that there is no such time.
        """
        deadline = self._deadline_ns = self._prefill.next_deadline_ns(now_ns)
        for run in self._runs:
            if run.end_ns < deadline:
                deadline = run.end_ns
        return deadline

    @property
    def extending(self) -> list[Extend]:
        return [extend for flight in self._flights for extend in flight.batch.extends]

    def num_requests(self) -> int:
        scheduler = self.scheduler
        started = {*scheduler.started, *(extend.req for extend in self.extending)}
        elsewhere = len(self._arrived) + len(scheduler.waiting) + len(scheduler.running)
        return elsewhere + len(started)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and not (self._flights or self._arrived or self._delivered)

    # -- what it does --------------------------------------------------------------------------

    def wake(self, now_ns: int) -> Outcome:
        """End the step that ends now, apply arrivals and finished work, and begin the next step.

        Return the requests that ended. If the current step is still running at `now_ns`, only
        cancel the planned decode steps after it.
        """
        outcome, goes_on = NOTHING, False
        end_ns = self.step_end_ns if self._runs else None
        if end_ns is not None and end_ns > now_ns:
            self.interrupt(now_ns)
            if len(self._flights) == self._num_batches:
                return outcome
        for flight in list(self._flights) if end_ns is not None else ():
            if flight.run is not None and flight.run.end_ns <= now_ns:
                goes_on |= self._end_run(flight, flight.run)
        if self._listener is not None:
            self._listener.at(now_ns)
        if self._delivered or self._arrived or self._aborted:
            self.take_in(now_ns)
        if len(self._flights) < self._num_batches:
            self._plan(now_ns)
            outcome = self.scheduler.ended.take()
        elif goes_on:
            outcome = self.scheduler.ended.take()
        self.hand_out(now_ns)
        for flight in self._flights:
            if flight.run is None:
                self._launch(flight, now_ns)
        if self.check is not None:
            self.check(self)
        return outcome

    def _plan(self, now_ns: int) -> None:
        for number in range(self._num_batches):
            if number not in [each.batch.number for each in self._flights]:
                self._plan_batch(now_ns, number)

    def _plan_batch(self, now_ns: int, number: int) -> bool:
        self._backlog_ns = self.backlog_ns(now_ns)
        batch = self.scheduler.plan(now_ns, number)
        self._backlog_since_ns = now_ns if self._prefill.has_backlog else None
        if batch is not None:
            self._flights.append(Flight(batch=batch, planned_ns=now_ns))
        return batch is not None

    def _launch(self, flight: Flight, now_ns: int) -> None:
        if self.executor.is_fenced:
            flight.is_held = True
            return
        batch = flight.batch
        step = self.executor.forward(batch, now_ns)
        # requests that arrived while it was held have not been considered
        flight.run = DecodeRun(step.ends, 1 if flight.is_held else batch.num_steps, now_ns)
        self._runs.append(flight.run)
        for extend in batch.extends:
            if extend.req.first_token_ns is None:
                extend.req.fence_ns += now_ns - flight.planned_ns
                extend.req.load_back_ns += step.load_stall_ns
        flight.started_ns, flight.stall_ns = now_ns, step.load_stall_ns

    def _end_run(self, flight: Flight, run: DecodeRun) -> bool:
        # returns True if the rest of the batch goes on as planned
        self._commit(flight, run.take(run.num_priced))
        self._runs.remove(run)
        flight.run = None
        num_left = flight.batch.num_steps - run.num_priced
        if num_left and self._only_gained_room():
            flight.batch.num_steps, flight.is_held = num_left, False
            return True
        self._flights.remove(flight)
        return False

    def _only_gained_room(self) -> bool:
        # True if only finished copies cut the run: the rest of it can continue as planned, except
        # under write_back, where the next step may need the pages that they free
        scheduler = self.scheduler
        if self._arrived or self._aborted or scheduler.waiting or scheduler.started:
            return False
        if self.cache.tree.demotes or not self._delivered:
            return False
        return not any(isinstance(done, (Prefetch, Parcel, Outage)) for done in self._delivered)

    def _commit(
        self, flight: Flight, ended: Iterable[tuple[int, int, StorageWrite | None]]
    ) -> None:
        for num_steps, end_ns, write in ended:
            if num_steps:
                assert flight.run is not None
                note_tokens(flight.batch, flight.run.last_ends(num_steps))
                self._commit_steps(flight, num_steps, end_ns)
            if write is not None:  # it ended in the last of these steps
                self.cache.complete(write)

    def _commit_steps(self, flight: Flight, num_steps: int, now_ns: int) -> None:
        batch = flight.batch
        if self._listener is not None:
            self._listener.at(now_ns)
        self.num_steps += num_steps
        step_ns = now_ns - flight.started_ns
        flight.started_ns = now_ns
        counters = self.cache.counters
        counters["engine/busy_ns"] += step_ns
        if batch.extends:
            counters["engine/prefill_ns"] += step_ns
            num_tokens = sum(extend.end - extend.start for extend in batch.extends)
            self._share_out(flight, num_tokens + len(batch.decodes), step_ns)
            if self.prefetcher is not None:
                self.prefetcher.rates.was_computed(num_tokens, step_ns)
        self.scheduler.commit(batch, num_steps, now_ns)

    def _share_out(self, flight: Flight, num_tokens: int, step_ns: int) -> None:
        computing_ns = max(step_ns - flight.stall_ns, 0)
        for extend in flight.batch.extends:
            req = extend.req
            if req.first_token_ns is None:
                own_ns = computing_ns * (extend.end - extend.start) // num_tokens
                req.own_ns += own_ns
                req.shared_ns += computing_ns - own_ns

    def backlog_ns(self, now_ns: int) -> int:
        """Return the total time (ns), up to `now_ns`, in which some ready request was not running.

        A queued request is ready if it does not wait for a read from storage.
        """
        if self._backlog_since_ns is None:
            return self._backlog_ns
        return self._backlog_ns + max(now_ns - self._backlog_since_ns, 0)

    def take_in(self, now_ns: int) -> None:
        """Apply what has arrived and what has finished since the last call."""
        delivered, self._delivered = self._delivered, []
        for done in delivered:
            if not isinstance(done, Prefetch):
                self.complete(done, now_ns)
                continue
            assert self.prefetcher is not None
            if done.is_read:
                self.prefetcher.on_read(done)
            else:
                self.prefetcher.on_queried(done, now_ns)
        arrived, self._arrived = self._arrived, []
        for arrived_ns, request in arrived:
            self.scheduler.submit(request, now_ns, arrived_ns=arrived_ns)
        aborted, self._aborted = self._aborted, []
        is_held = self.is_held  # a batch that waits for a fence keeps its requests
        for request_id in aborted:
            if is_held or any(_computes(each.batch, request_id) for each in self._flights):
                self._aborted.append(request_id)  # when its batch has ended
            else:
                self.scheduler.abort(request_id, now_ns)

    def complete(self, done: Reported | News, now_ns: int) -> None:
        """Apply a copy that has ended; engines of one role also get news of others."""
        assert not isinstance(done, News)
        self.cache.complete(done)

    def hand_out(self, now_ns: int) -> None:
        """Pass new copies, queries and reads to the executor."""
        outbox, prefetcher = self.cache.outbox, self.prefetcher
        if outbox:
            for work in outbox:
                self.executor.submit(work, now_ns)
            outbox.clear()
        if prefetcher is None:
            return
        for prefetch in prefetcher.outbox:
            self.executor.query(prefetch, now_ns)
        prefetcher.outbox.clear()
        for prefetch in prefetcher.reads:
            self.executor.read(prefetch, now_ns)
        prefetcher.reads.clear()


def serve(
    engines: Sequence[Engine],
    feeder: Releases,
    *,
    clock: Clock,
    io: Io,
    route: Callable[[Request], int],
    observer: Observer,
    patience_ns: Mapping[int, int] | None = None,
    server_ns: int = 0,
) -> None:
    """Run the engines until all requests have ended and no copy is in flight.

    Events at the same time take effect in this order: finished copies, arriving requests, client
    timeouts, ends of steps.

    Args:
        engines: the engines that share the clock and the I/O.
        feeder: decides when each request is released.
        clock: the simulated or real time.
        io: the copies and storage operations of all engines.
        route: returns the index in `engines` of the engine that serves a request.
        observer: records the results.
        patience_ns: client timeouts in ns after arrival, by request id; None means no timeouts.
        server_ns: time in ns from the release of a request until it reaches its engine.

    Raises:
        RuntimeError: requests are left, but no event is pending.
    """
    clients = Clients(feeder, late_ns=server_ns, patience_ns=patience_ns)
    wakes = [engine.next_wake_ns(clock.now()) for engine in engines]
    # (time, engine) of each wake that is not NEVER; may hold others, which later ones have replaced
    agenda = sorted((wake, number) for number, wake in enumerate(wakes) if wake < NEVER)
    look = observer.next_look_ns()
    while True:
        while agenda and wakes[agenda[0][1]] != agenda[0][0]:
            heappop(agenda)
        soonest, first = agenda[0] if agenda else (NEVER, 0)
        outside = clients.next_ns
        # no min(): this loop made half of all calls of min() in a replay
        until = outside if outside < look else look
        event = io.pass_by(soonest if soonest < until else until, clock)
        others = event if event < outside else outside
        if soonest <= others:
            if soonest == NEVER:
                observer.at(clock.now())
                break
            if engines[first].look_on(others):
                _set_wake(wakes, agenda, first, engines[first].next_wake_ns(soonest))
                continue
        clock.wait_until(soonest if soonest < others else others)
        now = clock.now()
        if look <= now:
            observer.at(now)
            look = observer.next_look_ns()
        touched: list[int] = []
        while agenda and agenda[0][0] <= now:
            wake, number = heappop(agenda)
            if wakes[number] == wake:
                touched.append(number)
                wakes[number] = NEVER
        if event <= now:
            for number, done in io.advance(now):
                if engines[number].deliver(done, now):
                    touched.append(number)
        if outside <= now:
            touched += _hand_in(now, clients, engines, route)
        for number in sorted(set(touched)) if len(touched) > 1 else touched:
            engine = engines[number]
            outcome = engine.wake(now)
            if outcome is not NOTHING:
                _settle(outcome, number, now, clients, observer)
            _set_wake(wakes, agenda, number, engine.next_wake_ns(now))
    _refuse_stuck(engines)


def _set_wake(wakes: list[int], agenda: list[tuple[int, int]], number: int, wake_ns: int) -> None:
    if wake_ns != wakes[number]:
        wakes[number] = wake_ns
        if wake_ns < NEVER:
            heappush(agenda, (wake_ns, number))


def note_tokens(batch: Batch, ends_ns: list[int]) -> None:
    """Note when the requests of a batch got tokens, whose steps ended at `ends_ns`."""
    shared: TokenRun | None = None  # most requests got their last token before at the same time
    for req in batch.decodes:
        runs = req.token_runs
        last_ns = runs[-1][-1]
        if req.gains:  # steps of several tokens
            runs.append(TokenRun((last_ns, *chain.from_iterable(map(repeat, ends_ns, req.gains)))))
        else:
            if shared is None or shared[0] != last_ns:
                shared = TokenRun((last_ns, *ends_ns))
            runs.append(shared)
    for extend in batch.extends:
        req = extend.req
        if extend.end == req.target_len:
            before = req.token_runs[-1][-1:] if req.token_runs else []
            req.token_runs.append(TokenRun((*before, *ends_ns)))


def _computes(batch: Batch, request_id: int) -> bool:
    reqs = [*batch.decodes, *(extend.req for extend in batch.extends)]
    return any(req.request.id == request_id for req in reqs)


def _refuse_stuck(engines: Sequence[Engine]) -> None:
    stuck = [engine for engine in engines if not engine.is_idle]
    if stuck:
        raise RuntimeError(
            f"{len(stuck)} engine(s) are stuck: {len(stuck[0].scheduler.waiting)} requests wait "
            f"and {len(stuck[0].scheduler.running)} run, but no event is pending"
        )


def _hand_in(
    now_ns: int, clients: Clients, engines: Sequence[Engine], route: Callable[[Request], int]
) -> list[int]:
    touched: list[int] = []
    for released_ns, request in clients.arrivals(now_ns):
        for engine in engines if engines[0].is_explained else ():
            engine.catch_up(now_ns)  # an explanation may read any engine's state
        number = route(request)
        engines[number].submit(request, now_ns, came_ns=released_ns)
        clients.wait(request.id, number, released_ns)
        touched.append(number)
    for number, request_id in clients.give_up(now_ns):
        engines[number].abort(request_id, now_ns)
        touched.append(number)
    return touched


def _settle(
    outcome: Outcome, engine: int, now_ns: int, clients: Clients, observer: Observer
) -> None:
    for req in outcome.finished:
        observer.finished(req, engine, now_ns)
        clients.answered(req.request.id, now_ns)
    for req, reason in outcome.rejected:
        followers = clients.dropped(req.request.id, now_ns)
        observer.rejected(req, reason, followers, engine, now_ns)
    for req in outcome.aborted:
        observer.aborted(req, clients.dropped(req.request.id, now_ns), engine, now_ns)
