"""One sequence on real memory, cut into calls of the model as a test likes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.tables import Stretch


class OneSequence:
    """Tokens, the ids of their pages by kind, and a slot."""

    def __init__(
        self,
        model: ReferenceModel,
        pools: TorchPools,
        tokens: bytes,
        pages: Sequence[Sequence[int]],
        captures: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.pages = [list(map(int, of_kind)) for of_kind in pages]
        self.pools = pools
        self._model = model
        self._tokens = tokens
        self._captures = captures

    def stretch(self, start: int, end: int, logits_from: int | None = None) -> Stretch:
        return Stretch(self._tokens, start, end, self.pages, 0, self._captures, logits_from)

    def forward(self, start: int, end: int, *, logits_from: int | None = None) -> Tensor:
        stretches = [self.stretch(start, end, logits_from)]
        memory = PagedKvView(self.pools, stretches, self._model.together)
        (logits,) = self._model.forward(memory)
        return logits

    def in_cuts(self, ends: Sequence[int]) -> Tensor:
        """All logits, computed in so many calls."""
        starts = [0, *ends[:-1]]
        return torch.cat(
            [self.forward(*each, logits_from=each[0]) for each in zip(starts, ends, strict=True)]
        )
