"""Executor in simulated time for sparse attention: decode steps load missing KV from the host."""

from hicache.clock import NEVER
from hicache.executor.completions import StepEnds, StepRun
from hicache.executor.simulated.executor import SimulatedExecutor
from hicache.scheduler.batch import Batch


class SparseExecutor(SimulatedExecutor):
    """A simulated executor of an engine that holds a part of each request's KV on the device.

    A step of a request that is longer than its `buffer_tokens` loads the part `miss` of the
    `top_bytes` that it reads, and all of them in its first step. The loads of a step follow each
    other and its computation.
    """

    buffer_tokens = 0
    miss = 0.0
    top_bytes = 0

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        ends, stall_ns = super().forward(batch, now_ns)
        ends.look(NEVER)
        late_ns, late = 0, []
        for step, end_ns in enumerate(ends.known):
            loads = [
                1.0 if req.kv_len + step == req.target_len else self.miss
                for req in batch.decodes
                if req.kv_len + step >= self.buffer_tokens
            ]
            late_ns += int(sum(loads) * self.top_bytes * 1e9 / self._load_rate)
            late.append(end_ns + late_ns)
        return StepRun(StepEnds(late), stall_ns)
