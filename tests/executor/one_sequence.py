"""One sequence on real memory, computed in any number of calls of the model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.tables import Stretch
from hicache.models.shapes import ModelConfig, Part
from tests.executor.mixes import tiny

PAGE, LENGTH = 8, 61
NUM_PAGES = -(-LENGTH // PAGE)
TOKENS = np.random.default_rng(0).integers(0, 10_000, LENGTH, dtype=np.int32).tobytes()
WINDOW = Part(
    name="wide", letter="W", window_len=12, dim=16, heads=2, element_bytes=4, query_heads=4
)
INDEX = Part(name="index", letter="I", dim=8, element_bytes=4, query_heads=2, query_dim=8)


def shape_of(pattern: str, head_dim: int = 8, **more: Any) -> ModelConfig:
    """The small model with these layers: W has a second window, FtI attends to 10 tokens."""
    fields = {
        "top_tokens": 10 if "FtI" in pattern.split() else 0,
        "head_dim": head_dim,
        "recurrent_head_dim": head_dim,
        "parts": (replace(WINDOW, dim=2 * head_dim), INDEX),
    }
    return tiny(pattern, PAGE, **fields | more)


class OneSequence:
    """A sequence: its tokens, the ids of its pages by kind, and state slot 0."""

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
        """The logits of all tokens, computed in one call up to each of `ends`."""
        starts = [0, *ends[:-1]]
        return torch.cat(
            [self.forward(*each, logits_from=each[0]) for each in zip(starts, ends, strict=True)]
        )
