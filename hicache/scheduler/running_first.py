"""Steps in vLLM's order: requests that run come first, then those that wait.

The rules are those of vLLM 0.33.0: line numbers are of `v1/core/sched/scheduler.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from math import inf
from operator import attrgetter

from hicache.cache.kinds import FULL
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.events import Purpose
from hicache.cache.tree.node import DEVICE, Lock, MatchResult, Node
from hicache.cache.tree.sequence import Sequence
from hicache.config import SchedulerConfig
from hicache.scheduler.admission import Admission, StepBudget, WindowCharge, ceil_page
from hicache.scheduler.batch import Batch, Extend
from hicache.scheduler.decision import Admit, Defer, Reason
from hicache.scheduler.decode import Decode
from hicache.scheduler.prefill import Prefill
from hicache.scheduler.queue_waits import NO_CHUNK, Cause, Shortage
from hicache.scheduler.request_state import RequestState
from hicache.scheduler.scheduler import Scheduler


class WholePromptFits(Admission):
    """Admits a request if all pages of its prompt are free or can be evicted.

    Nothing is reserved for answers or for the prompts of other requests (line 1465,
    `full_sequence_must_fit`). A load-back must also leave the pages that prompts which have begun
    still need (line 1443).
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: SchedulerConfig,
        window_charge: WindowCharge,
        begun: Callable[[], list[RequestState]],
    ) -> None:
        super().__init__(cache, config, window_charge)
        self._begun = begun  # returns the requests whose prompts are computed or loaded in part
        self.new_states: set[Node] = set()  # nodes whose state this step computes

    def decide(self, req: RequestState, match: MatchResult, budget: StepBudget) -> Admit | Defer:
        cache, kinds = self._cache, self._cache.tree.kinds
        if match.device_node in self.new_states:  # line 1712 of `single_type_kv_cache_manager.py`
            return Defer(Reason.tokens)
        stands, cached, target = not cache.device.is_shared, match.usable_len, req.target_len
        local, loads = match.device_prefix_len, match.needs_host_load_back
        if kinds.points and not loads and budget.chunk_tokens < min(self._page, target - cached):
            return Defer(Reason.chunk)  # it would end between two pages (line 1356)
        whole = self._claims(target, local, cached, is_whole=True)
        # nothing is computed in the step of a load-back
        end = cached if loads else min(cached + budget.chunk_tokens, target)
        step = self._claims(end, local, cached)
        for each in self._begun() if loads else ():
            step.update(self._rest(each))
        for claims in (whole, step):
            if (lack := self._lack(claims)) is not None:
                kind, needed, room = lack
                if kind == FULL:
                    return Defer(Reason.tokens, stands=stands, needed=needed, room=room)
                return Defer(Reason.swa_tokens, stands=stands)
        for kind in kinds.points:
            needed = cache.rules.states_per_request + match.host_hits[kind]
            if needed > cache.room(kind) - cache.taken(kind, {**whole, kind: 0}):
                return Defer(Reason.slots, stands=stands)
        return Admit(budget.chunk_tokens)

    def fits(self, req: RequestState) -> bool:
        """Return whether there is room for the rest of a prompt that has begun."""
        return self._lack(self._rest(req)) is None

    def _rest(self, req: RequestState) -> Counter[int]:
        held = req.sequence.num_pages * self._page
        return self._claims(req.target_len, held, held, is_whole=True)

    def _lack(self, claims: Counter[int]) -> tuple[int, int, int] | None:
        # the first kind without room for its claims, with the tokens that it needs and has
        for kind in self._cache.tree.kinds.paged:
            needed, room = int(self._cache.taken(kind, claims)), self._cache.room(kind)
            if needed > room:
                return kind, needed, room
        return None

    def _claims(self, end: int, held: int, cached: int, *, is_whole: bool = False) -> Counter[int]:
        # tokens up to `end` still to be allocated, by kind (`single_type_kv_cache_manager.py`,
        # line 199); of a whole prompt, at most a window and what steps under way compute is held
        page, steps = self._page, 1 + self._rules.asynchronous
        claims = Counter({FULL: ceil_page(end, page) - held})
        for kind, window in self._cache.tree.kinds.window_lens.items():
            most = ceil_page(window - 1 + self._config.chunk_tokens * steps, page) + page
            last = min(ceil_page(end, page), most) if is_whole else ceil_page(end, page)
            first = max((cached - window + 1) // page * page, held)
            claims[kind] = max(last - first, 0)
        return claims

    def reserve(self, req: RequestState, chunk_end: int, budget: StepBudget) -> None: ...


class RunningFirstPrefill(Prefill):
    admission: WholePromptFits
    may_leave_at_plan = True

    def _admission_of(self, window_charge: WindowCharge) -> WholePromptFits:
        return WholePromptFits(self.cache, self.config, window_charge, lambda: self.started)

    def _lock_hit(self, match: MatchResult) -> Lock:
        # what the device holds after the hit's end there is allocated anew, as far as room counts
        kinds, reads_from = self.cache.tree.kinds, [0] * self.cache.tree.kinds.size
        for kind, window in kinds.windows:
            reads_from[kind] = max(window.first(match.best_node.end), 0)
        return self.cache.tree.lock(match.device_node, reads_from)

    def _match(self, req: RequestState, *, refreshes: bool) -> MatchResult:
        match, tree = super()._match(req, refreshes=refreshes), self.cache.tree
        node = match.device_node
        while match.needs_host_load_back and self._waits_for_load(req, node.end):
            assert node.parent is not None
            node = tree.boundary(node.parent, is_device=True)
        return match._replace(device_node=node, device_prefix_len=node.end * self._page)

    def _prefetch_lets_go(self, req: RequestState, now_ns: int) -> bool:
        if not super()._prefetch_lets_go(req, now_ns):
            return False
        if not self.loading:
            return True
        match = self.cache.match(req.sequence, req.target_len, refreshes=False)
        return not self._waits_for_load(req, match.usable_len // self._page)

    def _waits_for_load(self, req: RequestState, num_pages: int) -> bool:
        # whether a prefix of so many pages has data that is being loaded for another request: that
        # cannot be hit yet, nor loaded again (`offloading/scheduler.py`, line 1022)
        kinds, page_bytes = self.cache.tree.kinds, self.cache.tree.page_bytes
        windows = dict(kinds.windows)
        for each in self.loading:
            if each.load_back is None or each.request.namespace != req.request.namespace:
                continue
            end = each.sequence.num_pages
            for kind, first in each.load_back.starts.items():
                if kind in windows:
                    first = max(first, windows[kind].first(num_pages))
                elif kind in kinds.points:
                    first = max(end, num_pages) - 1
                is_read = first < min(end, num_pages)
                if is_read and req.tokens.startswith(each.tokens[: (first + 1) * page_bytes]):
                    return True
        return False

    def _num_active(self, batch: Batch, budget: StepBudget) -> int:
        begun = [each.req for each in batch.extends]
        return budget.num_running + budget.num_ending + len({*self.stalled, *begun})

    def loaded(self, batch: Batch, budget: StepBudget) -> Iterator[RequestState | Shortage]:
        """Yield the requests whose load-back is done, before those that wait (line 1065).

        The iteration ends with a shortage if one of them finds no room; it keeps its pages.
        """
        for req in list(self.loading):
            if self.partial is not None or budget.chunk_tokens <= 0:
                break
            if req.load_back in self.cache.in_flight:
                continue
            if self._num_active(batch, budget) >= self.config.max_running:
                yield Shortage(Cause.running, req.request.id)
                return
            req.load_back = None
            if not self.admission.fits(req):
                yield Shortage(Cause.tokens, req.request.id)
                return
            if self._chunk_end(req, budget.chunk_tokens) == req.kv_len:
                yield NO_CHUNK
                return
            self.loading.remove(req)
            yield req

    def extend(self, req: RequestState, batch: Batch, budget: StepBudget) -> bool:
        """Add the next chunk of a prompt that has begun; return False if there are no pages."""
        chunk_end = self._chunk_end(req, budget.chunk_tokens)
        if not self.cache.extend(req.sequence, chunk_end):
            return False
        if chunk_end == req.kv_len:  # less than a page is left of the step
            return True
        if req in self.stalled:
            self.stalled.remove(req)
        self._add_extend(req, chunk_end, batch, budget)
        return True

    def _chunk_end(self, req: RequestState, chunk_tokens: int) -> int:
        if req.load_back is not None:
            return req.kv_len  # nothing before the load-back is done (line 1376)
        start, page, end = req.kv_len, self._page, min(req.kv_len + chunk_tokens, req.target_len)
        if not self._has_states or start >= req.target_len:
            return end
        # a chunk ends at a page, and where a state is kept (line 546)
        if end < req.target_len:
            end = max(end // page * page, start)
        return min([stop for stop in req.placed if start < stop < end], default=end)

    def _add_extend(
        self, req: RequestState, chunk_end: int, batch: Batch, budget: StepBudget
    ) -> None:
        if req.load_back is not None:
            self.loading.append(req)
        else:
            super()._add_extend(req, chunk_end, batch, budget)
            if self.partial is not None and budget.chunk_tokens > 0:  # other requests may start
                self.stalled.append(self.partial)
                self.partial = None
            extend = batch.extends[-1]
            for length, slot in extend.saves:
                req.sequence.states[length // self._page] = slot
            # other requests of this step hit it already (`kv_cache_manager.py`, line 625)
            for length, keeps in extend.published:
                # also what this chunk has computed of the next window to keep
                ahead = length if keeps else min([end for end in req.placed if end > length] or [0])
                if ahead and self._leaves_at_plan:
                    self.cache.leave_window(req.sequence, ahead, waits=True)
                    keeps = True
                end = self.cache.tree.num_pages(length)
                self.cache.publish(req.sequence, end, keeps_window=keeps, copies=False)
            for kind in self.cache.tree.kinds.points if extend.saves else ():
                assert req.sequence.lock is not None
                node = req.sequence.lock.node
                if node.held[DEVICE][kind] is extend.saves[-1][1]:
                    self.admission.new_states.add(node)
                else:  # the tree has one
                    extend.saves.clear()

    def _publish(self, extend: Extend) -> None:
        req, sequence, old = extend.req, extend.req.sequence, 0
        for length, _ in extend.published:  # the pages are in the tree, and computed by now
            assert sequence.lock is not None
            end = self.cache.tree.num_pages(length)
            node = self.cache.tree.ancestor(sequence.lock.node, sequence.tokens, end)
            is_answer = length > req.request.prompt_len
            self.cache.save(node, sequence, is_answer=is_answer, old=old)
            old = node.end


class RunningFirstDecode(Decode):
    may_leave_at_plan = True
    # the requests of the step before, as long as it has not ended: starts of chunks, None: decodes
    late: dict[int, int | None] = {}  # noqa: RUF012 - replaced, never changed
    published: tuple[RequestState, ...] = ()  # whose answers entered the tree in this plan
    # those that ended before the last plan, and since then, with the paths of their prefixes
    ended: tuple[tuple[tuple[Sequence, list[Node]], ...], ...] = ((), ())

    @cached_property
    def _windows(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.cache.tree.kinds.window_lens.items() if self.cache.windows else ())

    def free_windows(self, req: RequestState) -> None:
        # only what no step reads that is under way (`kv_cache_manager.py`, line 560)
        if self.cache.windows is not None:
            start = self.late.get(req.request.id, req.kv_len)
            before = req.kv_len - req.last_gain  # where the last decode began
            self.cache.windows.free(req.sequence, before if start is None else start)

    def is_quiet(self, req: RequestState) -> bool:
        """Whether a request's next decode takes, publishes and frees no page."""
        is_late = req.request.id in self.late
        return req.kv_len < req.quiet_until and is_late == self.cache.rules.asynchronous

    def note_quiet(self, req: RequestState) -> None:
        """Note how long a request is quiet that a step decodes, if the next steps do so, too."""
        sequence, is_late, page = req.sequence, self.cache.rules.asynchronous, self._page
        if self._drafts is not None or sequence.leaving or sequence.past:
            return
        ends = [sequence.num_pages * page]
        if self._answer_pages:
            ends.append(req.kv_len + super()._tokens_to_publish(req) - (not is_late))
        for kind, window in self._windows:
            ends.append((sequence.reads_from[kind] + 1) * page + window - 1 + is_late)
        req.quiet_until = min(ends)

    def steps_quiet(self, reqs: list[RequestState]) -> int:
        """Return how many steps may decode these requests alike, if nothing else happens."""
        if self.ending or self.published or any(self.ended) or len(reqs) < len(self.running):
            return 1
        least = min([min(req.quiet_until - req.kv_len, req.remaining_output) for req in reqs])
        return max(min(least, self._max_jump), 1)

    def publish_known(self, req: RequestState) -> None:
        """Publish the answer of a request that this step decodes, as far as it is known.

        Requests that start in this step hit it already (`kv_cache_manager.py`, line 625). Planned
        early, a step does not know the token of the step before it (line 2412).
        """
        length, sequence = req.kv_len + (req.request.id not in self.late), req.sequence
        is_kept, end = bool(self._answer_pages), self.cache.tree.num_pages(length)
        if is_kept and end >= sequence.tree_pages + (self._answer_pages or 0):
            self._publish_answer(req, length, copies=False)
            self.published = (*self.published, req)

    def publish_left_out(self, batch: Batch) -> None:
        """Publish the answers of requests that a step leaves out, as far as they are known.

        The step before has ended, and has shown a token.
        """
        for req in self.running if self._answer_pages else ():
            is_out = req.request.id in self.late and req not in batch.decodes
            if is_out and self.cache.tree.num_pages(req.kv_len) > req.sequence.tree_pages:
                self._publish_answer(req, req.kv_len)

    def keep(self, req: RequestState) -> None:
        self.free_windows(req)
        assert req.sequence.lock is not None
        self.cache.tree.residency.leave_state(req.sequence.lock.node)
        path = list(req.sequence.lock.node.path())
        super().keep(req)
        self.ended = self.ended[0], (*self.ended[1], (req.sequence, path))

    def use_ended(self) -> None:
        """Mark the host copies of requests as used that ended before the last plan.

        The copies that the last two steps asked for did not count them yet
        (`offloading/scheduler.py`, line 2182).
        """
        windows = self.cache.windows
        for sequence, path in self.ended[0]:
            left = [node for node in path if node.parent is not None]  # in the tree
            if left and windows is not None:
                windows.use_on_host(sequence, left[0], is_end=True)
        self.ended = self.ended[1], ()

    def commit(self, reqs: list[RequestState], num_steps: int) -> None:
        for req in self.published:
            assert req.sequence.lock is not None
            self.cache.save(req.sequence.lock.node, req.sequence, is_answer=True)
        self.published = ()
        super().commit(reqs, num_steps)

    def _tokens_to_publish(self, req: RequestState) -> int:
        return 1  # a plan publishes what its step completes


class RunningFirst(Scheduler):
    """The scheduler of `scheduler.batching=running_first`."""

    prefill: RunningFirstPrefill
    decode: RunningFirstDecode
    _most_batches = 1
    _prefill_kind, _decode_kind = RunningFirstPrefill, RunningFirstDecode
    _num_starts = 0

    def plan_once(self, now_ns: int) -> tuple[Batch | None, bool]:
        self.decode.use_ended()
        was_late = bool(self.decode.late)
        batch, has_freed = super().plan_once(now_ns)
        # a plan without requests waits for the step that is under way
        return batch, has_freed or (batch is None and was_late)

    def commit(self, batch: Batch, num_steps: int, now_ns: int) -> None:
        super().commit(batch, num_steps, now_ns)
        for _ in range(2 * self.is_idle):  # vLLM plans steps without requests until none has ended
            self.decode.use_ended()

    def _compose(self, batch: Batch, now_ns: int) -> Shortage:
        decode = self.decode
        self.prefill.admission.new_states.clear()
        lacks = self._fill(batch, now_ns)
        if len(batch.decodes) < len(decode.decoding):
            decode.publish_left_out(batch)
        if self.cache.rules.asynchronous:
            decode.late = {each.req.request.id: each.start for each in batch.extends}
            decode.late |= dict.fromkeys([req.request.id for req in batch.decodes])
        if batch.decodes and not (batch.extends or self.waiting or self.prefill.started):
            batch.num_steps = decode.steps_quiet(batch.decodes)
        return lacks

    def _fill(self, batch: Batch, now_ns: int) -> Shortage:
        decode = self.decode
        budget = StepBudget(chunk_tokens=self.config.chunk_tokens, reserved_tokens=0)
        if self._continue_running(batch, budget):  # line 1041
            return Shortage(Cause.tokens, self.waiting[0].request.id if self.waiting else None)
        budget.num_running, budget.num_ending = len(decode.running), len(decode.ending)
        num_old = len(batch.extends)
        lacks = self._admit(batch, budget, now_ns)
        for extend in batch.extends[num_old:]:  # behind all that have started
            self._num_starts += 1
            extend.req.place = (self._num_starts, 0)
        return lacks

    def _admit(self, batch: Batch, budget: StepBudget, now_ns: int) -> Shortage:
        for req in self.prefill.loaded(batch, budget):
            if isinstance(req, Shortage):
                return req
            if not self._continue(req, batch, budget):
                self._retract(req)
        return self.prefill.scan(batch, budget, now_ns)

    def _continue_running(self, batch: Batch, budget: StepBudget) -> bool:
        # plans the requests that have started, in the order of their starts; where one finds no
        # pages, the last goes back to the queue (line 933). Returns whether one did
        prefill, decode = self.prefill, self.decode
        prefill.stalled, prefill.partial = prefill.partials, None
        order = sorted([*decode.running, *prefill.stalled, *decode.ending], key=attrgetter("place"))
        able, num_started = {*decode.decoding, *prefill.stalled}, len(order)
        for req in order:
            if budget.chunk_tokens <= 0:
                break
            if req not in able:
                continue
            while not self._continue(req, batch, budget):
                last = order[-1]
                if last.request.id in decode.late:  # a step that is under way writes to its pages
                    return len(order) < num_started  # no more requests run (line 941)
                holder = prefill.stalled if last in prefill.stalled else decode.running
                holder.remove(order.pop())
                self._retract(last)
                if last is req:
                    return True
        return len(order) < num_started

    def _continue(self, req: RequestState, batch: Batch, budget: StepBudget) -> bool:
        if not self.decode.is_quiet(req):
            self.decode.free_windows(req)
            if req.kv_len < req.target_len:
                return self.prefill.extend(req, batch, budget)
            self.decode.draw([req])
            if not self.cache.extend(req.sequence, req.reach(1), Purpose.decode):
                return False
            self.decode.publish_known(req)
            self.decode.note_quiet(req)
        batch.decodes.append(req)
        budget.chunk_tokens -= req.most_gain
        return True

    def _retract(self, req: RequestState) -> None:
        prefill = self.prefill
        self.cache.abandon(req.sequence)
        req.restart()
        self.cache.counters["scheduler/retracted_count"] += 1
        # to the head (line 1841)
        req.place = (-inf, -self.cache.counters["scheduler/retracted_count"])
        is_alone = not (self.running or self.started or prefill.may_get_room)
        prefill.queue_again(req, has_failed=is_alone)
