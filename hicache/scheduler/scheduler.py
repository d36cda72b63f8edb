"""Which requests run next, and what becomes of the step they ran in.

`plan` looks at the queue and returns a batch, `commit` takes its result. Between the two nothing
here changes, so the executor may cut a run of decode steps short.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable

from hicache.cache.named import NUMBER, make_policy
from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import Acquired, PrefixCache
from hicache.cache.reasons.judge import Judge
from hicache.cache.tree.match import MatchResult
from hicache.cache.tree.node import DEVICE, FULL, SWA
from hicache.config import Batching, SchedulerConfig, WritePolicy
from hicache.request import Request
from hicache.scheduler.admission import Admission
from hicache.scheduler.batch import Batch, Extend, Outcome
from hicache.scheduler.budget import StepBudget
from hicache.scheduler.checkpoints import Checkpoints, Placement
from hicache.scheduler.decision import Admit, Decision, Defer, Reason, Reject
from hicache.scheduler.decoding import must_evict, steps_with_pages
from hicache.scheduler.job import Job
from hicache.scheduler.order import ORDERS, ServiceOrder
from hicache.scheduler.queue_waits import QueueWaits

MAX_RESTARTS = 3  # of a prompt that runs out of pages half way, with nobody else here
MAX_JUMP = 64  # decode steps planned at once; most jumps are cut at about 8


class Scheduler:
    """The queue and the running requests of one engine.

    Invariant: a job is in exactly one of waiting, partial (some of its prompt computed) and
    running (decoding).
    """

    def __init__(
        self,
        cache: PrefixCache,
        prefetcher: Prefetcher | None,
        config: SchedulerConfig,
        *,
        max_len: int,
        checkpoints: Placement,
        may_jump: bool,
        takes_decode_pages_first: bool = False,
        estimate_s: Callable[[int, int], float] | None = None,
        judge: Judge | None = None,
    ) -> None:
        """Bind what one engine's scheduler needs.

        Args:
            cache: what it takes pages from.
            prefetcher: none without storage.
            config: its knobs.
            max_len: tokens that the model can attend to.
            checkpoints: where states are kept.
            may_jump: whether decode steps may be taken at once.
            takes_decode_pages_first: before a step and not after it, as real memory needs them.
            estimate_s: seconds that a prompt takes, given what of it is cached.
            judge: says why tokens are computed; none: nobody asks.
        """
        self.cache = cache
        self.prefetcher = prefetcher
        self.config = config
        self.counters: Counter[str] = cache.counters
        self.waiting: list[tuple[tuple[float, int], Job]] = []
        self.partial: Job | None = None
        self.running: list[Job] = []
        self._max_len = max_len
        self._page = cache.page_size
        self._checkpoints = Checkpoints(cache, checkpoints)
        self._order: ServiceOrder = make_policy(
            "scheduler.order",
            config.order,
            ORDERS,
            config,
            estimate_s,
            wants={"rank": NUMBER},
            knobs=config.order_args,
        )
        self._max_jump = MAX_JUMP if may_jump else 1
        self._takes_decode_pages_first = takes_decode_pages_first
        self._judge = judge
        self.queue_waits = QueueWaits()
        self._num_submitted = 0
        self._ended = Outcome()  # jobs that ended outside `commit`
        self._admission = Admission(cache, config)
        self._defer: Defer | None = None  # of the request that ended this step's scan

    # -- coming and going ----------------------------------------------------------------------

    def submit(self, request: Request, now_ns: int, *, arrived_ns: int | None = None) -> Job:
        """Queue a request, and start its prefetch. One that can never run is rejected.

        `arrived_ns`: when it came, if it has waited for the end of a step since.
        """
        self._num_submitted += 1
        tokens = self.cache.tree.names.tokens(request)
        came_ns = now_ns if arrived_ns is None else arrived_ns
        job = Job(request, tokens, self._num_submitted, came_ns)
        reason = self._never_fits(request)
        if reason is not None:
            self._ended.rejected.append((job, reason))
            return job
        if self._judge is not None:
            job.sequence.chain = self._judge.chain_of(request)
        match = self.cache.match(job.sequence, job.target_len)
        job.came_len = match.usable_len
        if self.prefetcher is not None:
            prefetch = self.prefetcher.prefetch_from_storage(
                request.id, job.sequence, match, job.target_len, now_ns
            )
            job.prefetch, job.declined = prefetch, self.prefetcher.declined
            if prefetch is not None:
                start = prefetch.start_page * self._page
                job.prefetched = (start, start + prefetch.num_pages * self._page)
        job.rank = (self._order.rank(job, match), job.number)
        job.looked_ns = now_ns
        job.queue_ns["step"] = now_ns - came_ns
        job.begin_queue(self.queue_waits.mark(now_ns))
        insort(self.waiting, (job.rank, job))
        return job

    def abort(self, request_id: int, now_ns: int) -> Job | None:
        """Drop a request wherever it is; every count returns to what it was without it.

        Not while a step that it is part of runs. None if there is no such request.
        """
        job = self._take_out(request_id)
        if job is None:
            return None
        self._end_wait(job, now_ns)
        job.end_queue(self.queue_waits.mark(now_ns))
        if self.prefetcher is not None:
            self.prefetcher.abort(request_id)
        self.cache.abandon(job.sequence)  # one that waits holds nothing
        self._forget_pages(job)
        self._ended.aborted.append(job)
        return job

    @property
    def is_idle(self) -> bool:
        """Whether no request is here."""
        return not (self.waiting or self.running or self.partial)

    def next_deadline_ns(self, now_ns: int) -> int | None:
        """When the next waiting request's prefetch will have waited for too long."""
        if self.prefetcher is None or not self.waiting:
            return None
        return self.prefetcher.next_deadline_ns(now_ns)

    @property
    def has_backlog(self) -> bool:
        """Whether the last plan left out a request that waits for no storage: it had no room."""
        return any(job.blocked_since_ns is None for _, job in self.waiting)

    def take_ended(self) -> Outcome:
        """Jobs that ended since the last call, outside a step."""
        ended, self._ended = self._ended, Outcome()
        return ended

    # -- planning ------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> Batch | None:
        """The next step, or None if nothing can run now."""
        batch = Batch()
        was_running = bool(self.running)
        self._defer = None
        if self.prefetcher is not None:
            self.prefetcher.begin_step(len(self.waiting))
        self._end_waits(now_ns)
        cause, first = "step", None  # of whoever comes while it runs
        if self.partial is not None or self.waiting:
            budget = StepBudget(
                chunk_tokens=self.config.chunk_tokens,
                reserved_tokens=self._admission.reserved_tokens(self.running, self.partial),
            )
            if self.partial is not None:
                self._continue_partial(self.partial, batch, budget)
            cause, first = self._scan(batch, budget, now_ns)
        self.queue_waits.turn(now_ns, cause, first)
        if self.running and (not batch.extends or self.config.batching is Batching.mixed):
            self._plan_decodes(batch)
        if batch.extends or batch.decodes:
            return batch
        if was_running and not self.running:
            return self.plan(now_ns)  # the last one gave its pages back: another may begin
        return None

    def commit(self, batch: Batch, num_steps: int, now_ns: int) -> Outcome:
        """Take in a batch that ended at `now_ns` after `num_steps` steps."""
        outcome = self.take_ended()
        if batch.decodes:
            self._commit_decodes(batch.decodes, num_steps, outcome)
        for extend in batch.extends:
            self._commit_extend(extend, now_ns, outcome)
        return outcome

    # -- admission -----------------------------------------------------------------------------

    def _scan(self, batch: Batch, budget: StepBudget, now_ns: int) -> tuple[str, int | None]:
        """Look at the requests that wait, in order, until one of them must wait for room.

        Returns what all those wait for who are left, but for those that wait for storage; and the
        request that there is no room for.
        """
        num_blocked = 0
        for entry in list(self.waiting):
            job = entry[1]
            if self.partial is not None and not batch.extends:
                return "tokens", self.partial.request.id  # it found no pages to go on with
            if budget.chunk_tokens <= 0 or self.partial is not None:
                return "chunk", None
            if len(self.running) + len(batch.extends) >= self.config.max_running:
                decision: Decision = Defer(Reason.running, stands=True)
            elif self._prefetch_lets_go(job, now_ns):
                decision = self._decide(job, batch, budget, now_ns)
            else:
                num_blocked += 1
                if num_blocked >= self.config.scan_limit:
                    return "scan_limit", None
                continue
            match decision:
                case Admit():
                    self.waiting.remove(entry)
                case Reject(why):
                    self._forget_pages(job)
                    self._count_deferral(job, Reason.never)
                    self.waiting.remove(entry)
                    self._ended.rejected.append((job, why))
                case Defer(reason):
                    self._count_deferral(job, reason)
                    self._defer = decision
                    return str(reason), job.request.id
        return "step", None

    def _prefetch_lets_go(self, job: Job, now_ns: int) -> bool:
        if self.prefetcher is None or self.prefetcher.check(job.request.id, now_ns):
            self._end_wait(job, now_ns)
            return True
        if job.blocked_since_ns is None:
            job.end_queue(self.queue_waits.mark(now_ns))
            job.blocked_since_ns = now_ns
        return False

    def _end_waits(self, now_ns: int) -> None:
        # also of those that the scan will not reach: what they wait for now is not storage
        if self.prefetcher is None:
            return
        for _, job in self.waiting:
            if job.blocked_since_ns is not None and not self.prefetcher.is_blocking(
                job.request.id, now_ns
            ):
                self._end_wait(job, now_ns)

    def _end_wait(self, job: Job, now_ns: int) -> None:
        if job.blocked_since_ns is not None:
            job.end_wait(now_ns)
            job.begin_queue(self.queue_waits.mark(now_ns))

    def _decide(self, job: Job, batch: Batch, budget: StepBudget, now_ns: int) -> Decision:
        """Let the job begin, if there is room for it."""
        match = self.cache.match(job.sequence, job.target_len)
        decision = self._begin(job, match, batch, budget, now_ns)
        if isinstance(decision, Admit) or not self._is_final(batch):
            return decision
        # a hit takes room as well: its window is locked, and what is loaded back is charged
        for lesser in (match.without_host(), match.without_hit()):
            again = self._begin(job, lesser, batch, budget, now_ns)
            if isinstance(again, Admit):
                self.counters["scheduler/hit_given_up_count"] += 1
                return again
        if self.prefetcher is not None:
            self.prefetcher.forget(job.request.id, used_pages=0)
        wanted = "pages" if decision.reason is Reason.prefill_oom else decision.reason
        return Reject(f"needs more {wanted} than the pools can give")

    def _begin(
        self, job: Job, match: MatchResult, batch: Batch, budget: StepBudget, now_ns: int
    ) -> Admit | Defer:
        """Let the job begin where the match ends, if there is room for it."""
        taken = self._acquire(job, match, budget)
        if isinstance(taken, Defer):
            return taken
        acquired, decision = taken
        job.cached_len = job.kv_len = acquired.cached_len
        job.saves = self._checkpoints.lengths(job, match)
        if acquired.load_back is not None:
            batch.load_backs.append(acquired.load_back)
        chunk_end = self._chunk_end(job, decision.chunk_tokens)
        if not self.cache.extend(job.sequence, chunk_end):
            self._prefill_out_of_memory(job)
            return Defer(Reason.prefill_oom)
        if self.prefetcher is not None:
            used = acquired.storage_len // self._page
            self.prefetcher.forget(job.request.id, used_pages=used)
        self._account(job, acquired, now_ns)
        self._admission.reserve(job, chunk_end, budget)
        self._add_extend(job, chunk_end, batch, budget)
        return decision

    def _acquire(
        self, job: Job, match: MatchResult, budget: StepBudget
    ) -> tuple[Acquired, Admit] | Defer:
        """Take hold of what the match found; nothing is held after a deferral."""
        cache, decide = self.cache, self._admission.decide
        decision = decide(job, match, budget)
        if isinstance(decision, Defer):
            return decision
        lock = cache.tree.lock(match.best_node)  # its own path no longer counts as evictable
        try:
            decision = decide(job, match, budget)
            if isinstance(decision, Defer):
                return decision
            start, end = job.prefetched
            self._open_case(job, match)
            acquired = cache.acquire(job.sequence, match, storage_start=start, storage_end=end)
        finally:
            cache.tree.release(lock)
        if acquired is None:
            return Defer(Reason.slots)
        if acquired.load_back is None and match.needs_host_load_back:
            # there is more to compute than was decided upon
            decision = decide(job, match.without_host(), budget)
            if isinstance(decision, Defer):
                cache.abandon(job.sequence)
                return Defer(decision.reason)
        return acquired, decision

    def _open_case(self, job: Job, match: MatchResult) -> None:
        # why what the match has not found is not there, before anything is taken
        chain = job.sequence.chain
        if self._judge is None or chain is None:
            return
        job.case = self._judge.open(
            chain,
            match,
            job.target_len,
            came_len=job.came_len,
            prefetch=job.prefetch,
            declined=job.declined,
            is_again=job.admitted_ns is not None,
        )

    def _forget_pages(self, job: Job) -> None:
        if self._judge is not None and job.sequence.chain is not None:
            self._judge.forget(job.sequence.chain)

    def _is_final(self, batch: Batch) -> bool:
        """Whether waiting cannot help: alone in the engine, nothing under way, still refused."""
        if batch.extends or self.running or self.partial is not None:
            return False
        return not self._may_get_room

    @property
    def _may_get_room(self) -> bool:
        """Whether a copy or a prefetch is under way, whose end may free pages, and will wake us."""
        if self.cache.in_flight:
            return True
        if self.prefetcher is None:
            return False
        reads = self.prefetcher.active.values()
        return bool(self.prefetcher.lingering) or not all(each.is_settled for each in reads)

    def _prefill_out_of_memory(self, job: Job) -> None:
        # admission had promised pages that are not there (report 004); start over later
        self.counters["scheduler/prefill_oom_count"] += 1
        self.cache.abandon(job.sequence)
        prefetched = job.prefetched
        job.restart()
        job.prefetched = prefetched

    def _count_deferral(self, job: Job, reason: Reason) -> None:
        if job.defer_reason is not reason:
            job.defer_reason = reason
            self.counters["scheduler/deferred_count"] += 1
            self.counters[f"scheduler/deferred_{reason}_count"] += 1

    def _account(self, job: Job, acquired: Acquired, now_ns: int) -> None:
        computed = job.target_len - job.cached_len
        job.defer_reason = None
        if self._judge is not None and job.case is not None:
            spans = self._judge.close(job.case, job.cached_len)
            job.spans[job.case.is_again].extend(spans)
            job.case = None
        if job.admitted_ns is not None:
            job.recomputed_len += computed
            self.counters["cache/recomputed_tokens"] += computed
            return
        job.admitted_ns = now_ns
        job.end_queue(self.queue_waits.mark(now_ns))
        job.device_len = acquired.device_len
        job.host_len = acquired.host_len
        job.storage_len = acquired.storage_len
        job.computed_len = computed
        self.counters["cache/device_hit_tokens"] += job.device_len
        self.counters["cache/host_hit_tokens"] += job.host_len
        self.counters["cache/storage_hit_tokens"] += job.storage_len
        self.counters["cache/computed_tokens"] += computed

    def _never_fits(self, request: Request) -> str | None:
        length = request.prompt_len + request.output_len
        if length > self._max_len:
            return f"{length} tokens are more than the model's {self._max_len}"
        pool = self.cache.pools[DEVICE][FULL]
        wanted = -(-length // self._page) + 1
        if pool.capacity is not None and wanted > pool.capacity:
            return f"{wanted} pages are more than the device pool's {pool.capacity}"
        return None

    def _take_out(self, request_id: int) -> Job | None:
        for entry in self.waiting:
            if entry[1].request.id == request_id:
                self.waiting.remove(entry)
                return entry[1]
        for job in self.running:
            if job.request.id == request_id:
                self.running.remove(job)
                return job
        job_half_way = self.partial
        if job_half_way is not None and job_half_way.request.id == request_id:
            self.partial = None
            return job_half_way
        return None

    # -- extending -----------------------------------------------------------------------------

    def _chunk_end(self, job: Job, chunk_tokens: int) -> int:
        if job.extend_len <= chunk_tokens:
            return job.target_len
        # a cut chunk ends at a page
        end = (job.kv_len + chunk_tokens) // self._page * self._page
        return max(end, job.kv_len + min(self._page, job.extend_len))

    def _continue_partial(self, job: Job, batch: Batch, budget: StepBudget) -> None:
        chunk = budget.chunk_tokens
        if self.cache.tree.has_swa:
            chunk = min(chunk, self.cache.room(SWA) - self._page)
        chunk_end = self._chunk_end(job, max(chunk, self._page))
        if not self.cache.extend(job.sequence, chunk_end):
            if self.running or self._may_get_room:
                return
            self._prefill_out_of_memory(job)
            self.partial = None
            job.failed_prompts += 1
            if job.failed_prompts > MAX_RESTARTS:
                self._forget_pages(job)
                self._ended.rejected.append((job, "needs more pages than the pools can give"))
            else:
                insort(self.waiting, (job.rank, job))
            return
        self.partial = None
        self._add_extend(job, chunk_end, batch, budget)

    def _add_extend(self, job: Job, chunk_end: int, batch: Batch, budget: StepBudget) -> None:
        saves = self._checkpoints.slots(job, chunk_end)
        batch.extends.append(Extend(job, job.kv_len, chunk_end, saves))
        budget.chunk_tokens -= chunk_end - job.kv_len
        if chunk_end < job.target_len:
            self.partial = job

    def _commit_extend(self, extend: Extend, now_ns: int, outcome: Outcome) -> None:
        job, cache = extend.job, self.cache
        job.num_steps += 1
        job.kv_len = extend.end
        for length, slot in extend.saves:
            job.sequence.states[length // self._page] = slot
        if job.kv_len < job.target_len:
            cache.leave_window(job.sequence, job.kv_len)
            return
        job.decoded += 1
        if job.first_token_ns is None:
            job.first_token_ns = now_ns
        if job.is_finished:
            self._finish(job, outcome)
            return
        cache.publish(job.sequence, job.kv_len // self._page)
        if cache.tree.has_states and job.sequence.boundary_slot is None:
            job.sequence.boundary_slot = cache.take_state_slot()
        self.running.append(job)

    # -- decoding ------------------------------------------------------------------------------

    def _plan_decodes(self, batch: Batch) -> None:
        wanted = 1 if batch.extends else self._steps_unwatched()
        while True:
            steps = steps_with_pages(self.cache, self.running, wanted)
            # under write_back a page that looks evictable may be held by what lies below it: take
            # it before the step is promised (more steps than one take free pages only)
            is_write_back = self.cache.write_policy is WritePolicy.write_back
            is_unsure = is_write_back and must_evict(self.cache, self.running)
            takes_first = self._takes_decode_pages_first or is_unsure
            if steps and (not takes_first or self._take_decode_pages(steps)):
                break
            if not self._retract_one(batch):
                return
            wanted = 1  # the retracted request has not been looked at
        batch.decodes = list(self.running)
        batch.num_steps = steps

    def _steps_unwatched(self) -> int:
        """How many decode steps may pass before those that wait must be looked at again."""
        if self.partial is not None:
            return 1
        wanted = min(self._max_jump, *[job.remaining_output for job in self.running])
        if self._defer is None:  # all that were looked at wait for storage
            return wanted
        return self._admission.steps_deferred(self._defer, self.running, wanted)

    def _retract_one(self, batch: Batch) -> bool:
        """Send the running request with the least to lose back to the queue.

        False if nothing is left to decode: the last one waits, or has been sent back as well.
        The last one begins again where its answer ends, under a lock on that window alone, and has
        gained a token at least: so this comes to an end.
        """
        if len(self.running) == 1:
            if batch.extends or self.cache.in_flight:
                return False
            if self.partial is not None:  # the two wait for each other's
                self._prefill_out_of_memory(self.partial)
                insort(self.waiting, (self.partial.rank, self.partial))
                self.partial = None
                return True
        job = min(self.running, key=lambda each: (each.decoded, -each.request.prompt_len))
        self.running.remove(job)
        self.cache.abandon(job.sequence)
        job.restart()
        insort(self.waiting, (job.rank, job))
        self.counters["scheduler/retracted_count"] += 1
        if not self.running:
            return False
        self._admission.retracted(self.running)
        return True

    def _commit_decodes(self, jobs: list[Job], num_steps: int, outcome: Outcome) -> None:
        self._admission.decoded(num_steps)
        cache, page = self.cache, self._page
        has_window = cache.tree.has_swa
        for job in jobs:
            job.kv_len = length = job.kv_len + num_steps
            job.decoded += num_steps
            job.num_steps += num_steps
            if length > job.sequence.num_pages * page and not cache.extend(job.sequence, length):
                raise AssertionError("a decode step was planned without pages for it")
            if has_window:
                cache.leave_window(job.sequence, length)
        for job in [job for job in jobs if job.is_finished]:
            self.running.remove(job)
            self._finish(job, outcome)

    def _take_decode_pages(self, num_steps: int) -> bool:
        return all(self.cache.extend(job.sequence, job.kv_len + num_steps) for job in self.running)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        num_pages = job.kv_len // self._page
        sequence = job.sequence
        if sequence.boundary_slot is not None and num_pages > sequence.tree_pages:
            sequence.states[num_pages] = sequence.boundary_slot
            sequence.boundary_slot = None
        self.cache.finish(sequence, num_pages)
        outcome.finished.append(job)
