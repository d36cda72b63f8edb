"""SGLang's scheduler: its order of work in a step, and what it reserves.

Facts from SGLang 0.5.23 (`managers/scheduler.py`, `schedule_policy.py`, `schedule_batch.py`). A pass
prefills if it can, and decodes otherwise. Where it overlaps scheduling with computing, it plans a
step before it takes in the results of the step before.
"""

from collections.abc import Iterable

from hicache.cache.tree.events import Demand, Purpose
from hicache.cache.tree.node import MatchResult
from hicache.scheduler.admission import StepBudget, ceil_page, steps_in_free_pages
from hicache.scheduler.batch import Batch, Extend
from hicache.scheduler.decision import Admit, Decision, Defer, Reason, Reject
from hicache.scheduler.queue_waits import NO_CHUNK, NO_STEP, Cause, Shortage
from hicache.scheduler.request_state import RequestState
from hicache.scheduler.scheduler import Scheduler

TOUCH_PASSES, TOUCHED_REQUESTS = 32, 128  # schedule_policy.py: _touch_waiting_prefixes
RETRACT_TOKENS = 20  # room made for each request that still runs after a retraction
WINDOW_TOKENS = 128  # that an answer passes before it frees its window pages


class PromptsTogether(Scheduler):
    """The scheduler of `scheduler.batching=prompts_together`.

    A waiting request that lacks memory shuts the queue until a running request leaves. All prompts
    of a step take their pages together, after all of them are locked. A retracted request goes to
    the end of the queue.
    """

    _num_slots = 1
    _is_shut = False
    _num_looks = 0  # passes that considered the queue
    _unpublished: Extend | None = None  # the last chunk of `partial`
    _late: tuple[Batch, int] | None = None  # a step whose results are not taken in, and its end
    _begun: tuple[tuple[RequestState, int], ...] = ()  # prompts of this pass, and where chunks end
    _was_full = False  # the last decode pass retracted

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self._late is None

    def plan_once(self, now_ns: int) -> tuple[Batch | None, bool]:
        late, self._late = self._late, None
        if self._unpublished is not None:
            self._store(self._unpublished)
            self._unpublished, self._is_shut = None, False
        batch = Batch()
        self._defer = None
        self._end_waits(now_ns)
        self._prefill(batch, now_ns)
        if not batch.extends:
            self._decode(batch, None if late is None else late[0])
        if late is not None:
            self._take_in(late[0], 1, late[1])
        if batch.extends or batch.decodes:
            return batch, False
        if late is None and self.is_idle:
            self._admission.new_token_ratio.reset()
        return None, late is not None

    def commit(self, batch: Batch, num_steps: int, now_ns: int) -> None:
        for req in batch.decodes:
            req.kv_len += num_steps
            has_room = self.cache.extend(req.sequence, req.kv_len, Purpose.decode)
            assert has_room, "a decode step was planned without free pages for it"
        if batch.decodes and not self._was_full:
            self._admission.new_token_ratio.decoded(num_steps)
        if batch.extends and not self.running:
            self._is_shut = False
        for extend in batch.extends:
            extend.req.kv_len = extend.end
            if extend.end < extend.req.target_len:
                self._unpublished = extend
            else:
                self.running.append(extend.req)
        if self.config.asynchronous:  # the last step of a run is taken in after the next plan
            num_known = num_steps - 1 + (self._late is not None)
            self._late = batch, now_ns
        else:
            num_known = num_steps
        if num_known:
            self._take_in(batch, num_known, now_ns)

    def _take_in(self, batch: Batch, num_steps: int, now_ns: int) -> None:
        gained = dict.fromkeys(batch.decodes, num_steps)
        for extend in batch.extends:
            if extend is self._unpublished or extend.end < extend.req.target_len:
                extend.req.num_parts += 1
            elif extend.req.sequence.lock is not None:
                if extend.req.remaining_output > 1:
                    self._store(extend)
                for length, slot in extend.saves if extend.req.remaining_output == 1 else ():
                    # all windows of its last chunk stay; without states, `finish` publishes them
                    extend.req.sequence.states[length // self._page] = slot
                    self.cache.publish(extend.req.sequence, length // self._page)
                if extend.req.first_token_ns is None:
                    extend.req.first_token_ns = now_ns
                gained[extend.req] = 1
        for req, count in gained.items():
            if req.sequence.lock is None:  # retracted or aborted since
                continue
            req.remaining_output -= count
            if not req.remaining_output:
                if req in self.running:
                    self.running.remove(req)
                self._is_shut = False
                self.finish(req)
            elif self._has_states and req.sequence.boundary_slot is None:
                req.sequence.boundary_slot = self.cache.take_state_slot(req.sequence)

    def _store(self, extend: Extend) -> None:
        sequence = extend.req.sequence
        slot = None
        if extend.saves:  # the state that was saved leaves the request
            slot = self.cache.take_state_slot(sequence)
        super()._store(extend)
        sequence.spare_slots = slot or sequence.spare_slots

    # -- prefill -------------------------------------------------------------------------------

    def _prefill(self, batch: Batch, now_ns: int) -> None:
        if self.cache.tree.kinds.window_lens or not self.running:
            self._is_shut = False
        if self.partial is None:
            if self._is_shut or not self.waiting:
                self.queue_waits.turn(now_ns, self.queue_waits.lacks if self._is_shut else NO_STEP)
                return
            if len(self.running) >= self.config.max_running:
                self._is_shut = True
                lacks = Shortage(Cause.running, self.waiting[0].request.id)
                self.queue_waits.turn(now_ns, lacks)
                return
        self._touch_queue()
        reserved = self._admission.reserved_tokens(self.running, None)
        budget = StepBudget(chunk_tokens=self.config.chunk_tokens, reserved_tokens=reserved)
        if self.partial is not None:
            self._continue_partial(self.partial, batch, budget)
        self.queue_waits.turn(now_ns, self._scan(batch, budget, now_ns))
        begun, self._begun = self._begun, ()
        self._take_pages(begun, batch, budget)

    def _touch_queue(self) -> None:
        if not self.waiting or self.cache.knobs.eviction != "lru":
            return
        if self._num_looks % TOUCH_PASSES == 0:
            for req in reversed(self.waiting[:TOUCHED_REQUESTS]):
                self.cache.match(req.sequence, req.target_len + 1)
        self._num_looks += 1

    def _scan(self, batch: Batch, budget: StepBudget, now_ns: int) -> Shortage:
        for req in list(self.waiting):
            if self._has_capacity(budget) and budget.chunk_tokens < self._page:
                return NO_CHUNK
            if len(self._begun) + len(self.running) >= self.config.max_running:
                self._is_shut = True
                return Shortage(Cause.running, req.request.id)
            if not self._prefetch_lets_go(req, now_ns):
                continue
            match self._decide(req, batch, budget, now_ns):
                case Admit():
                    self.waiting.remove(req)
                    if not self._has_capacity(budget):
                        self._is_shut = True
                        return Shortage(Cause.tokens, req.request.id)
                case Reject(why):
                    self._count_deferral(req, Reason.never)
                    self.waiting.remove(req)
                    self._reject(req, why)
                case Defer(reason) as decision:
                    self._count_deferral(req, reason)
                    self._defer = decision
                    self._is_shut = bool(self._begun or self.running)
                    return Shortage(Cause(reason), req.request.id)
        return NO_STEP

    def _has_capacity(self, budget: StepBudget) -> bool:
        cache = self.cache
        return cache.room() > budget.reserved_tokens and all(
            cache.room(kind) > budget.reserved_windows.get(kind, 0)
            for kind in cache.tree.kinds.window_lens
        )

    def _decide(self, req: RequestState, batch: Batch, budget: StepBudget, now_ns: int) -> Decision:
        if self._has_states:  # a look-up takes a slot, whether the request is admitted or not
            match = self._match(req, refreshes=True)
            lock = self.cache.tree.lock(match.best_node)
            self._make_room(1, Purpose.slot, self.cache.tree.kinds.points)
            self.cache.tree.release(lock)
        return super()._decide(req, batch, budget, now_ns)

    def _begin(
        self, req: RequestState, match: MatchResult, batch: Batch, budget: StepBudget, now_ns: int
    ) -> Admit | Defer:
        taken = self._enter(req, match, budget)
        if isinstance(taken, Defer):
            return taken
        acquired, decision = taken
        end = req.target_len
        if ceil_page(req.extend_len, self._page) > decision.chunk_tokens:
            end = (req.kv_len + decision.chunk_tokens) // self._page * self._page
        if self.prefetcher is not None:
            self.prefetcher.forget(req.request.id)
        self._account(req, acquired, now_ns)
        self._charge(req, end, budget)
        return decision

    def _continue_partial(self, req: RequestState, batch: Batch, budget: StepBudget) -> None:
        room, windows = self.cache.room, self.cache.tree.kinds.window_lens
        chunk = min(budget.chunk_tokens, int(room() - budget.reserved_tokens))
        for kind in windows:
            chunk = min(chunk, room(kind) - self._page)
        if chunk <= 0:
            if windows:
                return
            chunk = budget.chunk_tokens
        self.partial = None
        self._charge(req, min(req.kv_len + chunk, req.target_len), budget)

    def _charge(self, req: RequestState, end: int, budget: StepBudget) -> None:
        # what the prompt will take once the pass has considered the queue
        page, clip = self._page, self.config.clip_new_tokens
        max_new = min(req.request.output_len, clip) if end == req.target_len else 0
        extend = ceil_page(end - req.kv_len, page)
        for kind in self.cache.tree.kinds.points:
            budget.reserved_windows[kind] = budget.reserved_windows.get(kind, 0) + 2
        budget.reserved_tokens += extend + page + max_new
        for kind in self.cache.tree.kinds.window_lens:
            needed = self._admission.charge(kind, extend, max_new, budget.chunk_tokens, 0)
            budget.reserved_windows[kind] = budget.reserved_windows.get(kind, 0) + needed
        budget.chunk_tokens -= extend
        self._begun = (*self._begun, (req, end))

    def _take_pages(
        self, begun: tuple[tuple[RequestState, int], ...], batch: Batch, budget: StepBudget
    ) -> None:
        new = [req for req, _ in begun if self._has_states and not req.sequence.boundary_slot]
        self._make_room(2 * len(new), Purpose.slot, self.cache.tree.kinds.points)
        for req in new:
            self.cache.take_slots(req.sequence)
        num_tokens = sum(end - req.kv_len for req, end in begun)
        self._make_room(-(-num_tokens // self._page) + len(begun), Purpose.prefill)
        for req, end in begun:
            if self.cache.extend(req.sequence, end):
                self._add_extend(req, end, batch, budget)
            else:
                self._prefill_out_of_memory(req)
                self._queue(req)

    def _make_room(self, count: int, purpose: Purpose, kinds: Iterable[int] | None = None) -> None:
        for kind in (self.cache.tree.kinds.paged if kinds is None else kinds) if count else ():
            self.cache.device.make_room(kind, 0, Demand(purpose, 0), spare=count)

    # -- decode --------------------------------------------------------------------------------

    def _decode(self, batch: Batch, late: Batch | None) -> None:
        gained: set[RequestState] = set()  # they have a token more than is known
        if late is not None:
            gained = {*late.decodes, *(extend.req for extend in late.extends)}
        ending = [req for req in self.running if req in gained and req.remaining_output == 1]
        for req in ending:
            self.running.remove(req)
            self._is_shut = False
        running = self.decoding
        self._was_full = bool(running) and not self._fits(running)
        if self._was_full:
            if ending:
                self._was_full = False
                return  # their pages are free in the next pass
            running = self._retract(running)
        if not running:
            return
        for req in running:
            if self._steps_in_windows(req) < 0:
                self.cache.leave_window(req.sequence, self._result_len(req) + 1)
        self._make_room(len(running), Purpose.decode)
        for req in running:
            self.cache.extend(req.sequence, req.kv_len + 1, Purpose.decode)
        batch.decodes = list(running)
        if self.partial is None and not self._was_full and (self._is_shut or not self.waiting):
            wanted = min([req.remaining_output - (req in gained) for req in running])
            wanted = min(wanted, *[self._steps_in_windows(req) + 1 for req in running])
            batch.num_steps = steps_in_free_pages(
                self.cache, running, min(wanted, self._max_jump), spare=len(running)
            )

    def _fits(self, running: list[RequestState]) -> bool:
        count = sum(req.kv_len % self._page == 0 for req in running)
        self._make_room(count, Purpose.decode)
        pools, page = self.cache.available_size, self._page
        return all(pools(kind) >= count * page for kind in self.cache.tree.kinds.paged)

    def _retract(self, running: list[RequestState]) -> list[RequestState]:
        # those with the shortest answers go first, and of these the longest prompts
        left = sorted(running, key=lambda req: (req.decoded, -req.request.prompt_len), reverse=True)
        while len(left) > 1 and (len(left) == len(running) or not self._fits(left)):
            req = left.pop()
            self.cache.abandon(req.sequence)
            req.restart()
            self._num_submitted += 1
            req.place = (req.place[0], self._num_submitted)
            self._queue(req)
            self.counters["scheduler/retracted_count"] += 1
            self._make_room(-(-len(left) * RETRACT_TOKENS // self._page), Purpose.decode)
        if not self._fits(left):
            req = left.pop()
            self.cache.abandon(req.sequence)
            self._reject(req, "needs more pages for its answer than the pools have")
        self.running = left
        self._is_shut = False
        self._admission.new_token_ratio.retracted(left)
        return left

    def _steps_in_windows(self, req: RequestState) -> int:
        # decode steps in which an answer frees no window pages; negative: it must free some now
        if req.kv_len <= req.target_len:
            return self._max_jump if not self.cache.tree.kinds.window_lens else 0
        left, sequence = self._max_jump, req.sequence
        for kind, window in self.cache.tree.kinds.window_lens.items():
            first = max(sequence.starts[kind], sequence.tree_pages) * self._page
            left = min(left, first + window + WINDOW_TOKENS - self._result_len(req) - 1)
        return left

    def _result_len(self, req: RequestState) -> int:
        # tokens whose KV is computed in a step whose results are known
        return req.request.prompt_len + req.decoded - 1
