"""Whether logits are those of a cold start: the proof that no wrong byte was read."""

from typing import NamedTuple

import torch
from torch import Tensor

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tree.node import DEVICE
from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import PoolSpec
from hicache.executor.real.reference_model import ReferenceModel
from hicache.scheduler.request_state import RequestState


class Verdict(NamedTuple):
    """How many requests have the logits of a cold start, of how many that were looked at."""

    num_equal: int
    num_checked: int

    def __str__(self) -> str:
        return f"logits equal: {self.num_equal} of {self.num_checked}"


class Verifier:
    """Keeps the logits of every answer, and computes them again without a cache.

    The recompute has pages of its own, on one rank, and takes a sequence in one piece.
    """

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        self._seen: dict[int, tuple[bytes, dict[int, Tensor]]] = {}

    def saw(self, req: RequestState, position: int, logits: Tensor) -> None:
        """Remember what the model said after the token at `position`."""
        _, answers = self._seen.setdefault(req.request.id, (req.tokens, {}))
        answers[position] = logits.clone()

    def verify(self) -> Verdict:
        """Compare everything that was seen, bit for bit."""
        if not self._seen:
            return Verdict(0, 0)
        page_size = self._model.page_size
        longest = max(max(answers) for _, answers in self._seen.values()) + 1
        num_pages = -(-longest // page_size)
        spec = PoolSpec(
            model=self._model.config,
            page_size=page_size,
            device_counts=(num_pages, num_pages, 1),
            host_counts=(0, 0, 0),
            device=self._model.device,
        )
        pools = TorchPools(spec)
        pages = list(range(num_pages))
        memory = PagedKvView(pools, self._model.words, (pages, pages), 0)
        num_equal = 0
        for tokens, answers in self._seen.values():
            for kind in (FULL, SWA):
                pools.poison(DEVICE, kind, pages)
            pools.poison(DEVICE, MAMBA, pages[:1])
            pools.clear_state(pages[:1])
            first, end = min(answers), max(answers) + 1
            cold = self._model.forward(tokens, 0, end, memory, logits_from=first)
            num_equal += all(
                torch.equal(warm, cold[position - first]) for position, warm in answers.items()
            )
        return Verdict(num_equal, len(self._seen))
