"""The prefill half of a scheduler: the queue, prefetches from storage, admission and chunks."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import HIT_TIERS, Acquired, PrefixCache
from hicache.cache.tree.lookup import look
from hicache.cache.tree.node import Lock, MatchResult
from hicache.clock import NEVER
from hicache.config import SchedulerConfig
from hicache.request import Request
from hicache.rules import Refresh
from hicache.scheduler.admission import Admission, StepBudget, WindowCharge
from hicache.scheduler.batch import Batch, Ended, Extend
from hicache.scheduler.checkpoints import CheckpointSaver, Placement
from hicache.scheduler.decision import Admit, Decision, Defer, Reason, Reject
from hicache.scheduler.events import Listener
from hicache.scheduler.queue_waits import NO_CHUNK, NO_STEP, Cause, QueueWaits, Shortage
from hicache.scheduler.request_state import RequestState

MAX_RESTARTS = 3  # restarts of a prompt that runs out of pages while alone in the engine
_PLACE = attrgetter("place")


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """Decisions of a policy about requests.

    Attributes:
        sort_key: (req, match): the rank of a waiting request, the smallest first. The scheduler
            asks once, when the request is queued; `match` is its cached prefix at that time.
            Example: `return req.target_len - match.usable_len`.
        window_charge: how much of a window pool a request takes when it is admitted.
        placement: where a prompt's states and windows are kept.
        starts: (request): whether a waiting request may start now; False lets those behind it pass.
            The engine that computes prompts asks at each plan of a step, as long as something else
            runs or is copied; otherwise the request may start. None means always True.
    """

    sort_key: Callable[[RequestState, MatchResult], float]
    window_charge: WindowCharge
    placement: Placement
    starts: Callable[[Request], bool] | None = None


class Prefill:
    """Decides which prompts of one engine are computed in the next step.

    Each request is either waiting, partial (a part of its prompt is computed), or loading (its
    cached prefix is copied to the device). A request whose prompt is computed leaves this object.

    Args:
        cache: the KV cache that provides the pages.
        prefetcher: reads pages from storage ahead of time; None means that there is no storage.
        config: the settings of the scheduler.
        policy: the order of waiting requests, the charges for windows, and what is kept.
        ended: receives the requests that can never run.
        max_len: maximum tokens of prompt and answer together.
        listener: receives the events of requests; None means no listener.
    """

    late_slots = False  # whether a request gets its state slots after it is admitted
    # whether windows are freed when the next step is planned, with `compat.rules.trims_leaves`
    may_leave_at_plan = False

    def __init__(
        self,
        cache: PrefixCache,
        prefetcher: Prefetcher | None,
        config: SchedulerConfig,
        policy: SchedulerPolicy,
        ended: Ended,
        *,
        max_len: int,
        listener: Listener | None = None,
    ) -> None:
        self.cache = cache
        self.prefetcher = prefetcher
        self.config = config
        self.counters: Counter[str] = cache.counters
        self.waiting: list[RequestState] = []  # by `place`
        self._blocked: dict[RequestState, None] = {}  # of these, those that wait for storage
        self.partial: RequestState | None = None
        self.stalled: list[RequestState] = []  # other partial requests, which found no pages
        self.loading: list[RequestState] = []  # they compute when their load-back is done
        self.is_computing = False  # a chunk of `partial` is in flight
        self.defer: Defer | None = None  # the decision that ended this step's scan
        self.queue_waits = QueueWaits()
        self.admission = self._admission_of(policy.window_charge)
        self._ended = ended
        self._max_len = max_len
        self._page = cache.page_size
        kinds = cache.tree.kinds
        self._has_states = bool(kinds.points)
        trims = bool(kinds.windows) and cache.windows is not None
        self._leaves_at_plan = trims and self.may_leave_at_plan
        self._checkpoints = CheckpointSaver(cache, policy.placement, takes_spare=self.late_slots)
        self._sort_key, self._starts = policy.sort_key, policy.starts
        self._held = NO_STEP  # what the requests lack that the policy held back in this step
        self._listener = listener
        self._num_submitted = 0
        self._scan_limit: float = cache.rules.scan_limit

    def _admission_of(self, window_charge: WindowCharge) -> Admission:
        return Admission(self.cache, self.config, window_charge)

    # -- the queue -----------------------------------------------------------------------------

    def submit(self, request: Request, now_ns: int, came_ns: int) -> RequestState:
        """Queue a request and start its prefetch from storage, or reject it if it can never run.

        `came_ns` is the arrival time in ns. It is before `now_ns` if the request came during a
        step and was held until the step ended.
        """
        self._num_submitted += 1
        tokens = self.cache.tree.names.tokens(request)
        req = RequestState(request, tokens, self._num_submitted, came_ns)
        if self.cache.tree.entries is not None:
            self.cache.tree.entries.arrived(request)
        reason = self._never_fits(request)
        if reason is not None:
            self._ended.reject(req, reason)
            return req
        req.queue_ns[Cause.step] = now_ns - came_ns
        self.enter(req, now_ns)
        return req

    def enter(self, req: RequestState, now_ns: int) -> None:
        """Queue a request, and start its prefetch from storage."""
        request, end = req.request, self._end_of_hits(req)
        if self.prefetcher is None:
            match = look(self.cache.tree, req.tokens, end - 1, request.namespace)
            self._note(req, match)
        else:  # the prefetch needs the node after which it inserts pages
            match = self._match(req, refreshes=self.cache.rules.refresh is Refresh.arrived)
            prefetch = self.prefetcher.prefetch_from_storage(
                request.id, req.sequence, match, end, now_ns
            )
            req.prefetch, req.declined = prefetch, self.prefetcher.declined
            if prefetch is not None:
                start = prefetch.start_page * self._page
                req.prefetched = (start, start + prefetch.num_pages * self._page)
        req.place = (self._sort_key(req, match), req.number)
        req.looked_ns = now_ns
        req.queue_mark = self.queue_waits.mark(now_ns)
        self.queue(req)

    def queue(self, req: RequestState) -> None:
        insort(self.waiting, req, key=_PLACE)

    def take_out(self, request_id: int) -> RequestState | None:
        """Remove and return the request with this id; None if this object does not hold it."""
        for reqs in (self.waiting, self.loading, self.stalled):
            for req in reqs:
                if req.request.id == request_id:
                    reqs.remove(req)
                    return req
        half_way = self.partial
        if half_way is not None and half_way.request.id == request_id:
            self.partial = None
            return half_way
        return None

    def leave_queue(self, req: RequestState, now_ns: int) -> None:
        """End all waits of a request that is aborted, and its prefetch."""
        self._end_wait(req, now_ns)
        req.end_queue(self.queue_waits.mark(now_ns))
        if self.prefetcher is not None:
            self.prefetcher.abort(req.request.id)

    def next_deadline_ns(self, now_ns: int) -> int:
        if self.prefetcher is None or not self._blocked:
            return NEVER
        return self.prefetcher.next_deadline_ns([req.request.id for req in self._blocked], now_ns)

    @property
    def has_backlog(self) -> bool:
        return len(self.waiting) > len(self._blocked)

    @property
    def partials(self) -> list[RequestState]:
        return [*self.stalled, *filter(None, [self.partial])]

    @property
    def started(self) -> list[RequestState]:
        return [*self.partials, *self.loading]

    @property
    def may_get_room(self) -> bool:
        """Whether a copy or a read in flight may free memory."""
        if self.cache.in_flight:
            return True
        if self.prefetcher is None:
            return False
        reads = self.prefetcher.active.values()
        return bool(self.prefetcher.lingering) or not all(each.is_settled for each in reads)

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

    # -- planning ------------------------------------------------------------------------------

    def begin_step(self, now_ns: int) -> None:
        """Forget the last step's decision, and end waits for storage that are over."""
        self.defer, self._held = None, NO_STEP
        if self.prefetcher is not None:
            self.prefetcher.rates.num_waiting = len(self.waiting)
            for req in list(self._blocked):  # also those that the scan will not reach
                if not self.prefetcher.is_blocking(req.request.id, now_ns):
                    self._end_wait(req, now_ns)

    def plan(self, batch: Batch, budget: StepBudget, now_ns: int) -> Shortage:
        """Add chunks of prompts to the batch; return what the requests that still wait lack."""
        if self.is_computing:
            return NO_CHUNK
        if self.partial is not None:
            self._continue_partial(self.partial, batch, budget)
        return self.scan(batch, budget, now_ns)

    def steps_unchanged(self, running: Sequence[RequestState], wanted: int) -> int:
        """Return how many decode steps may pass before the queue is considered again.

        `running` are the requests that decode. The result lies between 1 and `wanted`.
        """
        if self.partial is not None:  # the next plan may find room
            return 1
        if self.defer is None:  # all considered requests wait for storage
            return wanted
        return self.admission.steps_deferred(self.defer, running, wanted)

    def scan(self, batch: Batch, budget: StepBudget, now_ns: int) -> Shortage:
        # considers the waiting requests in order until one of them does not fit; returns what the
        # rest lack, except those that wait for storage
        num_blocked = 0  # they stay in the queue, and the others leave it
        while num_blocked < len(self.waiting):
            req = self.waiting[num_blocked]
            if self.partial is not None and not batch.extends:
                # it found no pages for its next chunk
                return Shortage(Cause.tokens, self.partial.request.id)
            if budget.chunk_tokens <= 0 or self.partial is not None:
                return NO_CHUNK
            if self._num_active(batch, budget) >= self.config.max_running:
                decision: Decision = Defer(Reason.running, stands=True)
            elif self._may_start(req, batch, budget, now_ns):
                decision = self._decide(req, batch, budget, now_ns)
            else:
                num_blocked += 1
                if num_blocked >= self._scan_limit:
                    return Shortage(Cause.scan_limit)
                continue
            match decision:
                case Admit():
                    del self.waiting[num_blocked]
                case Reject(why):
                    self._drop(req, why)
                case Defer(reason):
                    self._count_deferral(req, reason)
                    self.defer = decision
                    return Shortage(Cause(reason), req.request.id)
        return self._held

    def _may_start(self, req: RequestState, batch: Batch, budget: StepBudget, now_ns: int) -> bool:
        may = self._starts is None or self._is_final(batch, budget) or self._starts(req.request)
        if not may:
            self._held = Shortage(Cause.tokens, req.request.id)
        return may and self._prefetch_lets_go(req, now_ns)

    def _num_active(self, batch: Batch, budget: StepBudget) -> int:
        return budget.num_running + budget.num_ending + len(self.stalled) + len(batch.extends)

    def _drop(self, req: RequestState, why: str) -> None:
        self._count_deferral(req, Reason.never)
        self.waiting.remove(req)
        self._ended.reject(req, why)

    def _prefetch_lets_go(self, req: RequestState, now_ns: int) -> bool:
        if self.prefetcher is None or self.prefetcher.check(req.request.id, now_ns):
            self._end_wait(req, now_ns)
            return True
        if req.blocked_since_ns is None:
            self._begin_wait(req, now_ns)
        return False

    def _begin_wait(self, req: RequestState, now_ns: int) -> None:
        req.end_queue(self.queue_waits.mark(now_ns))
        req.blocked_since_ns = now_ns
        self._blocked[req] = None

    def _end_wait(self, req: RequestState, now_ns: int) -> None:
        if req.blocked_since_ns is not None:
            req.storage_wait_ns += now_ns - req.blocked_since_ns
            req.storage_waits.append((req.blocked_since_ns, now_ns))
            req.blocked_since_ns = None
            del self._blocked[req]
            req.queue_mark = self.queue_waits.mark(now_ns)

    # -- admission -----------------------------------------------------------------------------

    def _decide(self, req: RequestState, batch: Batch, budget: StepBudget, now_ns: int) -> Decision:
        match = self._match(req, refreshes=self.cache.rules.refresh is not Refresh.admitted)
        decision = self._begin(req, match, batch, budget, now_ns)
        if isinstance(decision, Admit) or not self._is_final(batch, budget):
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

    def _is_final(self, batch: Batch, budget: StepBudget) -> bool:
        # waiting cannot help if nothing else runs and no transfer or read is in flight
        runs = batch.extends or budget.num_running or budget.num_ending or self.started
        return not (runs or self.may_get_room)

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
        self.admission.reserve(req, chunk_end, budget)
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
        req.cold_len, req.dropped_len = acquired.cold_len, match.dropped_len
        req.ready_len = min(match.device_prefix_len, acquired.cached_len)
        if req.failed_prompts:  # data that a branch point locks is missing for the prompt
            match = match._replace(full_len=match.usable_len)
        elif self.cache.rules.storage_branches and req.prefetch is not None:
            stored_len = req.prefetch.leading_end * self._page
            full_len = max(match.full_len, stored_len)
            match = match._replace(full_len=full_len, branch_end=full_len)
        self._checkpoints.place(req, match)
        req.load_back = acquired.load_back
        return taken

    def _acquire(
        self, req: RequestState, match: MatchResult, budget: StepBudget
    ) -> tuple[Acquired, Admit] | Defer:
        cache, decide = self.cache, self.admission.decide
        decision = decide(req, match, budget)
        if isinstance(decision, Defer) and not self.late_slots:
            return decision
        # its own path no longer counts as evictable
        locks = [self._lock_hit(match)]
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
                late_slots=self.late_slots,
            )
        finally:
            for lock in locks:
                cache.tree.release(lock)
        if acquired is None:
            return Defer(Reason.slots)
        if self.cache.rules.refresh is Refresh.admitted and req.sequence.lock is not None:
            cache.touch(req.sequence)
        if acquired.load_back is None and match.needs_host_load_back:
            # more tokens must be computed than the decision allowed for
            decision = decide(req, match.without_host(), budget)
            if isinstance(decision, Defer):
                cache.abandon(req.sequence)
                return Defer(decision.reason)
        return acquired, decision

    def _lock_hit(self, match: MatchResult) -> Lock:
        # what does not count as evictable when the scheduler admits the request
        return self.cache.tree.lock(match.device_node if self.late_slots else match.best_node)

    def _match(self, req: RequestState, *, refreshes: bool) -> MatchResult:
        match = self.cache.match(req.sequence, self._end_of_hits(req), refreshes=refreshes)
        self._note(req, match)
        return match

    def _end_of_hits(self, req: RequestState) -> int:
        return req.target_len  # the token before it is always computed

    def _note(self, req: RequestState, match: MatchResult) -> None:
        if self._listener is not None:
            self._listener.matched(req, match)

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
        req.admitted_ns, req.draft_cold_len = now_ns, req.cold_len
        req.end_queue(self.queue_waits.mark(now_ns))
        for tier in HIT_TIERS:
            num_tokens = getattr(acquired, f"{tier}_len")
            setattr(req, f"{tier}_len", num_tokens)
            self.counters[f"cache/{tier}_hit_tokens"] += num_tokens
        req.computed_len = computed
        if req.cold_len or req.dropped_len:
            self.counters["speculation/draft_cold_tokens"] += req.cold_len
            self.counters["speculation/dropped_tokens"] += req.dropped_len
        self.counters["cache/computed_tokens"] += computed

    # -- chunks --------------------------------------------------------------------------------

    def commit(self, extend: Extend) -> bool:
        """Publish a computed chunk; return whether the prompt is complete."""
        is_complete = self.computed(extend)
        self.store(extend)
        return is_complete

    def computed(self, extend: Extend) -> bool:
        """Note that a chunk is computed; return whether the prompt is complete."""
        req = extend.req
        req.kv_len = extend.end
        if extend.end == req.target_len:
            return True
        req.num_parts += 1
        self.is_computing = False
        return False

    def give_up_partial(self, req: RequestState, *, is_alone: bool = False) -> None:
        """Send a partial request that finds no pages back to the queue.

        A request that `is_alone` in the engine is rejected after some restarts.
        """
        self._prefill_out_of_memory(req)
        self.partial = None
        self.queue_again(req, has_failed=is_alone)

    def queue_again(self, req: RequestState, *, has_failed: bool) -> None:
        """Queue a request whose prompt lost its memory, or reject it after some failures.

        `has_failed`: the request found no memory although it was alone in the engine.
        """
        req.failed_prompts += has_failed
        if has_failed and req.failed_prompts > MAX_RESTARTS:
            self._ended.reject(req, "needs more pages than the pools can give")
        else:
            self.queue(req)

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
            if not (budget.num_running or self.may_get_room):
                self.give_up_partial(req, is_alone=True)
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
            self.partial, self.is_computing = req, True

    def store(self, extend: Extend) -> None:
        # puts the states and pages of a computed chunk in the tree
        req, cache = extend.req, self.cache
        self._publish(extend)
        trims = cache.rules.trims_windows
        leaves = extend.end < req.target_len or trims or cache.tree.kinds.replayed
        # with states, SGLang frees the window pages before the last state alone
        if leaves and not (self._leaves_at_plan or (trims and self._has_states)):
            cache.leave_window(req.sequence, extend.end - cache.tree.overlap)

    def _publish(self, extend: Extend) -> None:
        sequence, cache = extend.req.sequence, self.cache
        for length, slot in extend.saves:
            sequence.states[length // self._page] = slot
        for length, keeps_window in extend.published:  # one at a time, to back up each window
            if cache.rules.trims_windows:
                cache.leave_window(sequence, length - cache.tree.overlap)
            is_answer = length > extend.req.request.prompt_len
            end = cache.tree.num_pages(length)
            cache.publish(sequence, end, is_answer=is_answer, keeps_window=keeps_window)
