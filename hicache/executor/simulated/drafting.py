"""Times of steps with a draft model, in simulated time."""

from collections.abc import Generator, Sequence

from hicache.models.cost import CostModel
from hicache.scheduler.batch import Batch, Extend


class Drafting:
    """Predicts steps in which a model verifies several tokens of each request, and a draft runs.

    Args:
        cost: predicts the durations of the model's steps.
        draft_cost: predicts those of the draft.
        num_drafts: tokens that the draft proposes for each request and decode step.
    """

    def __init__(self, cost: CostModel, draft_cost: CostModel, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._cost, self._draft_cost = cost, draft_cost

    def draft_ns(self, extends: Sequence[Extend], lens: Sequence[int], slowdown: float) -> int:
        """Return the time (ns) in which the draft computes prompts, and proposes tokens."""
        cost, taken_ns = self._draft_cost.forward_ns, 0
        if extends:
            chunks = [(extend.start, extend.end) for extend in extends]
            taken_ns = cost(chunks, [], slowdown=slowdown).total_ns
        if lens:
            taken_ns += self.num_drafts * cost([], lens, slowdown=slowdown).total_ns
        return taken_ns

    def verify_ends_ns(
        self, batch: Batch, lens: list[int], now_ns: int, slowdown: float
    ) -> Generator[list[int], int, None]:
        """Yield the ends of decode steps, as `CostModel.decode_ends_ns` of steps of one token.

        What they gain is drawn by now.
        """
        gains = [req.gains[: batch.num_steps] for req in batch.decodes]
        queries = 1 + self.num_drafts
        for step in range(batch.num_steps):
            cost = self._cost.forward_ns([], lens, slowdown=slowdown, num_queries=queries)
            now_ns += cost.total_ns + self.draft_ns((), lens, slowdown)
            yield [now_ns]
            lens = [length + each[step] for length, each in zip(lens, gains, strict=True)]
