"""Steps in vLLM's order: requests that run come first, then those that wait.

The rules are those of vLLM 0.33.0: line numbers are of `v1/core/sched/scheduler.py`.
"""

from collections.abc import Callable
from math import inf

from hicache.cache.kinds import FULL
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.events import Purpose
from hicache.cache.tree.node import MatchResult
from hicache.config import SchedulerConfig
from hicache.scheduler.admission import Admission, StepBudget, WindowCharge, ceil_page
from hicache.scheduler.batch import Batch, Extend
from hicache.scheduler.decision import Admit, Defer, Reason
from hicache.scheduler.queue_waits import Cause, Shortage
from hicache.scheduler.request_state import RequestState
from hicache.scheduler.scheduler import MAX_RESTARTS, Scheduler


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

    def decide(self, req: RequestState, match: MatchResult, budget: StepBudget) -> Admit | Defer:
        cache, page, kinds = self._cache, self._page, self._cache.tree.kinds
        stands, room = not cache.device.is_shared, cache.room()
        own: dict[int, float] = {FULL: ceil_page(req.target_len, page) - match.device_prefix_len}
        needed = int(own[FULL])
        if needed <= room and match.needs_host_load_back:
            needed = match.host_hit_length + page * sum(
                -(-each.target_len // page) - each.sequence.num_pages for each in self._begun()
            )
        if needed > room:
            return Defer(Reason.tokens, stands=stands, needed=needed, room=room)
        for kind, window in kinds.window_lens.items():  # at most a window and a step are held
            most = ceil_page(window - 1 + self._config.chunk_tokens, page) + page
            own[kind] = min(own[FULL] + match.host_hits[kind], most)
            if own[kind] > cache.room(kind) - cache.taken(kind, {**own, kind: 0}):
                return Defer(Reason.swa_tokens, stands=stands)
        for kind in kinds.points:
            needed = cache.quirks.states_per_request + match.host_hits[kind]
            if needed > cache.room(kind) - cache.taken(kind, {**own, kind: 0}):
                return Defer(Reason.slots, stands=stands)
        return Admit(budget.chunk_tokens)

    def reserve(self, req: RequestState, chunk_end: int, budget: StepBudget) -> None: ...


class RunningFirst(Scheduler):
    """The scheduler of `scheduler.batching=running_first`."""

    @property
    def _shows_early(self) -> bool:
        return not self.cache.tree.kinds.aux  # windows and states follow when they are computed

    def _admission_of(self, window_charge: WindowCharge) -> Admission:
        return WholePromptFits(
            self.cache, self.config, window_charge, lambda: [*self._partials, *self.loading]
        )

    @property
    def _partials(self) -> list[RequestState]:
        return [] if self.partial is None else [self.partial]

    def _compose(self, batch: Batch, now_ns: int) -> Shortage:
        before = self.counters["scheduler/retracted_count"]
        self._plan_decodes(batch)
        budget = StepBudget(
            chunk_tokens=self.config.chunk_tokens - len(batch.decodes), reserved_tokens=0
        )
        if self.partial is not None and budget.chunk_tokens > 0:
            self._continue_partial(self.partial, batch, budget)
        if self.counters["scheduler/retracted_count"] > before:  # line 1041
            return Shortage(Cause.tokens, self.waiting[0].request.id if self.waiting else None)
        for req in list(self.loading):  # before the other requests that wait (line 1065)
            if self.partial is not None or budget.chunk_tokens <= 0:
                break
            if req.load_back in self.cache.in_flight:
                continue
            if self._num_active(batch) >= self.config.max_running:
                return Shortage(Cause.running, req.request.id)
            req.load_back = None
            held = req.sequence.num_pages * self._page
            if ceil_page(req.target_len, self._page) > held + self.cache.room():
                return Shortage(Cause.tokens, req.request.id)  # it keeps its pages
            self.loading.remove(req)
            self._continue_partial(req, batch, budget)
        return self._scan(batch, budget, now_ns)

    def _prefetch_lets_go(self, req: RequestState, now_ns: int) -> bool:
        # data that is being loaded cannot be hit yet, nor loaded again (`offloading/scheduler.py`,
        # line 1020)
        page, page_bytes = self._page, self.cache.tree.page_bytes
        return super()._prefetch_lets_go(req, now_ns) and not any(
            each.load_back is not None
            and req.request.namespace == each.request.namespace
            and req.tokens.startswith(each.tokens[: (each.ready_len // page + 1) * page_bytes])
            for each in self.loading
        )

    # -- extending -----------------------------------------------------------------------------

    def _chunk_end(self, req: RequestState, chunk_tokens: int) -> int:
        if req.load_back is not None:
            return req.kv_len  # nothing before the load-back is done (line 1376)
        if self._has_states:
            return super()._chunk_end(req, chunk_tokens)
        return min(req.kv_len + chunk_tokens, req.target_len)

    def _continue_partial(self, req: RequestState, batch: Batch, budget: StepBudget) -> None:
        self.partial = None
        chunk_end = self._chunk_end(req, budget.chunk_tokens)
        if self.cache.extend(req.sequence, chunk_end):
            self._add_extend(req, chunk_end, batch, budget)
        else:  # it is the last that was admitted
            self._retract(req)

    def _add_extend(
        self, req: RequestState, chunk_end: int, batch: Batch, budget: StepBudget
    ) -> None:
        if req.load_back is not None:
            self.loading.append(req)
        else:
            super()._add_extend(req, chunk_end, batch, budget)
            # other requests of this step hit it already (`kv_cache_manager.py`, line 625)
            for length, _ in batch.extends[-1].published if self._shows_early else ():
                self.cache.publish(req.sequence, length // self._page, copies=False)

    def _publish(self, extend: Extend) -> None:
        if not self._shows_early:
            super()._publish(extend)
            return
        for length, _ in extend.published:  # the pages are in the tree, and computed by now
            req, sequence = extend.req, extend.req.sequence
            assert sequence.lock is not None
            node = self.cache.tree.ancestor(
                sequence.lock.node, sequence.tokens, length // self._page
            )
            is_answer = length > req.request.prompt_len
            self.cache.host.save_path(node, req.request.id, is_answer=is_answer)

    # -- decoding ------------------------------------------------------------------------------

    def _plan_decodes(self, batch: Batch) -> None:
        retracted: list[RequestState] = []
        for req in list(self.decoding):
            while req not in retracted:
                if self.cache.extend(req.sequence, req.kv_len + 1, Purpose.decode):
                    batch.decodes.append(req)
                    break
                retracted.append(self.partial or self.running.pop())  # line 933
                self.partial = None
                self._retract(retracted[-1])

    def _known_len(self, req: RequestState) -> int:
        # planned early, a step does not know the token before it (line 2412)
        return req.kv_len - (self.config.asynchronous and req.kv_len > req.target_len)

    def _retract(self, req: RequestState) -> None:
        if req.sequence.lock is not None:
            self.cache.tree.touch(req.sequence.lock.node)  # its blocks are freed as just used
        self.cache.abandon(req.sequence)
        req.restart()
        self.counters["scheduler/retracted_count"] += 1
        if not self.running and not self.started and not self._may_get_room:
            req.failed_prompts += 1
            if req.failed_prompts > MAX_RESTARTS:
                self._reject(req, "needs more pages than the pools can give")
                return
        req.place = (-inf, -self.counters["scheduler/retracted_count"])  # to the head (line 1841)
        self._queue(req)
