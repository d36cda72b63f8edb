"""The two halves of an engine that only decodes: taking requests in, and decoding them.

A request is matched when it is considered. If it fits, the engine promises the prefill engine the
tokens that it holds on device and host or reads from storage, and takes pages for the rest. Then
it restores the promised tokens while the rest is computed elsewhere and arrives over the link. The
rules of admission are those of SGLang 0.5.23 (`disaggregation/decode.py`, `pop_preallocated`).
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from math import ceil, inf

from hicache.cache.kinds import FULL
from hicache.cache.prefetch.prefetch import Phase
from hicache.cache.prefix_cache import HIT_TIERS
from hicache.cache.tiers.transfer import LoadBack, StorageWrite
from hicache.cache.tree.events import Demand, Purpose
from hicache.cache.tree.keys import keys
from hicache.cache.tree.node import HOST, NO_END, MatchResult
from hicache.cache.tree.sequence import Sequence
from hicache.clock import NEVER
from hicache.config import ExperimentConfig
from hicache.request import Request
from hicache.rules import Rules
from hicache.scheduler.admission import StepBudget, ceil_page
from hicache.scheduler.batch import Batch
from hicache.scheduler.decision import Admit, Decision, Defer, Reason, Reject
from hicache.scheduler.decode import Decode
from hicache.scheduler.handover import Handover
from hicache.scheduler.prefill import Prefill
from hicache.scheduler.prompts_together import make_retraction_room
from hicache.scheduler.queue_waits import NO_STEP, Shortage
from hicache.scheduler.request_state import RequestState, TokenRun
from hicache.scheduler.scheduler import Scheduler

MOST_ATTEMPTS = 3  # to compute a prompt and to send its KV, before the request is rejected


def needed_tokens(
    req: RequestState, missing: int, running: Items[RequestState], rules: Rules, page: int
) -> int:
    """Return how many free tokens a request must find to be admitted on a decode engine.

    `missing` of its tokens are not on the device; those of `running` requests could be retracted.
    """
    answer = min(req.remaining_output, rules.clip_new_tokens) - retractable_tokens(running)
    return max(ceil_page(missing, page) + rules.decode_reserved_tokens, missing + answer)


def retractable_tokens(running: Items[RequestState]) -> int:
    """Return how many tokens the running requests would give back if they were retracted."""
    return sum(req.request.prompt_len + req.decoded for req in running)


def promised_room(running: Items[RequestState], num_active: int, rules: Rules) -> int:
    """Return how many free tokens are kept for requests that were admitted.

    Each of the `num_active` requests gets the reserved tokens. All together, they get as many as
    the largest running request needs if all others are retracted.
    """
    retractable, clip = retractable_tokens(running), rules.clip_new_tokens
    ends = [min(req.request.output_len, clip) + req.request.prompt_len for req in running]
    largest = max(ends, default=retractable) - retractable
    return max(rules.decode_reserved_tokens * num_active, largest)


class Intake(Prefill):
    """Takes requests in on a decode engine.

    `loading` holds the requests that are admitted, while their KV is restored and arrives.
    `handovers` has their current attempts by request id, and `draining` the pages of attempts that
    failed, while KV may still arrive in them. `outbox` has the handovers whose prefill engine must
    learn that they have begun or ended. `decode` is the other half.
    """

    is_closed = False  # while the engine is lost
    decode: "Receiver"

    def connect(self, number: int, choose: Callable[[Request], int]) -> None:
        """Begin to take requests in.

        `number` is that of this engine. `choose` returns the number of the prefill engine for a
        request.
        """
        self.handovers: dict[int, Handover] = {}
        self.draining: list[tuple[Handover, RequestState]] = []
        self.outbox: list[Handover] = []
        self._number, self._choose = number, choose
        self._scan_limit = inf

    # -- the queue -----------------------------------------------------------------------------

    def next_deadline_ns(self, now_ns: int) -> int:
        return NEVER  # a promise is kept, however long its read takes

    @property
    def started(self) -> list[RequestState]:
        return [*self.loading, *(req for _, req in self.draining)]

    def queue(self, req: RequestState) -> None:
        if req.admitted_ns is not None:  # its first wait is over
            req.queue_mark = None
        if req.retractions:  # they come first; with their KV on the host, by order of retraction
            is_saved = req.request.id in self.decode.saved
            turn = self.counters["scheduler/retracted_count"] if is_saved else req.number
            req.place = (-inf, turn)
        super().queue(req)

    def steps_unchanged(self, running: Items[RequestState], wanted: int) -> int:
        return wanted if self.defer is None or self.defer.stands else 1

    # -- admission -----------------------------------------------------------------------------

    def plan(self, batch: Batch, budget: StepBudget, now_ns: int) -> Shortage:
        return NO_STEP if self.is_closed else self.scan(batch, budget, now_ns)

    def _num_active(self, batch: Batch, budget: StepBudget) -> int:
        return budget.num_running + len(self.loading)

    def _count_deferral(self, req: RequestState, reason: Reason) -> None:
        if reason is not Reason.running:
            super()._count_deferral(req, reason)

    def _drop(self, req: RequestState, why: str) -> None:
        if self.prefetcher is not None:
            self.prefetcher.abort(req.request.id)
        self.decode.saved.pop(req.request.id, None)
        super()._drop(req, why)

    def _may_start(self, req: RequestState, batch: Batch, budget: StepBudget, now_ns: int) -> bool:
        prefetch = req.prefetch
        if prefetch is None or prefetch.phase is not Phase.asking:
            self._end_wait(req, now_ns)
            return True
        if req.blocked_since_ns is None and req.admitted_ns is None:
            self._begin_wait(req, now_ns)
        return False

    def _decide(self, req: RequestState, batch: Batch, budget: StepBudget, now_ns: int) -> Decision:
        is_saved = req.request.id in self.decode.saved
        lacks = self._resume(req) if is_saved else self._admit(req, now_ns)
        if lacks is not None and self._is_final(batch, budget):
            return Reject(f"needs more {lacks.reason} than the pools have")
        return lacks or Admit(0)

    def _end_of_hits(self, req: RequestState) -> int:
        windows, page = self.cache.tree.kinds.window_lens.values(), self._page
        if not windows or self.cache.rules.decode_windows_on_host:
            return req.target_len + 1  # other engines compute prompts, so a hit may cover all
        # SGLang sends the window at the end whole (`_swa_tail_len`)
        return max(req.target_len - 1 - max(*windows, page), 0) // page * page + 1

    def _admit(self, req: RequestState, now_ns: int) -> Defer | None:
        match = self._match(req, refreshes=True)
        # its own path no longer counts as evictable
        lock = self.cache.tree.lock(match.device_node)
        try:
            lacks = self._lacks(req, match)
            if lacks is not None:
                return lacks
            handover = self._take(req, match)
        finally:
            self.cache.tree.release(lock)
        if handover is None:
            return Defer(Reason.tokens)
        self.loading.append(req)
        self.handovers[req.request.id] = handover
        req.defer_reason = None
        req.end_queue(self.queue_waits.mark(now_ns))
        handover.begun_ns = now_ns
        req.handovers.append(handover)
        req.reused_len = handover.promised_len
        self.outbox.append(handover)
        return None

    def _resume(self, req: RequestState) -> Defer | None:
        # gives a retracted request new pages, and copies its KV into them
        match = self.cache.match(req.sequence, 0)
        lacks = self._lacks(req, match)
        if lacks is not None:
            return lacks
        length = self.decode.saved[req.request.id]
        if self.cache.acquire(req.sequence, match) is None:
            return Defer(Reason.slots)
        if not self._append(req, 0, length):
            self.cache.abandon(req.sequence)
            return Defer(Reason.tokens)
        self.loading.append(req)
        req.load_back = self.decode.resume(req)
        return None

    def _lacks(self, req: RequestState, match: MatchResult) -> Defer | None:
        cache, running, page = self.cache, self.decode.running, self._page
        if self.decode.buffer_pages:
            return self._lacks_buffer(req)
        num_active, rules = len(running) + len(self.loading), cache.rules
        reserved = rules.decode_reserved_tokens
        kept, pending = reserved * num_active, 0
        length = self.decode.saved.get(req.request.id)
        if length is not None:  # it resumes if it fits as it is
            needed = least = ceil_page(length, page) + reserved
        else:
            missing = req.target_len - match.device_prefix_len
            least = ceil_page(missing, page) + reserved
            needed = needed_tokens(req, missing, running, rules, page)
            kept, pending = promised_room(running, num_active, rules), self._pending_restores()
        if needed > cache.room() - kept - pending:
            # while requests decode, only the tokens that could be retracted grow
            stands = needed == least and kept == reserved * num_active
            return Defer(Reason.tokens, stands=stands and not cache.tree.kinds.window_lens)
        for kind, window in cache.tree.kinds.window_lens.items():
            if ceil_page(window, page) + 2 * page > cache.room(kind):
                return Defer(Reason.swa_tokens)
        for kind in cache.tree.kinds.points:
            if rules.states_per_request + match.host_hits[kind] > cache.room(kind):
                return Defer(Reason.slots)
        return None

    def _lacks_buffer(self, req: RequestState) -> Defer | None:
        # with sparse attention, a request needs a buffer on the device, and host memory for its KV
        num_pages, cache = self.decode.sparse_pages(req), self.cache
        host = cache.pools[HOST][FULL].capacity
        held = [each.request for each in (*self.decode.running, *self.loading, req)]
        on_host = sum(-(-(each.prompt_len + each.output_len) // self._page) for each in held)
        if cache.available_size(FULL) < num_pages * self._page or (host or on_host) < on_host:
            return Defer(Reason.tokens, stands=True)
        return None

    def _pending_restores(self) -> int:
        # promised tokens that will take device pages when they have been read from storage
        waiting = [each for each in self.handovers.values() if not each.is_restored]
        return sum(each.promised_len - each.req.ready_len for each in waiting)

    def _take(self, req: RequestState, match: MatchResult) -> Handover | None:
        # takes the device pages of a request; None if some kind has too few
        prefetch, page = req.prefetch, self._page
        promised = match.usable_len
        is_read_later = False
        if prefetch is not None and prefetch.phase is Phase.reading and not prefetch.is_read:
            stored = (prefetch.start_page + prefetch.num_pages) * page
            is_read_later = prefetch.start_page * page <= promised < stored
            promised = stored if is_read_later else promised
        sequence = req.sequence
        if is_read_later:
            sequence.begin(self.cache.tree.root(sequence.namespace), self.cache.tree.kinds)
            sequence.lock = self.cache.tree.lock(match.device_node)
            req.ready_len = match.device_prefix_len
        else:
            acquired = self._acquired(req, sequence, match)
            if acquired is None:
                return None
            promised = acquired
        if not self._append(req, promised // page, req.target_len):
            self.cache.abandon(sequence)
            return None
        handover = Handover(req, promised, self._choose(req.request), self._number)
        handover.is_restored = not is_read_later
        handover.to_host = self.decode.buffer_pages > 0
        return handover

    def _acquired(self, req: RequestState, sequence: Sequence, match: MatchResult) -> int | None:
        # gives a request what the cache holds of it; the number of tokens, None without room
        start, end = req.prefetched
        acquired = self.cache.acquire(sequence, match, storage_start=start, storage_end=end)
        if self.prefetcher is not None:
            self.prefetcher.abort(req.request.id)
        if acquired is None:
            return None
        req.load_back = acquired.load_back
        for tier in HIT_TIERS:
            self.counters[f"decode/{tier}_reused_tokens"] += getattr(acquired, f"{tier}_len")
        return acquired.cached_len

    def _append(self, req: RequestState, first: int, target_len: int) -> bool:
        # takes pages for the tokens that will arrive, from page `first` on; of windows only those
        # that later tokens read. Without room, the caller gives up what the request holds
        cache, kinds, page, sequence = self.cache, self.cache.tree.kinds, self._page, req.sequence
        end = -(-target_len // page)
        if self.decode.buffer_pages:
            page_ids = cache.device.allocate(FULL, self.decode.sparse_pages(req))
            sequence.pages[FULL] += page_ids or []
            sequence.num_pages = NO_END  # the rest is on the host
            return page_ids is not None
        windows, demand = dict(kinds.all_windows), Demand(Purpose.prefill, sequence.request_id)
        sequence.num_pages += end - first
        for kind in kinds.paged:
            skipped = 0
            if kind in windows:
                skipped = max(min(windows[kind].first(target_len // page), end) - first, 0)
            page_ids = cache.device.allocate(kind, end - first - skipped, demand)
            if page_ids is None:
                return False
            if skipped:
                sequence.starts[kind] = len(sequence.pages[kind]) + skipped
            sequence.pages[kind] += [-1] * skipped + page_ids
        return True

    # -- what arrives --------------------------------------------------------------------------

    def restore(self, now_ns: int) -> None:
        """Restore promised tokens whose read from storage has ended, or fail the attempt."""
        broken = []
        for handover in self.handovers.values():
            prefetch = handover.req.prefetch
            is_read = prefetch is not None and prefetch.is_settled
            if is_read and not handover.is_restored and not self._restore(handover):
                broken.append(handover)
        for handover in broken:
            self.fail(handover, now_ns)

    def _restore(self, handover: Handover) -> bool:
        req, cache = handover.req, self.cache
        suffix = req.sequence
        whole = Sequence(req.tokens, req.request.namespace, req.request)
        match = cache.match(whole, handover.promised_len + 1)
        held_len = self._acquired(req, whole, match)
        if held_len != handover.promised_len:
            if held_len is not None:
                cache.abandon(whole)
            return False
        for kind in cache.tree.kinds.paged:
            if suffix.starts[kind]:
                whole.starts[kind] = whole.num_pages + suffix.starts[kind]
            whole.pages[kind] += suffix.pages[kind]
        whole.num_pages += suffix.num_pages
        suffix.num_pages = 0
        cache.abandon(suffix)
        req.sequence, handover.is_restored = whole, True
        return True

    def begin_decoding(self, now_ns: int) -> None:
        """Let the requests decode whose KV is complete, first those that were retracted."""
        in_flight, handovers = self.cache.in_flight, self.handovers
        back = [req for req in self.loading if req.load_back not in in_flight]
        for req in sorted(back, key=lambda req: req.request.id in handovers):
            handover = handovers.get(req.request.id)
            if handover is not None and not (handover.has_arrived and handover.is_restored):
                continue
            self.loading.remove(req)
            req.load_back = None
            if handover is None:
                self.decode.go_on(req)
                continue
            del handovers[req.request.id]
            handover.account(now_ns)
            req.cached_len, req.kv_len = handover.promised_len, req.target_len
            before = req.token_runs[-1][-1:] if req.token_runs else []
            req.token_runs.append(TokenRun([*before, now_ns]))
            self.decode.start(req, now_ns)

    def fail(self, handover: Handover, now_ns: int, reason: str | None = None) -> None:
        """End an attempt that failed: queue the request again, or reject it after some attempts.

        With a `reason` why the prompt can never be computed, the request is rejected at once.
        """
        self._take_back(handover)
        handover.account(now_ns)
        req = handover.req
        self.counters["decode/failed_handovers_count"] += 1
        if reason is None and len(req.handovers) >= MOST_ATTEMPTS:
            reason = f"its KV did not arrive in {MOST_ATTEMPTS} attempts"
        if reason is not None:
            self._ended.reject(req, reason)
        elif handover.is_lost:
            self.enter(req, now_ns)
        else:  # storage did not deliver what it had found
            req.prefetch = None
            self.queue(req)

    def _take_back(self, handover: Handover) -> None:
        # ends an attempt; its pages stay with a stand-in for the request until no KV can arrive
        req = handover.req
        self.loading.remove(req)
        del self.handovers[req.request.id]
        if self.prefetcher is not None:
            self.prefetcher.abort(req.request.id)
        stand_in = RequestState(req.request, req.tokens, req.number, req.submitted_ns)
        stand_in.sequence, req.sequence = req.sequence, stand_in.sequence
        req.load_back = None
        self.draining.append((handover, stand_in))
        if not handover.is_dead:  # else the other engine knows
            handover.is_dead = True
            self.outbox.append(handover)
        self.drain()

    def drain(self) -> None:
        """Free the memory of failed attempts in which no more KV can arrive."""
        for each in list(self.draining):
            handover, req = each
            if handover.is_settled:
                self.draining.remove(each)
                self.cache.abandon(req.sequence)

    def take_out(self, request_id: int) -> RequestState | None:
        handover = self.handovers.get(request_id)
        if handover is None:
            return super().take_out(request_id)
        self._take_back(handover)
        return handover.req

    def leave_queue(self, req: RequestState, now_ns: int) -> None:
        super().leave_queue(req, now_ns)
        self.decode.saved.pop(req.request.id, None)
        if req.handovers and req.handovers[-1].ended_ns is None:
            req.handovers[-1].account(now_ns)


class Receiver(Decode):
    """Decodes requests whose prompts other engines have computed.

    With sparse attention, a request holds `buffer_pages` on the device, and all its index keys.
    `saved` has the KV lengths of retracted requests whose KV is on the host, by request id.
    """

    def setup(self, settings: ExperimentConfig, page_bytes: Items[int]) -> None:
        config, page, sparse = settings.parallel, self._page, settings.parallel.sparse_tokens
        self._kv_share, self._page_bytes = settings.model.kv_share, page_bytes
        self._offloads = config.decode_cache == "offload"
        self.has_cache = config.decode_cache in ("device", "tiers") and sparse is None
        if not self.has_cache:
            self._answer_pages = None
        self.saved: dict[int, int] = {}
        # SGLang adds a page to each buffer
        self.buffer_pages = 0 if sparse is None else -(-sparse // page) + 1
        # where KV is kept in SGLang: in a pool if the engine caches nothing, else in free memory
        self._pool_pages = inf if config.retraction == "host_pool" else 0
        if self._pool_pages and config.decode_cache == "none":
            device = self.cache.device_pages or 0
            longest = -(-min(settings.model.max_len - 1, device * page) // page)
            self._pool_pages = max(device // 5, longest)

    def sparse_pages(self, req: RequestState) -> int:
        """Return the device pages of a request: a buffer of full KV, and index keys of its tokens.

        The keys of its whole answer are reserved.
        """
        num_pages = -(-(req.request.prompt_len + req.request.output_len) // self._page)
        share = self._kv_share
        return ceil(self.buffer_pages * share + num_pages * (1 - share))

    def start(self, req: RequestState, now_ns: int) -> None:
        if self.has_cache and not self._has_states:  # else it has no state within the prompt
            self.cache.publish(req.sequence, req.target_len // self._page)
        super().start(req, now_ns)

    def go_on(self, req: RequestState) -> None:
        """Decode a request again whose KV is on the device again."""
        if self.has_cache:
            self.cache.publish(req.sequence, req.request.prompt_len // self._page)
            self.cache.publish(req.sequence, req.kv_len // self._page, is_answer=True)
        self.running.append(req)

    def keep(self, req: RequestState) -> None:
        if self._offloads:
            self._offload(req)
        if self.has_cache:
            super().keep(req)
        else:
            self.cache.abandon(req.sequence)

    def retract(self) -> RequestState:
        req = self.victim()
        num_pages, kv_len = -(-req.kv_len // self._page), req.kv_len
        num_bytes = self._held_bytes(req)
        super().retract()
        held = sum(-(-length // self._page) for length in self.saved.values())
        if held + num_pages <= self._pool_pages:
            self.saved[req.request.id] = kv_len
            self.cache.save_aside(num_bytes)
        make_retraction_room(self.cache, len(self.running))
        return req

    def resume(self, req: RequestState) -> LoadBack:
        """Copy the KV of a retracted request back into its new pages."""
        req.kv_len = req.target_len = self.saved.pop(req.request.id)
        return self.cache.load_aside(self._held_bytes(req))

    def _held_bytes(self, req: RequestState) -> int:
        held = req.sequence.pages
        return sum(
            (len(held[kind]) - req.sequence.starts[kind]) * self._page_bytes[kind]
            for kind in self.cache.tree.kinds.paged
        )

    def _offload(self, req: RequestState) -> None:
        # the prefill engine stores the whole pages of the prompt
        first, end = req.request.prompt_len // self._page, req.kv_len // self._page
        if first >= end:
            return
        root = self.cache.tree.root(req.request.namespace)
        names = self.cache.tree.names.of_span(root, req.sequence, end)[first:]
        parts = [(FULL, req.sequence.pages[FULL][first:end])]
        write = StorageWrite(
            keys=list(keys(names, FULL)), parts=parts, num_bytes=0, is_given_away=True
        )
        self.cache.save_aside(len(names) * self._page_bytes[FULL], write)
        self.cache.counters["decode/offloaded_pages"] += len(names)


class DecodeScheduler(Scheduler):
    """The scheduler of an engine that only decodes."""

    prefill: Intake
    decode: Receiver
    _prefill_kind, _decode_kind = Intake, Receiver
