"""The scheduler of one engine: which requests run next, and the results of their step.

`plan` scans the queue and returns a batch; `commit` applies its result. The scheduler does not
change between the two, so the executor may cut a run of decode steps short.
"""

from collections.abc import Sequence

from hicache.cache.prefetch.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.config import Batching, SchedulerConfig
from hicache.request import Request
from hicache.scheduler.admission import StepBudget
from hicache.scheduler.batch import Batch, Ended
from hicache.scheduler.decode import Decode
from hicache.scheduler.drafts import Drafts
from hicache.scheduler.events import Listener
from hicache.scheduler.prefill import Prefill, SchedulerPolicy
from hicache.scheduler.queue_waits import NO_STEP, Shortage
from hicache.scheduler.request_state import RequestState

MANY = 1 << 30


class Scheduler:
    """Decides which requests of one engine run in the next step.

    It has two halves over one cache, which do not know each other: `prefill` holds the requests
    whose prompts are not computed, `decode` those that decode. With several batches in flight there
    is one decode half for each, `decodes`; `decode` is that of the batch at hand. A request decodes
    in the batch that computed the end of its prompt.
    """

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
        num_batches: int = 1,
        listener: Listener | None = None,
        drafts: Drafts | None = None,
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
            num_batches: batches that may be in flight at the same time. If there are several,
                decode steps take their pages before they start. The engines' own orders of steps
                take one.
            listener: receives the events of requests; None means no listener.
            drafts: how many tokens a decode step gains; None means one.
        """
        if num_batches > self._most_batches:
            raise ValueError(f"{config.batching} takes one batch in flight, got {num_batches}")
        self.cache = cache
        self.config = config
        self.ended = Ended(cache, listener)
        self.prefill = self._prefill_kind(
            cache, prefetcher, config, policy, self.ended, max_len=max_len, listener=listener
        )
        self.decodes: Sequence[Decode] = [
            self._decode_kind(
                cache,
                config,
                self.ended,
                self.prefill.admission.new_token_ratio,
                may_jump=may_jump,
                takes_pages_first=takes_decode_pages_first or num_batches > 1,
                drafts=drafts,
            )
            for _ in range(num_batches)
        ]
        self.decode = self.decodes[0]
        self._computing: list[RequestState] = []  # in other batches: prompts that are almost done

    _most_batches = MANY
    _prefill_kind: type[Prefill] = Prefill
    _decode_kind: type[Decode] = Decode

    # -- coming and going ----------------------------------------------------------------------

    def submit(
        self, request: Request, now_ns: int, *, arrived_ns: int | None = None
    ) -> RequestState:
        """Queue a request and start its prefetch from storage, or reject it if it can never run.

        `arrived_ns` is the arrival time in ns. It is before `now_ns` if the request came during a
        step and was held until the step ended. None means that the request arrives at `now_ns`.
        """
        return self.prefill.submit(request, now_ns, now_ns if arrived_ns is None else arrived_ns)

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
        self.prefill.leave_queue(req, now_ns)
        if req.kv_len >= req.target_len:
            self.decode.keep(req)
        else:
            self.cache.abandon(req.sequence)  # a waiting request holds nothing
        self.ended.abort(req)
        return req

    def _take_out(self, request_id: int) -> RequestState | None:
        req = self.prefill.take_out(request_id)
        for half in self.decodes:
            req = req or half.take_out(request_id)
        return req

    @property
    def waiting(self) -> list[RequestState]:
        return self.prefill.waiting

    @property
    def running(self) -> list[RequestState]:
        if len(self.decodes) == 1:
            return self.decode.running
        return [req for half in self.decodes for req in half.running]

    @property
    def started(self) -> list[RequestState]:
        """The requests that hold memory and do not decode."""
        return [*self.prefill.started, *(req for half in self.decodes for req in half.ending)]

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.started or any(half.decoding for half in self.decodes))

    # -- steps ---------------------------------------------------------------------------------

    def plan(self, now_ns: int, number: int = 0) -> Batch | None:
        """Return the next batch with this number, or None if no request can run in it now."""
        self.decode = self.decodes[number]
        batch, has_freed = self.plan_once(now_ns)
        if has_freed:
            return self.plan(now_ns, number)
        if batch is not None:
            batch.number = number
        return batch

    def plan_once(self, now_ns: int) -> tuple[Batch | None, bool]:
        """Return the next batch, and whether planning it has freed memory.

        If there is no batch and memory was freed, another request may start at once.
        """
        prefill, decode = self.prefill, self.decode
        batch, ending = Batch(), decode.ending
        was_running, was_partial = bool(decode.running), bool(prefill.partials)
        prefill.begin_step(now_ns)
        prefill.queue_waits.turn(now_ns, self._compose(batch, now_ns))
        decode.ending = []
        for req in ending:
            decode.finish(req)
        if batch.extends or batch.decodes:
            if batch.extends:
                self._computing += [each.req for each in batch.extends if each.is_last]
            return batch, False
        # what gave its pages back may start again, unless copies will free more
        has_freed = was_partial and not (prefill.partials or prefill.may_get_room)
        return None, bool(ending or has_freed or (was_running and not decode.running))

    def commit(self, batch: Batch, num_steps: int, now_ns: int) -> None:
        self.decode = self.decodes[batch.number]
        if batch.decodes:
            self.decode.commit(batch.decodes, num_steps)
        for extend in batch.extends:
            if self.prefill.commit(extend):
                self._computing.remove(extend.req)
                self.decode.start(extend.req, now_ns)

    def _compose(self, batch: Batch, now_ns: int) -> Shortage:
        # fills the batch; returns what the requests that still wait lack
        lacks = NO_STEP  # applies to requests that arrive during the step
        prefill, running = self.prefill, self.running
        if self._computing:
            running = [*running, *self._computing]
        if prefill.partial is not None or prefill.waiting:
            budget = StepBudget(
                chunk_tokens=self.config.chunk_tokens,
                reserved_tokens=prefill.admission.reserved_tokens(running, prefill.partial),
                num_running=len(running),
                num_ending=self.decode.num_ending,
            )
            lacks = prefill.plan(batch, budget, now_ns)
        if not batch.extends or self.config.batching is Batching.mixed:
            self._plan_decodes(batch)
        return lacks

    def _plan_decodes(self, batch: Batch) -> None:
        decode, is_single = self.decode, bool(batch.extends)
        while running := decode.decoding:
            decode.draw(running)
            wanted = 1
            if not is_single:
                wanted = self.prefill.steps_unchanged(running, decode.steps_unwatched(running))
            steps = decode.steps_that_fit(running, wanted)
            if steps:
                batch.decodes, batch.num_steps = list(running), steps
                return
            if not self._retract_one(batch):
                return
            is_single = True  # the retracted request has not been considered yet

    def _retract_one(self, batch: Batch) -> bool:
        # sends a running request back to the queue; returns False if nothing can decode now: the
        # last request must wait, or was sent back as well
        prefill, decode = self.prefill, self.decode
        if len(decode.running) == 1:
            if batch.extends or self.cache.in_flight or len(self.running) > 1:
                return False
            if prefill.is_computing:
                return False
            if prefill.partial is not None:  # the two wait for each other's pages
                prefill.give_up_partial(prefill.partial)
                return True
        prefill.queue(decode.retract())
        return bool(decode.running)
