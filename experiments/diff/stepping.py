"""Our engine with several requests in flight, stepped without a clock.

Scheduler, cache and storage script are those of a run. Between two steps the clock runs until no
copy is under way, so that no decision depends on time.
"""

from collections import Counter

from experiments.diff.protocol import Pools, SideError, StepRow
from hicache.cache.kinds import KIND_NAMES
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import BackUp, Reported
from hicache.clock import NEVER
from hicache.config import Batching
from hicache.engine.loop import Engine
from hicache.engine.ports import Io, Runtime
from hicache.request import Request
from hicache.scheduler.batch import Batch
from hicache.scheduler.handover import News
from hicache.scheduler.queue_waits import Cause
from hicache.scheduler.request_state import RequestState


class Stepper:
    """Runs the steps of our engine one at a time, and reports each of them."""

    def __init__(self, engine: Engine, runtime: Runtime, io: Io, pools: Pools) -> None:
        self._engine, self._runtime, self._io, self._pools = engine, runtime, io, pools
        self._scheduler = engine.scheduler
        self._cache = engine.cache
        self._late: list[Reported] = []  # copies that are reported after the next plan
        config = engine.scheduler.config
        self._spends = config.batching is Batching.running_first  # a decode takes of the budget
        self._is_late = self._spends and self._cache.rules.asynchronous
        self._started: set[int] = set()
        self._num_steps = 0

    def not_yet_held(self) -> Counter[str]:
        """Return the tokens in the tree that cannot be hit before a copy is reported."""
        found = Counter[str]()
        loads = [("device", each.load_back) for each in self._scheduler.prefill.loading]
        back_ups = [("host", each) for each in self._late if isinstance(each, BackUp)]
        for tier, done in [*loads, *back_ups]:
            for move in () if done is None else done.moves:
                name = KIND_NAMES[move.kind]
                found[f"{name}/{tier}"] += len(move.sources) * (
                    not move.is_own and self._pools.unit(name)
                )
        return found

    def step(self, requests: list[Request]) -> StepRow:
        """Queue the requests, and run one step.

        Raises:
            SideError: a request can never run, or no request can run.
        """
        scheduler, now_ns = self._scheduler, self._runtime.clock.now
        for request in requests:
            self._engine.submit(request, now_ns())
        self.settle()
        before = [*scheduler.running, *scheduler.started]
        loaded = list(scheduler.prefill.loading)
        times = {req.request.id: req.retractions for req in before}
        batch = scheduler.plan_once(now_ns())[0] or Batch()
        row = self._planned(batch, [req for req in scheduler.prefill.loading if req not in loaded])
        row["preempted"] = sorted(
            req.request.id for req in before if req.retractions > times[req.request.id]
        )
        row["deferred"] = self._deferred(batch)
        for done in self._late:
            if not isinstance(done, BackUp):
                self._engine.deliver(done, now_ns())
        self._late = []
        self.settle()
        if batch.extends or batch.decodes:
            scheduler.commit(batch, 1, now_ns())
        self.settle()
        ended = scheduler.ended.take()
        if ended.rejected:
            req, why = ended.rejected[0]
            raise SideError(f"request {req.request.id} cannot run: {why}")
        row["finished"] = sorted(req.request.id for req in ended.finished)
        row["free"] = self._cache.room() // self._pools.page_size
        return row

    def _planned(self, batch: Batch, loading: list[RequestState]) -> StepRow:
        self._num_steps += 1
        started = {req.request.id: req for req in [*(each.req for each in batch.extends), *loading]}
        new = {key: req for key, req in started.items() if key not in self._started}
        self._started.update(new)
        page, chunk_tokens = self._pools.page_size, self._scheduler.config.chunk_tokens
        return {
            "step": self._num_steps,
            "budget": chunk_tokens - len(batch.decodes) * self._spends,
            "extend": [[each.req.request.id, each.start, each.end] for each in batch.extends],
            "decode": sorted(req.request.id for req in batch.decodes),
            "loading": sorted(req.request.id for req in loading),
            # of a page of which only the last token is computed again, the whole page is a hit
            "hit": {
                key: [req.ready_len, -(-req.cached_len // page) * page - req.ready_len]
                for key, req in new.items()
            },
        }

    def _deferred(self, batch: Batch) -> list[list[object]]:
        scheduler = self._scheduler
        cause, waiting = scheduler.prefill.queue_waits.lacks.cause, scheduler.waiting
        if not waiting or (cause is Cause.step and not self._spends):
            return []
        computed = sum(each.end - each.start for each in batch.extends) + len(batch.decodes)
        if self._spends and cause in (Cause.step, Cause.chunk):
            # vLLM's side names a load under way, or less than a page that is left, by the budget
            is_spent = computed >= scheduler.config.chunk_tokens
            cause = Cause.chunk if is_spent else Cause.tokens
        return [[waiting[0].request.id, str(cause)]]

    def settle(self) -> None:
        """Carry out all copies and reads that were requested, and those that follow from them."""
        engine, io, clock = self._engine, self._io, self._runtime.clock
        while True:
            engine.take_in(clock.now())
            engine.hand_out(clock.now())
            event = io.pass_by(NEVER, clock)
            if event == NEVER:
                return
            clock.wait_until(event)
            for _, done in io.advance(clock.now()):
                if isinstance(done, Prefetch) or not self._is_late:
                    engine.deliver(done, clock.now())
                    continue
                assert not isinstance(done, News), "one engine gets no news of others"
                self._late.append(done)
                if isinstance(done, BackUp):  # its source may be taken at once
                    engine.deliver(done, clock.now())
