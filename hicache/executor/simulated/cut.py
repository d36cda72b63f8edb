"""Executor in simulated time that stops computing at each Mamba state that it saves."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from hicache.executor.completions import StepEnds, StepRun
from hicache.executor.simulated.executor import SimulatedExecutor
from hicache.scheduler.batch import Batch, Extend


class CuttingExecutor(SimulatedExecutor):
    """A simulated executor whose steps compute prompt chunks in several passes.

    Each pass computes one piece of every chunk; pieces end where a state is saved. The first pass
    also decodes and loads. A pass costs as much as a step of its own.
    """

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        if not batch.extends:
            return super().forward(batch, now_ns)
        first, *others = zip_longest(*map(_pieces, batch.extends))
        run = super().forward(replace(batch, extends=_present(first)), now_ns)
        end_ns = run.ends[0]
        for pieces in others:
            end_ns = super().forward(Batch(extends=_present(pieces)), end_ns).ends[0]
        return StepRun(StepEnds([end_ns]), run.load_stall_ns)


def _pieces(extend: Extend) -> list[Extend]:
    saves = dict(extend.saves)
    cuts = sorted({extend.start, *saves, extend.end})
    return [
        replace(extend, start=start, end=end, saves=[(end, saves[end])] if end in saves else [])
        for start, end in pairwise(cuts)
    ]


def _present(pieces: Sequence[Extend | None]) -> list[Extend]:
    return [piece for piece in pieces if piece is not None]
