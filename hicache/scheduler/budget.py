"""The arithmetic of admission: what a request may cost, in tokens.

E extend tokens, C chunk tokens left in this step, W window, P page, M new tokens reserved, h window
tokens to load back from the host.
"""

from dataclasses import dataclass, field
from functools import partial

from hicache.policies.world import World


def ceil_page(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


def swa_budget_for_req(
    form: str,
    *,
    extend: int,
    chunk: int | None,
    window: int,
    page: int,
    swa_host_hit_length: int = 0,
    max_new: int = 0,
) -> int:
    """Window-pool tokens charged to a request; the host hit is allocated, so 0, after admission.

    `reports`: max(min(E, C), W) + P, plus ceil(h) if pages will be loaded back (report 004, sglang
    PR 27391). `no_host_term`: the formula before that fix. `double`: h is charged twice, to measure
    the cost of that error. `sglang_0_5_23`: max(a − W, 0) + min(E + M, W) + P + ceil(h) with a =
    min(E, C) (sglang PR 32379).
    """
    allocated = extend if chunk is None else min(extend, chunk)
    host = ceil_page(swa_host_hit_length, page)
    if form == "sglang_0_5_23":
        return max(allocated - window, 0) + min(extend + max_new, window) + page + host
    base = max(allocated, window) + page
    if form == "no_host_term":
        return base
    return base + (2 * host if form == "double" else host)


class NamedBudget:
    def __init__(self, world: World) -> None:
        self.window_charge = partial(swa_budget_for_req, world.config.scheduler.swa_budget)


@dataclass(slots=True, kw_only=True)
class StepBudget:
    """What one step may still reserve; pages that were taken show in the pools instead."""

    chunk_tokens: int  # extend tokens left
    reserved_tokens: float  # full tokens reserved and not yet taken
    reserved_windows: dict[int, int] = field(default_factory=dict)  # by kind


class NewTokenRatio:
    """The share of the outstanding answer tokens that is reserved.

    The share falls from `first` to `floor` over `decay_steps` decode steps, and rises at a
    retraction. It depends on the number of steps, so several steps at once give the same share.
    """

    def __init__(self, *, first: float, floor: float, decay_steps: int) -> None:
        self._base = first
        self._floor = floor
        self._decay = (first - floor) / max(decay_steps, 1)
        self._steps = 0

    @property
    def value(self) -> float:
        return self.after(0)

    def after(self, num_steps: int) -> float:
        return max(self._floor, self._base - (self._steps + num_steps) * self._decay)

    def decoded(self, num_steps: int) -> None:
        self._steps += num_steps

    def retracted(self, decoded: int, max_new: int, running: int) -> None:
        """Restart from what the running requests have needed so far (sglang's rule)."""
        self._base = max(self._floor, min(1.0, (decoded + 20 * running) / (max_new + 1)))
        self._steps = 0
