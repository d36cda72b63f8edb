"""Compares logits with those of a cold start, which shows that no wrong byte was read."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hicache.cache.kinds import MAMBA
from hicache.cache.tree.node import DEVICE
from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.plane import REFERENCE, Plane
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import PoolSpec
from hicache.executor.real.tables import Stretch
from hicache.models import ModelConfig
from hicache.scheduler.request_state import RequestState

Ready = Callable[[int], None]  # waits until what a layer caches may be read
# in standard deviations, for a logit that is no number: a summary holds no infinite ones
HUGE = 1e9


class Model(Protocol):
    """What computes a step: `ReferenceModel`, or a model of transformers.

    `origin` names the weights and the arithmetic. `together` is the number of tiles that the model
    computes together. `tolerance` is the largest difference of a logit that rounding explains, in
    standard deviations of the token's logits.
    """

    config: ModelConfig
    page_size: int
    device: torch.device
    together: int
    origin: str
    tolerance: float

    def forward(self, memory: PagedKvView, *, ready: Ready = ...) -> list[Tensor]: ...


class Verdict(NamedTuple):
    """The result of comparing logits from a run with a cache to logits without a cache.

    Attributes:
        num_equal: requests whose logits are equal bit for bit.
        num_checked: requests compared.
        num_tokens: tokens whose logits were compared.
        num_agree: tokens for which both runs have the same largest logit.
        error: largest difference of a logit, in standard deviations of the token's logits.
        num_wrong: requests with a difference above the tolerance.
        untested: tiers in use from which no compared request hit a token, so that equal logits say
            nothing about their data.
    """

    num_equal: int
    num_checked: int
    num_tokens: int = 0
    num_agree: int = 0
    error: float = 0.0
    num_wrong: int = 0
    untested: tuple[str, ...] = ()

    def __str__(self) -> str:
        line = f"logits equal: {self.num_equal} of {self.num_checked}"
        if self.untested:
            line += f"; NOT VERIFIED, because nothing was hit on {' and '.join(self.untested)}"
        if self.num_equal == self.num_checked:
            return line
        return (
            f"{line}; the same token: {self.num_agree} of {self.num_tokens}; largest difference: "
            f"{self.error:.3g} standard deviations"
        )

    def measures(self) -> dict[str, float]:
        return {
            "verify/checked_count": self.num_checked,
            "verify/unequal_count": self.num_checked - self.num_equal,
            "verify/wrong_count": self.num_wrong,
            "verify/untested_count": len(self.untested),
            "verify/greedy_agreement": self.num_agree / max(self.num_tokens, 1),
            "verify/logit_error_max": self.error,
        }


class Verifier:
    """Records the logits of every answer, and recomputes them without a cache.

    `tiers` are the tiers in use: device, host, storage. A request is wrong if a logit differs by
    more than the model's tolerance. The recomputation processes each sequence in one chunk on one
    rank, in pages of its own.
    """

    def __init__(self, model: Model, plane: Plane = REFERENCE, tiers: Sequence[str] = ()) -> None:
        self._model = model
        self._untested = dict.fromkeys(tiers)  # until a request hits there
        self._plane = plane
        self._seen: dict[int, tuple[bytes, dict[int, Tensor]]] = {}

    def saw(self, req: RequestState, position: int, logits: Tensor) -> None:
        hits = {"device": req.device_len, "host": req.host_len, "storage": req.storage_len}
        for tier in [tier for tier in self._untested if hits[tier]]:
            del self._untested[tier]
        _, answers = self._seen.setdefault(req.request.id, (req.request.tokens(), {}))
        answers[position] = logits.clone()

    def verify(self) -> Verdict:
        if not self._seen:
            return Verdict(0, 0, untested=tuple(self._untested))
        page_size = self._model.page_size
        longest = max(max(answers) for _, answers in self._seen.values()) + 1
        num_pages = -(-longest // page_size)
        num_kinds = len(self._model.config.kind_names)
        spec = PoolSpec(
            model=self._model.config,
            page_size=page_size,
            device_counts=[1 if kind == MAMBA else num_pages for kind in range(num_kinds)],
            host_counts=[0] * num_kinds,
            device=self._model.device,
            plane=self._plane,
        )
        pools = TorchPools(spec)
        pages = list(range(num_pages))
        verdict = Verdict(0, len(self._seen), untested=tuple(self._untested))
        for tokens, answers in self._seen.values():
            for kind in range(num_kinds):
                pools.poison(DEVICE, kind, pages[:1] if kind == MAMBA else pages)
            pools.clear_state(pages[:1])
            first, end = min(answers), max(answers) + 1
            whole = Stretch(tokens, 0, end, [pages] * num_kinds, 0, logits_from=first)
            memory = PagedKvView(pools, [whole], self._model.together)
            (cold,) = self._model.forward(memory)
            warm = torch.stack([*answers.values()])
            cold = cold[[position - first for position in answers]]
            verdict = compared(verdict, warm, cold, self._model.tolerance)
        return verdict


def compared(verdict: Verdict, warm: Tensor, cold: Tensor, tolerance: float = 0.0) -> Verdict:
    differences = ((warm - cold).abs() / cold.std(dim=-1, keepdim=True)).nan_to_num(HUGE, HUGE)
    error = float(differences.max())
    return verdict._replace(
        num_equal=verdict.num_equal + torch.equal(warm, cold),
        num_tokens=verdict.num_tokens + len(warm),
        num_agree=verdict.num_agree + int((warm.argmax(-1) == cold.argmax(-1)).sum()),
        error=max(verdict.error, error),
        num_wrong=verdict.num_wrong + (error > tolerance),
    )
