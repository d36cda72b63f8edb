"""An engine with pipeline stages: one batch in each, and a prompt's chunks behind each other."""

from hicache.clock import NEVER
from hicache.engine.loop import Engine, Flight
from hicache.executor.simulated.pipeline import PipelineExecutor
from hicache.scheduler.batch import Batch, Outcome


class PipelineEngine(Engine):
    """An engine that plans a batch whenever stage 0 is free.

    As in SGLang, the next chunk of a prompt may follow as soon as stage 0 has computed the chunk
    before it: every stage computes the two in this order. Chunks enter the tree at that time.
    """

    stages: PipelineExecutor  # a timeline may stand before it in `executor`
    _free_ns = 0  # when stage 0 has computed the last batch of this engine, or of this rank
    _next_number = 0
    _busy_until_ns = 0

    def goes_on(self, now_ns: int) -> bool:
        """Whether stage 0 is free, or chunks leave it, while batches are under way."""
        is_free = len(self._flights) < self._num_batches and self._free_ns <= now_ns
        passes = (each.passes_ns for each in self._flights if self._has_chunks(each))
        return is_free or min(passes, default=NEVER) <= now_ns

    def wake(self, now_ns: int) -> Outcome:
        for flight in self._flights:
            if self._has_chunks(flight) and flight.passes_ns <= now_ns:
                self._pass_on(flight)
        return super().wake(now_ns)

    def next_wake_ns(self, now_ns: int) -> int:
        wake_ns = super().next_wake_ns(now_ns)
        if len(self._flights) < self._num_batches and self._free_ns > now_ns:
            wake_ns = min(wake_ns, self._free_ns)
        return min([wake_ns, *[each.passes_ns for each in self._flights if self._has_chunks(each)]])

    def _has_chunks(self, flight: Flight) -> bool:
        # whether chunks of the batch are to leave it when stage 0 has computed them
        return flight.run is not None and any(not each.is_last for each in flight.batch.extends)

    def _plan(self, now_ns: int) -> None:
        if now_ns < self._free_ns or self.is_held:
            return
        taken = {flight.batch.number for flight in self._flights}
        for turn in range(self._num_batches):
            number = (self._next_number + turn) % self._num_batches
            if number not in taken and self._plan_batch(now_ns, number):
                self._next_number = number + 1
                return
        halves = [half for half in self.scheduler.decodes if half.decoding]
        if not (taken or self.cache.in_flight) and len(halves) > 1:
            # each waits for the pages of the others
            self.scheduler.prefill.queue(halves[-1].retract())
            self._plan(now_ns)

    def _launch(self, flight: Flight, now_ns: int) -> None:
        super()._launch(flight, now_ns)
        flight.passes_ns = self._free_ns = self.stages.free_ns

    def _pass_on(self, flight: Flight) -> None:
        batch = flight.batch
        chunks = [each for each in batch.extends if not each.is_last]
        num_tokens = sum(each.end - each.start for each in batch.extends)
        passed = Batch(extends=chunks, number=batch.number)
        step_ns = flight.passes_ns - flight.started_ns
        part = Flight(batch=passed, planned_ns=flight.planned_ns, stall_ns=flight.stall_ns)
        self._share_out(part, num_tokens + len(batch.decodes), step_ns)
        flight.num_passed = sum(each.end - each.start for each in chunks)
        batch.extends = [each for each in batch.extends if each.is_last]
        if self._listener is not None:
            self._listener.at(flight.passes_ns)
        if self.prefetcher is not None:
            self.prefetcher.rates.was_computed(flight.num_passed, step_ns)
        self.scheduler.commit(passed, 1, flight.passes_ns)

    def _commit_steps(self, flight: Flight, num_steps: int, now_ns: int) -> None:
        # batches overlap: time counts as busy once
        counters, started_ns = self.cache.counters, flight.started_ns
        twice_ns = max(self._busy_until_ns - started_ns, 0)
        self._busy_until_ns = now_ns
        counters["engine/busy_ns"] -= twice_ns
        if flight.batch.extends:
            counters["engine/prefill_ns"] -= twice_ns
        elif flight.num_passed:
            counters["engine/prefill_ns"] += now_ns - started_ns - twice_ns
        super()._commit_steps(flight, num_steps, now_ns)
