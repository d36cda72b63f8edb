"""Executor in simulated time for an engine with pipeline stages, and the shards of its storage."""

from collections.abc import Sequence
from dataclasses import dataclass

from hicache.cache.tiers.transfer import BackUp, LoadBack
from hicache.cache.tree.keys import Key
from hicache.clock import Stall
from hicache.executor.completions import StepEnds, StepRun
from hicache.executor.simulated.executor import IoJob, SimulatedExecutor
from hicache.executor.simulated.stores import KeyStore
from hicache.models.cost import CostModel
from hicache.scheduler.batch import Batch
from hicache.scheduler.handover import Sent


@dataclass(slots=True, kw_only=True)
class Stage:
    """One pipeline stage: what it computes, and the bytes of a page on its host, by kind.

    `free_ns` is the end of the last batch that it has been given. No later batch starts there
    before `ready_ns`: until then, the stage waits for a copy that has ended on stage 0.
    """

    cost: CostModel
    page_bytes: Sequence[int]
    free_ns: int = 0
    ready_ns: int = 0


class PipelineExecutor(SimulatedExecutor):
    """A simulated executor of an engine whose batches pass through stages, one batch in each.

    Every stage copies the pages of its layers over links of its own. The engine sees a copy end
    when it ends on stage 0. A later stage that has more bytes, or has not yet computed what it
    backs up, waits for its own copy before it computes more. A load-back begins on all stages when
    stage 0 begins, so a later stage has more time for it.
    """

    stages: Sequence[Stage] = ()

    @property
    def free_ns(self) -> int:
        """When stage 0 can begin another batch."""
        return self.stages[0].free_ns

    def submit(self, work: Sent, now_ns: int) -> None:
        if isinstance(work, BackUp | LoadBack):
            self._io.begin(self._copy(work, now_ns), now_ns)
        else:
            super().submit(work, now_ns)

    def _copy(self, work: BackUp | LoadBack, now_ns: int) -> IoJob:
        is_backed_up = isinstance(work, BackUp)
        begun = [max(each.free_ns, now_ns) if is_backed_up else now_ns for each in self.stages]
        sizes = [
            sum(count * each.page_bytes[kind] for kind, count in work.counts.items())
            for each in self.stages
        ]
        yield from self._io.copy(self._engine, work)
        took_ns = self._io.now_ns - now_ns
        for stage, began_ns, size in zip(self.stages, begun, sizes, strict=True):
            stage.ready_ns = max(stage.ready_ns, began_ns + took_ns * size // sizes[0])

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        counters = self._io.counters
        lens = [req.kv_len + 1 for req in batch.decodes]
        end_ns, stalls = now_ns, []
        for stage in self.stages:
            comes_ns = max(end_ns, stage.free_ns)
            starts_ns = max(comes_ns, stage.ready_ns)
            cost = self._price(stage.cost, batch, lens, now_ns)
            stalls.append(max(cost.load_stall_ns - (starts_ns - now_ns), 0))
            stage.free_ns = end_ns = starts_ns + cost.compute_ns + stalls[-1]
            if stage is self.stages[0]:
                stage.free_ns = end_ns = end_ns + self._begin_total_ns(batch)
            counters["pipeline/late_copies_ns"] += starts_ns - comes_ns
            counters["pipeline/computing_ns"] += end_ns - starts_ns
        goes_on = any(not each.is_last for each in batch.extends)
        return StepRun(StepEnds([end_ns]), stalls[0] if goes_on else sum(stalls))


class Shards:
    """The parts of every page in storage, one store for each: a page is there if all parts are."""

    def __init__(self, stores: Sequence[KeyStore]) -> None:
        self._stores = stores

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        return list(map(all, zip(*[each.contains(keys) for each in self._stores], strict=True)))

    def read(self, keys: Sequence[Key]) -> int:
        return min([each.read(keys) for each in self._stores])

    def write(self, keys: Sequence[Key]) -> int:
        return max([each.write(keys) for each in self._stores])

    def delete(self, keys: Sequence[Key]) -> None:
        for each in self._stores:
            each.delete(keys)


class LongestStall(Stall):
    """The stall of calls of all shards at the same time."""

    def __init__(self, parts: Sequence[Stall]) -> None:
        self._parts = parts

    def take(self) -> int:
        return max([each.take() for each in self._parts])
