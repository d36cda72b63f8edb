"""Steps in SGLang's order: prompts if there are any that fit, decodes otherwise.

The rules are those of SGLang 0.5.23: line numbers are of `managers/scheduler.py`, `SP` stands for
`managers/schedule_policy.py`, `SB` for `managers/schedule_batch.py` and `PP` for
`managers/scheduler_pp_mixin.py`.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.events import Purpose
from hicache.cache.tree.node import DEVICE, MatchResult
from hicache.config import Batching
from hicache.scheduler.admission import StepBudget, ceil_page, pages_for, steps_in_free_pages
from hicache.scheduler.batch import Batch, Extend
from hicache.scheduler.decision import Admit, Decision, Defer, Reason, Reject
from hicache.scheduler.decode import Decode
from hicache.scheduler.prefill import Prefill
from hicache.scheduler.queue_waits import NO_CHUNK, NO_STEP, Cause, Shortage
from hicache.scheduler.request_state import RequestState
from hicache.scheduler.scheduler import Scheduler

# every so many passes over the queue, the prefixes of its first requests count as used (SP 282)
TOUCH_PASSES, TOUCHED_REQUESTS = 32, 128
RETRACT_TOKENS = 20  # room made for each request that still runs after a retraction (SB 2391)
WINDOW_TOKENS = 128  # that an answer passes before it frees window pages (SB 4047)


def make_retraction_room(cache: PrefixCache, num_running: int) -> None:
    """Evict for the tokens that requests which still run will decode after a retraction."""
    cache.make_room(-(-num_running * RETRACT_TOKENS // cache.page_size), Purpose.decode)


class TogetherPrefill(Prefill):
    """Locks the prefixes of all prompts of a step before these take pages.

    If memory lacks, the queue is shut: it is not considered until a running request leaves. With
    several batches in flight, it is shut for the batch that found no memory (PP 568).
    """

    late_slots = True
    number = 0  # of the batch that is planned or committed
    num_batches = 1
    others_run = False  # requests of other batches hold memory
    unpublished: Extend | None = None  # the last chunk of `partial`
    _num_looks = 0  # passes over the queue
    _begun: tuple[tuple[RequestState, int], ...] = ()  # prompts of this pass, and ends of chunks

    @cached_property
    def _shut(self) -> set[int]:
        return set()

    @property
    def is_shut(self) -> bool:
        """Whether the batch at hand does not consider the queue."""
        return self.number in self._shut

    @is_shut.setter
    def is_shut(self, is_shut: bool) -> None:
        (self._shut.add if is_shut else self._shut.discard)(self.number)

    @property
    def may_get_room(self) -> bool:
        return self.others_run or super().may_get_room

    @cached_property
    def _max_running(self) -> int:
        # with states, five slots each: their own three and two for those in the tree that they lock
        # (`mem_cache/kv_cache_configurator.py`, line 3137)
        counts = [self.cache.pools[DEVICE][kind].capacity for kind in self.cache.tree.kinds.points]
        each = self.cache.rules.states_per_request + 2
        most = min([self.config.max_running, *[max(n // each, 1) for n in counts if n is not None]])
        return max(most // self.num_batches, 1)  # line 1241

    def store_last(self) -> None:
        """Publish the last chunk of the partial request, when the next step is planned."""
        chunk, self.unpublished = self.unpublished, None
        if chunk is not None:  # line 3922
            self.is_shut = False
            if chunk.req.sequence.lock is not None:
                self.store(chunk)

    def computed(self, extend: Extend) -> bool:
        is_complete = super().computed(extend)
        if not is_complete:
            self.unpublished = extend
        return is_complete

    def store_all(self, extend: Extend) -> None:
        # a request that ends with its prompt keeps all windows of its last chunk; without states,
        # `finish` publishes them up to where the prompt left another one
        req, page = extend.req, self._page
        for length, slot in extend.saves:
            req.sequence.states[length // page] = slot
            self.cache.publish(req.sequence, length // page)
        if not self._has_states:
            req.kv_len = extend.published[-1][0]

    def store(self, extend: Extend) -> None:
        sequence, slot = extend.req.sequence, None
        if extend.saves:  # the slot of the saved state leaves the request
            slot = self.cache.take_state_slot(sequence)
        super().store(extend)
        if slot is not None and sequence.boundary_slot is None:
            sequence.boundary_slot = slot
        elif slot is not None:
            sequence.spare_slots = slot

    def take_out(self, request_id: int) -> RequestState | None:
        self._shut.clear()
        chunk = self.unpublished
        if chunk is not None and chunk.req.request.id == request_id:
            self.unpublished = None
            self.store(chunk)  # an abort leaves the chunks that were computed
        return super().take_out(request_id)

    def queue_behind(self, req: RequestState) -> None:
        """Queue a retracted request behind all that wait (line 4538)."""
        self._num_submitted += 1
        req.place = (req.place[0], self._num_submitted)
        self.queue(req)

    # -- planning ------------------------------------------------------------------------------

    def is_closed(self, running: list[RequestState]) -> Shortage | None:
        """Return what the queue lacks if this step does not consider it, else None."""
        if self.cache.tree.kinds.window_lens or not running:  # lines 4092, 4095
            self.is_shut = False
        if self.partial is None:
            if not self.waiting:
                return NO_STEP
            if self.is_shut:
                return self.queue_waits.lacks
            if len(running) >= self._max_running:
                self.is_shut = True
                return Shortage(Cause.running, self.waiting[0].request.id)
        return None

    def touch_queue(self) -> None:
        """Count prefixes of waiting requests as used, every so many passes over the queue."""
        if self.waiting and self.cache.tree.is_lru:
            if self._num_looks % TOUCH_PASSES == 0:
                for req in reversed(self.waiting[:TOUCHED_REQUESTS]):
                    self.cache.match(req.sequence, req.target_len + 1)
            self._num_looks += 1

    def plan(self, batch: Batch, budget: StepBudget, now_ns: int) -> Shortage:
        lacks = super().plan(batch, budget, now_ns)
        self._take_pages(batch, budget)
        return lacks

    def scan(self, batch: Batch, budget: StepBudget, now_ns: int) -> Shortage:
        for req in list(self.waiting):
            if self._has_room(budget) and budget.chunk_tokens <= 0:
                return NO_CHUNK
            is_parked = self.partial is not None  # it finds no room, and keeps its place
            if len(self._begun) + budget.num_running + is_parked >= self._max_running:
                self.is_shut = True
                return Shortage(Cause.running, req.request.id)
            if not self._may_start(req, batch, budget, now_ns):
                continue
            match self._decide(req, batch, budget, now_ns):
                case Admit():
                    self.waiting.remove(req)
                    if not self._has_room(budget):
                        self.is_shut = True
                        return Shortage(Cause.tokens, req.request.id)
                case Reject(why):
                    self._drop(req, why)
                case Defer(Reason.chunk):
                    return NO_CHUNK
                case Defer(reason) as decision:
                    self._count_deferral(req, reason)
                    self.defer = decision
                    self.is_shut = bool(self._begun or budget.num_running)  # line 4292
                    return Shortage(Cause(reason), req.request.id)
        return self._held

    def _is_final(self, batch: Batch, budget: StepBudget) -> bool:
        return not self._begun and super()._is_final(batch, budget)

    def _has_room(self, budget: StepBudget) -> bool:
        room, windows = self.cache.room, self.cache.tree.kinds.window_lens
        return room() > budget.reserved_tokens and all(
            room(kind) > budget.reserved_windows.get(kind, 0) for kind in windows
        )

    def _decide(self, req: RequestState, batch: Batch, budget: StepBudget, now_ns: int) -> Decision:
        for kind in self.cache.tree.kinds.points:
            # a look-up that finds a state on the device takes a slot for its copy, whether the
            # request is admitted or not
            match = self.cache.match(req.sequence, req.target_len)
            if match.best_node.held[DEVICE][kind] is not None:
                lock = self.cache.tree.lock(match.best_node)
                self.cache.make_room(1, Purpose.slot, [kind])
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
        if ceil_page(req.extend_len, self._page) > decision.chunk_tokens:  # SP 1645
            end = (req.kv_len + decision.chunk_tokens) // self._page * self._page
        self._account(req, acquired, now_ns)
        for kind in self.cache.tree.kinds.points:
            slots = self.cache.rules.states_per_request - len(req.sequence.working_slot or [])
            budget.reserved_windows[kind] = budget.reserved_windows.get(kind, 0) + slots
        self._charge(req, end, budget)
        return decision

    def _continue_partial(self, req: RequestState, batch: Batch, budget: StepBudget) -> None:
        # SP 1140; the last room is not kept back from it, unless there are windows
        room, windows = self.cache.room, self.cache.tree.kinds.window_lens
        chunk = min(budget.chunk_tokens, int(room() - budget.reserved_tokens))
        chunk = min([chunk, *[room(kind) - self._page for kind in windows]])
        if chunk <= 0:
            if budget.chunk_tokens <= 0 or (windows and (budget.num_running or self.may_get_room)):
                return
            chunk = budget.chunk_tokens
        self.partial = None
        self._charge(req, min(req.kv_len + chunk, req.target_len), budget)

    def _charge(self, req: RequestState, end: int, budget: StepBudget) -> None:
        # SP 895: whole pages of the chunk, one more, and all of the answer behind the last chunk
        page, clip = self._page, self.cache.rules.clip_new_tokens
        max_new = min(req.request.output_len, clip) if end == req.target_len else 0
        extend = ceil_page(end - req.kv_len, page)
        budget.reserved_tokens += extend + page + max_new
        for kind in self.cache.tree.kinds.window_lens:
            needed = self.admission.charge(kind, extend, max_new, budget.chunk_tokens, 0)
            budget.reserved_windows[kind] = budget.reserved_windows.get(kind, 0) + needed
        budget.chunk_tokens -= extend
        self._begun = (*self._begun, (req, end))

    def _take_pages(self, batch: Batch, budget: StepBudget) -> None:
        # all prompts of the step take their slots and pages now, with a page more for each
        cache = self.cache
        begun, self._begun = self._begun, ()
        for kind in cache.tree.kinds.points:
            new = [req for req, _ in begun if req.sequence.boundary_slot == []]
            held = sum(len(req.sequence.working_slot or []) for req in new)
            count = len(new) * cache.rules.states_per_request - held
            cache.make_room(count, Purpose.slot, [kind])
            for req in new:
                cache.take_slots(req.sequence)
        num_tokens = sum(end - req.kv_len for req, end in begun)
        cache.make_room(-(-num_tokens // self._page) + len(begun), Purpose.prefill)
        for req, end in begun:
            if cache.extend(req.sequence, end):
                self._add_extend(req, end, batch, budget)
                continue
            self._prefill_out_of_memory(req)
            is_alone = not (budget.num_running or batch.extends or self.may_get_room)
            self.queue_again(req, has_failed=is_alone)


class TogetherDecode(Decode):
    was_full = False  # the last decode step was preceded by a retraction

    def gain(self, req: RequestState, num_tokens: int) -> bool:
        """Count tokens of an answer whose step is taken in; return whether the request ends."""
        req.remaining_output -= num_tokens
        if req.remaining_output:
            return False
        if req in self.running:
            self.running.remove(req)
        self.finish(req)
        return True

    def remove_ending(self, gained: set[RequestState]) -> bool:
        """Leave out the requests that end with the token not yet taken in (line 4444)."""
        ending = [req for req in self.running if req in gained and self.is_last(req)]
        for req in ending:
            self.running.remove(req)
        return bool(ending)

    def add(self, batch: Batch, running: list[RequestState]) -> None:
        """Let these requests decode in the batch, with pages for one step."""
        for req in running:
            if self._steps_in_windows(req) < 0:
                self.cache.leave_window(req.sequence, self._result_len(req) + 1)
        self.cache.make_room(len(running), Purpose.decode)  # a page each, needed or not
        for req in running if self._takes_pages_first else ():
            self.cache.extend(req.sequence, req.reach(1), Purpose.decode)
        batch.decodes = list(running)

    def steps_alone(self, running: list[RequestState], gained: set[RequestState]) -> int:
        """Return how many steps these requests may decode before something else happens."""
        wanted = min([len(req.gains) or req.remaining_output - (req in gained) for req in running])
        wanted = min([wanted, *[self._steps_in_windows(req) + 1 for req in running]])
        most = max(min(wanted, self._max_jump), 1)
        return steps_in_free_pages(self.cache, running, most, spare=len(running))

    def fits(self, running: list[RequestState]) -> bool:
        count = sum(req.kv_len % self._page == 0 for req in running)
        if running and running[0].gains:
            count = pages_for(running, self._page, 1)
        return self.cache.make_room(count, Purpose.decode)

    def retract_until_fit(
        self, running: list[RequestState], abandon: Callable[[RequestState], None]
    ) -> tuple[list[RequestState], list[RequestState], RequestState | None]:
        """Take the memory of requests until the others fit.

        `abandon` frees a request's memory. Return the others, the requests that start again, and
        the last one, if it does not fit alone.
        """
        # SB 3451: the shortest answers go first, and of these the longest prompts
        left = sorted(running, key=lambda req: (req.decoded, -req.request.prompt_len), reverse=True)
        sent_back, hopeless = [], None
        while len(left) > 1 and (len(left) == len(running) or not self.fits(left)):
            sent_back.append(left.pop())
            abandon(sent_back[-1])
            self.cache.counters["scheduler/retracted_count"] += 1
            make_retraction_room(self.cache, len(left))
        if not self.fits(left):
            hopeless = left.pop()
            abandon(hopeless)
        self.running = left + [req for req in self.running if req not in running]
        self._ratio.retracted(left)
        return left, sent_back, hopeless

    def advance(self, batch: Batch, num_steps: int) -> None:
        """Take the pages of computed decode steps."""
        for req in batch.decodes:
            gained = req.take(num_steps) if req.gains else num_steps
            req.kv_len += gained
            has_room = self.cache.extend(req.sequence, req.kv_len, Purpose.decode)
            assert has_room, "a decode step was planned without free pages for it"
            if batch.extends and req.kv_len % self._page == 0:  # no state is kept (SB 3308)
                req.missed.append(req.kv_len // self._page)
        if batch.decodes and not (self.was_full or batch.extends):
            self._ratio.decoded(num_steps)  # line 4544

    def _steps_in_windows(self, req: RequestState) -> int:
        # decode steps before an answer frees window pages; negative: it frees some now
        windows, sequence = self.cache.tree.kinds.window_lens, req.sequence
        if windows and req.kv_len <= req.target_len:
            return 0
        left = self._max_jump
        for kind, window in windows.items():
            first = sequence.passed[kind] * self._page
            left = min(left, first + window + WINDOW_TOKENS - self._result_len(req) - 1)
        return left // req.most_gain

    def is_last(self, req: RequestState) -> bool:
        """Return whether a request ends with the tokens of the step not yet taken in."""
        return not req.left if req.most_gain > 1 else req.remaining_output == 1

    def pending(self, req: RequestState) -> int:
        """Return the tokens of a decoding request that are computed and not taken in."""
        return req.kv_len - self._result_len(req)

    def _result_len(self, req: RequestState) -> int:
        return req.request.prompt_len + req.decoded - 1  # tokens with KV, as far as is known


class PromptsTogether(Scheduler):
    """The scheduler of `scheduler.batching=prompts_together` and `prompts_mixed`.

    With `compat.rules.asynchronous`, the results of a step are taken in after the next one is
    planned; with several batches in flight, before the next plan of the same batch (PP 214).
    """

    prefill: TogetherPrefill
    decode: TogetherDecode
    decodes: Sequence[TogetherDecode]
    _prefill_kind, _decode_kind = TogetherPrefill, TogetherDecode
    _late: tuple[Batch, int] | None = None  # a step whose results are not taken in, and its end

    @property
    def _is_mixed(self) -> bool:
        return self.config.batching is Batching.prompts_mixed

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self._late is None

    def _take_out(self, request_id: int) -> RequestState | None:
        req = super()._take_out(request_id)
        if req is not None:
            self._own_saves(req)
        return req

    # -- steps ---------------------------------------------------------------------------------

    def plan(self, now_ns: int, number: int = 0) -> Batch | None:
        self.prefill.number, self.prefill.num_batches = number, len(self.decodes)
        return super().plan(now_ns, number)

    def plan_once(self, now_ns: int) -> tuple[Batch | None, bool]:
        prefill, decode, counters = self.prefill, self.decode, self.cache.counters
        batch, was_running = Batch(), bool(decode.running)
        prefill.others_run = bool(self._computing) or len(self.running) > len(decode.running)
        num_failed = counters["scheduler/prefill_oom_count"]
        late = self._late  # until its results are taken in, for what a retraction owns of it
        prefill.store_last()
        prefill.begin_step(now_ns)
        prefill.queue_waits.turn(now_ns, self._compose(batch, now_ns))
        if not batch.extends or self._is_mixed:
            self._plan_decodes(batch)
        self._late = None
        if late is not None:
            self._take_in(late[0], late[1])
        if batch.extends or batch.decodes:
            self._computing += [each.req for each in batch.extends if each.is_last]
            return batch, False
        if late is None and self.is_idle and not self._computing:
            prefill.admission.new_token_ratio.reset()  # line 5318
        # while copies free memory, a prompt that found no pages waits for them
        has_failed = counters["scheduler/prefill_oom_count"] > num_failed
        may_try_again = has_failed and not prefill.may_get_room
        return None, late is not None or may_try_again or (was_running and not decode.running)

    def _compose(self, batch: Batch, now_ns: int) -> Shortage:
        prefill, running = self.prefill, self.decode.running
        lacks = prefill.is_closed(running)
        if lacks is not None:
            return lacks
        if self.decode.only is None:  # else the passes are not those of a server
            prefill.touch_queue()
        num_mixed = len(running) if self._is_mixed else 0
        reserved = prefill.admission.reserved_tokens(running, None)
        budget = StepBudget(
            chunk_tokens=self.config.chunk_tokens - num_mixed,
            reserved_tokens=reserved + num_mixed,
            num_running=len(running),
        )
        return prefill.plan(batch, budget, now_ns)

    def _plan_decodes(self, batch: Batch) -> None:
        prefill, decode = self.prefill, self.decode
        gained: set[RequestState] = set()  # they have a token more than is known
        takes_bytes = False  # states of prompts that are taken in later, from those of pages
        if self._late is not None:
            late, _ = self._late
            gained = {*late.decodes, *(extend.req for extend in late.extends)}
            takes_bytes = self.cache.device.is_shared and bool(late.extends)
        if decode.remove_ending(gained):
            prefill.is_shut = False
        running = decode.decoding
        decode.draw(running)
        decode.was_full = bool(running) and not decode.fits(running)
        if decode.was_full and batch.extends:
            return  # they wait for the next step that has pages for them (line 4387)
        if decode.was_full:
            if any(map(decode.is_last, gained)):
                decode.was_full = False
                return  # the pages of those that end are free in the next pass (line 4471)
            running = self._retract(running)
        if not running:
            return
        decode.add(batch, running)
        stays_shut = prefill.is_shut and not self.cache.tree.kinds.window_lens
        if not (prefill.partial or batch.extends or decode.was_full or takes_bytes) and (
            stays_shut or not prefill.waiting
        ):
            batch.num_steps = decode.steps_alone(running, gained)

    def _retract(self, running: list[RequestState]) -> list[RequestState]:
        left, sent_back, hopeless = self.decode.retract_until_fit(running, self._abandon)
        for req in sent_back:
            req.restart()
            self.prefill.queue_behind(req)
        if hopeless is not None and self.prefill.others_run:
            hopeless.restart()  # it fits when they have ended
            self.prefill.queue_behind(hopeless)
        elif hopeless is not None:
            self.ended.reject(hopeless, "needs more pages for its answer than the pools have")
        self.prefill.is_shut = False
        return left

    def _abandon(self, req: RequestState) -> None:
        self._own_saves(req)
        self.cache.abandon(req.sequence)

    def _own_saves(self, req: RequestState) -> None:
        # give a request that leaves the slots of states whose last chunk is not taken in yet
        for extend in () if self._late is None else self._late[0].extends:
            if extend.req is req and extend.end == req.target_len:
                states, page = req.sequence.states, self.cache.page_size
                states.update((length // page, slot) for length, slot in extend.saves)

    # -- results -------------------------------------------------------------------------------

    def commit(self, batch: Batch, num_steps: int, now_ns: int) -> None:
        prefill, decode = self.prefill, self.decodes[batch.number]
        self.decode, prefill.number = decode, batch.number
        decode.advance(batch, num_steps)
        if batch.extends and (batch.decodes or not decode.running):
            prefill.is_shut = False  # all are in the last batch (line 4385)
        started = [extend.req for extend in batch.extends if prefill.computed(extend)]
        self._computing = [req for req in self._computing if req not in started]
        is_joint = batch.extends and batch.decodes  # prompts come first in a mixed step (SB 3321)
        running = decode.running
        decode.running = [*started, *running] if is_joint else [*running, *started]
        num_known = num_steps
        if (
            self.cache.rules.asynchronous and len(self.decodes) == 1
        ):  # the last step of a run is taken in after the next plan
            num_known += (self._late is not None) - 1
            self._late = batch, now_ns
        if num_known:
            self._take_in(batch, now_ns, holds_last=self._late is not None)

    def _take_in(self, batch: Batch, now_ns: int, *, holds_last: bool = False) -> None:
        for extend in batch.extends:  # in order: what a request that ends frees, the next may take
            req = extend.req
            if extend.end < req.target_len or req.sequence.lock is None:
                continue
            if req.first_token_ns is None:
                req.first_token_ns = now_ns
            if req.remaining_output > 1:
                self.prefill.store(extend)
            else:
                self.prefill.store_all(extend)
            self._gain(req, 1)
        for req in batch.decodes:
            if req.sequence.lock is not None:  # else it was retracted or aborted since
                held = req.last_gain if holds_last else 0  # of the last step, known later
                self._gain(req, self.decode.pending(req) - held)

    def _gain(self, req: RequestState, num_tokens: int) -> None:
        if self.decode.gain(req, num_tokens):
            self.prefill.is_shut = False
