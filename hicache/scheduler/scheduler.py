"""The scheduler of one engine: which requests run next, and the results of their step.

`plan` scans the queue and returns a batch; `commit` applies its result. The scheduler does not
change between the two, so the executor may cut a run of decode steps short.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from operator import attrgetter

from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import Acquired, PrefixCache
from hicache.cache.tree.events import Purpose
from hicache.cache.tree.lookup import look
from hicache.cache.tree.node import MatchResult
from hicache.clock import NEVER
from hicache.config import Batching, Refresh, SchedulerConfig
from hicache.request import Request
from hicache.scheduler.admission import (
    Admission,
    StepBudget,
    WindowCharge,
    are_free,
    steps_with_pages,
)
from hicache.scheduler.batch import NOTHING, Batch, Extend, Outcome
from hicache.scheduler.checkpoints import CheckpointSaver, Placement
from hicache.scheduler.decision import Admit, Decision, Defer, Reason, Reject
from hicache.scheduler.events import Listener
from hicache.scheduler.queue_waits import NO_CHUNK, NO_STEP, Cause, QueueWaits, Shortage
from hicache.scheduler.request_state import RequestState

MAX_RESTARTS = 3  # restarts of a prompt that runs out of pages while alone in the engine
_PLACE = attrgetter("place")
MAX_JUMP = 256  # decode steps planned at once; the executor prices only those before the next event


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """Decisions of a policy about requests.

    Attributes:
        sort_key: (req, match): the rank of a waiting request, the smallest first. The scheduler
            asks once, when the request is queued; `match` is its cached prefix at that time.
            Example: `return req.target_len - match.usable_len`.
        window_charge: how much of a window pool a request takes when it is admitted.
        placement: where a prompt's states and windows are kept.
    """

    sort_key: Callable[[RequestState, MatchResult], float]
    window_charge: WindowCharge
    placement: Placement


class Scheduler:
    """Decides which requests of one engine run in the next step.

    Each request is either waiting, partial (a part of its prompt is computed) or running
    (decoding).
    """

    _late_slots = False  # whether a request gets its state slots after it is admitted
    _leaves_at_plan = False  # windows are freed when the next step is planned

    def __init__(
        self,
        cache: PrefixCache,
        prefetcher: Prefetcher | None,
        config: SchedulerConfig,
        policy: SchedulerPolicy,
        *,
        max_len: int,
        may_jump: bool,
        takes_decode_pages_first: bool = False,
        listener: Listener | None = None,
    ) -> None:
        """Create the scheduler of one engine.

        Args:
            cache: the KV cache that provides the pages.
            prefetcher: reads pages from storage ahead of time; None means that there is no storage.
            config: the settings of the scheduler.
            policy: the order of waiting requests, the charges for windows, and what is kept.
            max_len: maximum tokens of prompt and answer together.
            may_jump: whether several decode steps may be planned at once.
            takes_decode_pages_first: whether a decode step takes its pages before it starts, as
                real memory requires; otherwise it takes them when it ends.
            listener: receives the events of requests; None means no listener.
        """
        self.cache = cache
        self.prefetcher = prefetcher
        self.config = config
        self.counters: Counter[str] = cache.counters
        self.waiting: list[RequestState] = []  # by `place`
        self.partial: RequestState | None = None
        self.stalled: list[RequestState] = []  # other partial requests, which found no pages
        self.running: list[RequestState] = []
        self.loading: list[RequestState] = []  # they compute when their load-back is done
        # answers that are complete, while the requests hold their memory for one more plan
        self.ending: list[RequestState] = []
        # ids of the running requests that decode, while the others keep their pages; None means
        # all. A program that steps the engine by hand sets it
        self.only: Container[int] | None = None
        self._max_len = max_len
        self._page = cache.page_size
        self._checkpoints = CheckpointSaver(cache, policy.placement, takes_spare=self._late_slots)
        self._max_jump = MAX_JUMP if may_jump else 1
        self._has_states = bool(cache.tree.kinds.points)
        keeps_states = self._has_states and not cache.knobs.keeps_for_repeats
        self._answer_pages = None if keeps_states else cache.knobs.answer_pages
        self._takes_decode_pages_first = takes_decode_pages_first
        self._listener = listener
        self.queue_waits = QueueWaits()
        self._num_submitted = 0
        self.ended = Outcome()  # requests that ended since the last `take_ended`
        self._admission = self._admission_of(policy.window_charge)
        self._sort_key = policy.sort_key
        self._defer: Defer | None = None  # the decision that ended this step's scan

    # -- coming and going ----------------------------------------------------------------------

    def submit(
        self, request: Request, now_ns: int, *, arrived_ns: int | None = None
    ) -> RequestState:
        """Queue a request and start its prefetch from storage, or reject it if it can never run.

        `arrived_ns` is the arrival time in ns. It is before `now_ns` if the request came during a
        step and was held until the step ended. None means that the request arrives at `now_ns`.
        """
        self._num_submitted += 1
        tokens = self.cache.tree.names.tokens(request)
        came_ns = now_ns if arrived_ns is None else arrived_ns
        req = RequestState(request, tokens, self._num_submitted, came_ns)
        reason = self._never_fits(request)
        if reason is not None:
            self._reject(req, reason)
            return req
        if self.prefetcher is None:
            match = look(self.cache.tree, tokens, req.target_len - 1, request.namespace)
            self._note(req, match)
        else:  # the prefetch needs the node after which it inserts pages
            match = self._match(req, refreshes=self.config.refresh is Refresh.arrived)
            prefetch = self.prefetcher.prefetch_from_storage(
                request.id, req.sequence, match, req.target_len, now_ns
            )
            req.prefetch, req.declined = prefetch, self.prefetcher.declined
            if prefetch is not None:
                start = prefetch.start_page * self._page
                req.prefetched = (start, start + prefetch.num_pages * self._page)
        req.place = (self._sort_key(req, match), req.number)
        req.looked_ns = now_ns
        req.queue_ns[Cause.step] = now_ns - came_ns
        req.queue_mark = self.queue_waits.mark(now_ns)
        self._queue(req)
        return req

    def abort(self, request_id: int, now_ns: int) -> RequestState | None:
        """Remove a request, whether it waits or runs, free its memory and return its state.

        The cache keeps the chunks of the prompt that were published. If the request was decoding,
        the cache keeps its answer so far, as if the answer had ended there. The result is None if
        there is no such request. The method must not be called during a step that computes the
        request.
        """
        req = self._take_out(request_id)
        if req is None:
            return None
        self._end_wait(req, now_ns)
        req.end_queue(self.queue_waits.mark(now_ns))
        if self.prefetcher is not None:
            self.prefetcher.abort(request_id)
        if req.kv_len >= req.target_len:
            self._keep(req)
        else:
            self.cache.abandon(req.sequence)  # a waiting request holds nothing
        if self._listener is not None:
            self._listener.canceled(req)
        self._report_end(req, "aborted")
        self.ended.aborted.append(req)
        return req

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.decoding or self.started)

    @property
    def started(self) -> list[RequestState]:
        """The requests that hold memory and do not decode."""
        return [*self._partials, *self.loading, *self.ending]

    @property
    def _partials(self) -> list[RequestState]:
        return [*self.stalled, *filter(None, [self.partial])]

    @property
    def decoding(self) -> list[RequestState]:
        if self.only is None:
            return self.running
        return [req for req in self.running if req.request.id in self.only]

    def next_deadline_ns(self, now_ns: int) -> int:
        if self.prefetcher is None or not self.waiting:
            return NEVER
        return self.prefetcher.next_deadline_ns(now_ns)

    @property
    def has_backlog(self) -> bool:
        for req in self.waiting:  # noqa: SIM110
            if req.blocked_since_ns is None:
                return True
        return False

    def take_ended(self) -> Outcome:
        ended = self.ended
        if not (ended.finished or ended.rejected or ended.aborted):
            return NOTHING
        self.ended = Outcome()
        return ended

    # -- planning ------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> Batch | None:
        """Return the next batch, or None if no request can run now."""
        batch, has_freed = self.plan_once(now_ns)
        return self.plan(now_ns) if has_freed else batch

    def plan_once(self, now_ns: int) -> tuple[Batch | None, bool]:
        """Return the next batch, and whether planning it has freed memory.

        If there is no batch and memory was freed, another request may start at once.
        """
        batch, self._defer, ending = Batch(), None, self.ending
        was_running, was_partial = bool(self.running), bool(self._partials)
        self._end_waits(now_ns)
        self.queue_waits.turn(now_ns, self._compose(batch, now_ns))
        self.ending = []
        for req in ending:
            self.finish(req)
        if batch.extends or batch.decodes:
            return batch, False
        # what gave its pages back may start again, unless copies will free more
        has_freed = was_partial and not (self._partials or self._may_get_room)
        return None, bool(ending or has_freed or (was_running and not self.running))

    def commit(self, batch: Batch, num_steps: int, now_ns: int) -> None:
        if batch.decodes:
            self._commit_decodes(batch.decodes, num_steps)
        for extend in batch.extends:
            self._commit_extend(extend, now_ns)

    def _end_waits(self, now_ns: int) -> None:
        if self.prefetcher is not None:
            self.prefetcher.rates.num_waiting = len(self.waiting)
            for req in self.waiting:  # also those that the scan will not reach
                is_waiting = req.blocked_since_ns is not None
                if is_waiting and not self.prefetcher.is_blocking(req.request.id, now_ns):
                    self._end_wait(req, now_ns)

    # -- admission -----------------------------------------------------------------------------

    def _admission_of(self, window_charge: WindowCharge) -> Admission:
        return Admission(self.cache, self.config, window_charge)

    def _num_active(self, batch: Batch) -> int:
        return len(self.running) + len(self.stalled) + len(self.ending) + len(batch.extends)

    def _compose(self, batch: Batch, now_ns: int) -> Shortage:
        # fills the batch; returns what the requests that still wait lack
        lacks = NO_STEP  # applies to requests that arrive during the step
        if self.partial is not None or self.waiting:
            budget = StepBudget(
                chunk_tokens=self.config.chunk_tokens,
                reserved_tokens=self._admission.reserved_tokens(self.running, self.partial),
            )
            if self.partial is not None:
                self._continue_partial(self.partial, batch, budget)
            lacks = self._scan(batch, budget, now_ns)
        if not batch.extends or self.config.batching is Batching.mixed:
            self._plan_decodes(batch)
        return lacks

    def _scan(self, batch: Batch, budget: StepBudget, now_ns: int) -> Shortage:
        # considers the waiting requests in order until one of them does not fit; returns what the
        # rest lack, except those that wait for storage
        num_blocked = 0
        for req in list(self.waiting):
            if self.partial is not None and not batch.extends:
                # it found no pages for its next chunk
                return Shortage(Cause.tokens, self.partial.request.id)
            if budget.chunk_tokens <= 0 or self.partial is not None:
                return NO_CHUNK
            if self._num_active(batch) >= self.config.max_running:
                decision: Decision = Defer(Reason.running, stands=True)
            elif self._prefetch_lets_go(req, now_ns):
                decision = self._decide(req, batch, budget, now_ns)
            else:
                num_blocked += 1
                if num_blocked >= self.config.scan_limit:
                    return Shortage(Cause.scan_limit)
                continue
            match decision:
                case Admit():
                    self.waiting.remove(req)
                case Reject(why):
                    self._count_deferral(req, Reason.never)
                    self.waiting.remove(req)
                    self._reject(req, why)
                case Defer(reason):
                    self._count_deferral(req, reason)
                    self._defer = decision
                    return Shortage(Cause(reason), req.request.id)
        return NO_STEP

    def _prefetch_lets_go(self, req: RequestState, now_ns: int) -> bool:
        if self.prefetcher is None or self.prefetcher.check(req.request.id, now_ns):
            self._end_wait(req, now_ns)
            return True
        if req.blocked_since_ns is None:
            req.end_queue(self.queue_waits.mark(now_ns))
            req.blocked_since_ns = now_ns
        return False

    def _end_wait(self, req: RequestState, now_ns: int) -> None:
        if req.blocked_since_ns is not None:
            req.storage_wait_ns += now_ns - req.blocked_since_ns
            req.storage_waits.append((req.blocked_since_ns, now_ns))
            req.blocked_since_ns = None
            req.queue_mark = self.queue_waits.mark(now_ns)

    def _decide(self, req: RequestState, batch: Batch, budget: StepBudget, now_ns: int) -> Decision:
        match = self._match(req, refreshes=self.config.refresh is not Refresh.admitted)
        decision = self._begin(req, match, batch, budget, now_ns)
        if isinstance(decision, Admit) or not self._is_final(batch):
            return decision
        # a hit needs room too: its window is locked, and loaded-back data is charged
        for lesser in (match.without_host(), match.without_hit()):
            again = self._begin(req, lesser, batch, budget, now_ns)
            if isinstance(again, Admit):
                self.counters["scheduler/hit_given_up_count"] += 1
                return again
        if self.prefetcher is not None:
            self.prefetcher.forget(req.request.id)
        wanted = "pages" if decision.reason is Reason.prefill_oom else decision.reason
        return Reject(f"needs more {wanted} than the pools have")

    def _begin(
        self, req: RequestState, match: MatchResult, batch: Batch, budget: StepBudget, now_ns: int
    ) -> Admit | Defer:
        taken = self._enter(req, match, budget)
        if isinstance(taken, Defer):
            return taken
        acquired, decision = taken
        chunk_end = self._chunk_end(req, decision.chunk_tokens)
        if not self.cache.extend(req.sequence, chunk_end):
            self._prefill_out_of_memory(req)
            return Defer(Reason.prefill_oom)
        self._account(req, acquired, now_ns)
        self._admission.reserve(req, chunk_end, budget)
        self._add_extend(req, chunk_end, batch, budget)
        return decision

    def _enter(
        self, req: RequestState, match: MatchResult, budget: StepBudget
    ) -> tuple[Acquired, Admit] | Defer:
        taken = self._acquire(req, match, budget)
        if isinstance(taken, Defer):
            return taken
        acquired, _ = taken
        req.cached_len = req.kv_len = acquired.cached_len
        req.ready_len = min(match.device_prefix_len, acquired.cached_len)
        if req.failed_prompts:  # data that a branch point locks is missing for the prompt
            match = match._replace(full_len=match.usable_len)
        elif self.cache.knobs.storage_branches and req.prefetch is not None:
            stored_len = req.prefetch.leading_end * self._page
            full_len = max(match.full_len, stored_len)
            match = match._replace(full_len=full_len, branch_end=full_len)
        self._checkpoints.place(req, match)
        req.load_back = acquired.load_back
        return taken

    def _acquire(
        self, req: RequestState, match: MatchResult, budget: StepBudget
    ) -> tuple[Acquired, Admit] | Defer:
        cache, decide = self.cache, self._admission.decide
        decision = decide(req, match, budget)
        if isinstance(decision, Defer) and not self._late_slots:
            return decision
        # its own path no longer counts as evictable; in SGLang only what the device holds of it
        locks = [cache.tree.lock(match.device_node if self._late_slots else match.best_node)]
        try:
            decision = decide(req, match, budget)
            if isinstance(decision, Defer):
                return replace(decision, is_second=True)
            locks.append(cache.tree.lock(match.best_node))
            start, end = req.prefetched
            if self._listener is not None:
                self._listener.starting(req, match)
            acquired = cache.acquire(
                req.sequence,
                match,
                prompt_len=req.target_len,
                storage_start=start,
                storage_end=end,
                late_slots=self._late_slots,
            )
        finally:
            for lock in locks:
                cache.tree.release(lock)
        if acquired is None:
            return Defer(Reason.slots)
        if self.config.refresh is Refresh.admitted and req.sequence.lock is not None:
            cache.tree.touch(req.sequence.lock.node)
        if acquired.load_back is None and match.needs_host_load_back:
            # more tokens must be computed than the decision allowed for
            decision = decide(req, match.without_host(), budget)
            if isinstance(decision, Defer):
                cache.abandon(req.sequence)
                return Defer(decision.reason)
        return acquired, decision

    def _match(self, req: RequestState, *, refreshes: bool) -> MatchResult:
        match = self.cache.match(req.sequence, req.target_len, refreshes=refreshes)
        self._note(req, match)
        return match

    def _note(self, req: RequestState, match: MatchResult) -> None:
        if self._listener is not None:
            self._listener.matched(req, match)

    def _reject(self, req: RequestState, reason: str) -> None:
        if self._listener is not None:
            self._listener.canceled(req)
        self._report_end(req, "rejected")
        self.ended.rejected.append((req, reason))

    def _report_end(self, req: RequestState, outcome: str) -> None:
        if self.cache.tree.entries is not None:
            self.cache.tree.entries.finished(req.request, outcome)

    def _is_final(self, batch: Batch) -> bool:
        # waiting cannot help if nothing else runs and no transfer or read is in flight
        if batch.extends or self.running or self.started:
            return False
        return not self._may_get_room

    @property
    def _may_get_room(self) -> bool:
        if self.cache.in_flight:
            return True
        if self.prefetcher is None:
            return False
        reads = self.prefetcher.active.values()
        return bool(self.prefetcher.lingering) or not all(each.is_settled for each in reads)

    def _prefill_out_of_memory(self, req: RequestState) -> None:
        # admission had promised pages that are missing (report 004); start over later
        self.counters["scheduler/prefill_oom_count"] += 1
        self.cache.abandon(req.sequence)
        prefetched = req.prefetched
        req.restart()
        req.prefetched = prefetched

    def _count_deferral(self, req: RequestState, reason: Reason) -> None:
        if req.defer_reason is not reason:
            req.defer_reason = reason
            self.counters["scheduler/deferred_count"] += 1
            self.counters[f"scheduler/deferred_{reason}_count"] += 1

    def _account(self, req: RequestState, acquired: Acquired, now_ns: int) -> None:
        if self.prefetcher is not None:
            self.prefetcher.forget(req.request.id)
        computed = req.target_len - req.cached_len
        req.defer_reason = None
        if self._listener is not None:
            self._listener.admitted(req)
        if req.admitted_ns is not None:
            req.recomputed_len += computed
            self.counters["cache/recomputed_tokens"] += computed
            return
        req.admitted_ns = now_ns
        req.end_queue(self.queue_waits.mark(now_ns))
        req.device_len = acquired.device_len
        req.host_len = acquired.host_len
        req.storage_len = acquired.storage_len
        req.computed_len = computed
        self.counters["cache/device_hit_tokens"] += req.device_len
        self.counters["cache/host_hit_tokens"] += req.host_len
        self.counters["cache/storage_hit_tokens"] += req.storage_len
        self.counters["cache/computed_tokens"] += computed

    def _never_fits(self, request: Request) -> str | None:
        length = request.prompt_len + request.output_len
        if length > self._max_len:
            return (
                f"prompt and answer have {length} tokens, more than model.max_len={self._max_len}"
            )
        capacity = self.cache.device_pages
        wanted = -(-length // self._page) + 1
        if capacity is not None and wanted > capacity:
            return f"needs {wanted} pages, and the device pool has {capacity}"
        return None

    def _queue(self, req: RequestState) -> None:
        insort(self.waiting, req, key=_PLACE)

    def _take_out(self, request_id: int) -> RequestState | None:
        for reqs in (self.waiting, self.running, self.loading, self.stalled):
            for req in reqs:
                if req.request.id == request_id:
                    reqs.remove(req)
                    return req
        half_way = self.partial
        if half_way is not None and half_way.request.id == request_id:
            self.partial = None
            return half_way
        return None

    # -- extending -----------------------------------------------------------------------------

    def _chunk_end(self, req: RequestState, chunk_tokens: int) -> int:
        if req.extend_len <= chunk_tokens:
            return req.target_len
        # a cut chunk ends at a page boundary
        end = (req.kv_len + chunk_tokens) // self._page * self._page
        return max(end, req.kv_len + min(self._page, req.extend_len))

    def _continue_partial(self, req: RequestState, batch: Batch, budget: StepBudget) -> None:
        chunk = budget.chunk_tokens
        for kind in self.cache.tree.kinds.window_lens:
            room = self.cache.growth_pages(kind, self.cache.room(kind))
            chunk = min(chunk, (room - 1) * self._page)
        chunk_end = self._chunk_end(req, max(chunk, self._page))
        if not self.cache.extend(req.sequence, chunk_end):
            if self.running or self._may_get_room:
                return
            self._prefill_out_of_memory(req)
            self.partial = None
            req.failed_prompts += 1
            if req.failed_prompts > MAX_RESTARTS:
                self._reject(req, "needs more pages than the pools can give")
            else:
                self._queue(req)
            return
        self.partial = None
        self._add_extend(req, chunk_end, batch, budget)

    def _add_extend(
        self, req: RequestState, chunk_end: int, batch: Batch, budget: StepBudget
    ) -> None:
        if req.load_back is not None:
            batch.load_backs.append(req.load_back)
            req.load_back = None
        batch.extends.append(self._checkpoints.chunk(req, chunk_end))
        budget.chunk_tokens -= chunk_end - req.kv_len
        if chunk_end < req.target_len:
            self.partial = req

    def _commit_extend(self, extend: Extend, now_ns: int) -> None:
        req = extend.req
        req.kv_len = extend.end
        self._store(extend)
        if extend.end < req.target_len:
            req.num_parts += 1
            return
        req.remaining_output -= 1
        if req.first_token_ns is None:
            req.first_token_ns = now_ns
        if not req.remaining_output:
            self._end(req)
            return
        has_next = self.cache.quirks.states_per_request > 1
        if self._has_states and has_next and req.sequence.boundary_slot is None:
            req.sequence.boundary_slot = self.cache.take_state_slot(req.sequence)
        self.running.append(req)

    def _store(self, extend: Extend) -> None:
        # puts the states and pages of a computed chunk in the tree
        req, cache = extend.req, self.cache
        self._publish(extend)
        is_part, trims = extend.end < req.target_len, cache.quirks.trims_windows
        if self._leaves_at_plan:
            return
        # with states, SGLang frees the window pages before the last state alone
        if (is_part or trims or cache.tree.kinds.replayed) and not (trims and self._has_states):
            cache.leave_window(req.sequence, extend.end)

    def _publish(self, extend: Extend) -> None:
        sequence, cache = extend.req.sequence, self.cache
        for length, slot in extend.saves:
            sequence.states[length // self._page] = slot
        for length, keeps_window in extend.published:  # one at a time, to back up each window
            if cache.quirks.trims_windows:
                cache.leave_window(sequence, length)
            is_answer = length > extend.req.request.prompt_len
            end = length // self._page
            cache.publish(sequence, end, is_answer=is_answer, keeps_window=keeps_window)

    # -- decoding ------------------------------------------------------------------------------

    def _plan_decodes(self, batch: Batch) -> None:
        running, tree = self.decoding, self.cache.tree
        if not running:
            return
        wanted = 1 if batch.extends else self._steps_unwatched(running)
        while True:
            steps = steps_with_pages(self.cache, running, wanted)
            # under write_back a page that looks evictable may be locked through its descendants:
            # allocate it before the step is planned (several steps use free pages only)
            is_unsure = tree.demotes and not are_free(self.cache, tree.kinds.paged, running, 1)
            takes_first = self._takes_decode_pages_first or is_unsure
            if steps and (not takes_first or self._take_decode_pages(running, steps)):
                break
            if not self._retract_one(batch):
                return
            running = self.decoding
            if not running:
                return
            wanted = 1  # the retracted request has not been considered yet
        batch.decodes = list(running)
        batch.num_steps = steps

    def _steps_unwatched(self, running: list[RequestState]) -> int:
        if self.partial is not None or self.ending:  # the next plan may find room
            return 1
        wanted = min([req.remaining_output for req in running])
        wanted = min(wanted, self._max_jump)
        if self._answer_pages:
            wanted = max(min(wanted, *map(self._steps_to_publish, running)), 1)
        if self._defer is None:  # all considered requests wait for storage
            return wanted
        return self._admission.steps_deferred(self._defer, running, wanted)

    def _retract_one(self, batch: Batch) -> bool:
        # sends the running request with the least computed answer back to the queue; returns False
        # if nothing can decode now: the last request must wait, or was sent back as well. The last
        # request restarts where its answer ends, with a lock on that window alone, and has gained
        # at least one token; so the retractions end
        if len(self.running) == 1:
            if batch.extends or self.cache.in_flight:
                return False
            if self.partial is not None:  # the two wait for each other's pages
                self._prefill_out_of_memory(self.partial)
                self._queue(self.partial)
                self.partial = None
                return True
        req = min(self.running, key=lambda each: (each.decoded, -each.request.prompt_len))
        self.running.remove(req)
        self.cache.abandon(req.sequence)
        req.restart()
        self._queue(req)
        self.counters["scheduler/retracted_count"] += 1
        if not self.running:
            return False
        self._admission.new_token_ratio.retracted(self.running)
        return True

    def _commit_decodes(self, reqs: list[RequestState], num_steps: int) -> None:
        self._admission.new_token_ratio.decoded(num_steps)
        cache, page = self.cache, self._page
        has_windows = bool(cache.tree.kinds.window_lens) and not self._leaves_at_plan
        answer_pages, finished = self._answer_pages, []
        for req in reqs:
            sequence = req.sequence
            req.kv_len = length = req.kv_len + num_steps
            req.remaining_output = num_left = req.remaining_output - num_steps
            last = (length - 1) // page
            slides = has_windows and last > sequence.left_page
            if slides:  # first, so that its pages can be taken
                cache.leave_window(sequence, last * page + 1)
            if length > sequence.num_pages * page:
                has_room = cache.extend(sequence, length, Purpose.decode)
                assert has_room, "a decode step was planned without free pages for it"
            if slides and num_steps > 1:  # also the pages that these steps have passed
                cache.leave_window(sequence, last * page + 1)
            if not num_left:
                finished.append(req)
            if answer_pages and self._steps_to_publish(req) <= 0:
                self._publish_answer(req, self._known_len(req))
        for req in finished:
            self.running.remove(req)
            self._end(req)

    def _publish_answer(self, req: RequestState, length: int) -> None:
        keeps = not self.cache.knobs.keeps_for_repeats  # else no window of an answer
        end = length // self._page
        self.cache.publish(req.sequence, end, is_answer=True, keeps_window=keeps)

    def _steps_to_publish(self, req: RequestState) -> int:
        # decode steps until the complete answer pages reach the number to insert at once
        assert self._answer_pages is not None
        return (req.sequence.tree_pages + self._answer_pages) * self._page - self._known_len(req)

    def _known_len(self, req: RequestState) -> int:
        # tokens of a request that decodes which may enter the tree
        return req.kv_len

    def _take_decode_pages(self, running: list[RequestState], num_steps: int) -> bool:
        return all(
            self.cache.extend(req.sequence, req.kv_len + num_steps, Purpose.decode)
            for req in running
        )

    def _end(self, req: RequestState) -> None:
        (self.ending.append if self.config.asynchronous else self.finish)(req)

    def finish(self, req: RequestState) -> None:
        """Publish the answer of a request that no longer runs, and free the rest of its memory."""
        self._report_end(req, "finished")
        self.ended.finished.append(req)
        self._keep(req)

    def _keep(self, req: RequestState) -> None:
        num_pages, sequence = req.kv_len // self._page, req.sequence
        if self._has_states:
            while num_pages in req.missed:
                num_pages -= 1
            if num_pages == req.target_len // self._page:
                self.cache.abandon(sequence)  # there is no state at a page boundary of the answer
                return
            if sequence.boundary_slot is not None and not self.cache.knobs.keeps_for_repeats:
                sequence.states[num_pages] = sequence.boundary_slot
                sequence.boundary_slot = None
        self.cache.finish(sequence, num_pages, is_answer=req.decoded > 1)
