"""The arithmetic of admission: how many tokens of memory a request may cost."""

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
    """Return how many tokens of sliding-window KV are reserved when a request is admitted.

    Let a be the smaller of `extend` and `chunk`. Let host be `swa_host_hit_length`, rounded up to
    whole pages. `form` names the formula:

    - `no_host_term`: max(a, window) + page;
    - `reports`: max(a, window) + page + host, as in SGLang since its pull request 27391;
    - `double`: max(a, window) + page + 2 * host, to measure the effect of counting host twice;
    - `sglang_0_5_23`: max(a - window, 0) + min(extend + max_new, window) + page + host, as in
      SGLang since its pull request 32379.

    Args:
        form: the name of the formula.
        extend: tokens of the request that must be computed.
        chunk: tokens that the current step can still compute; None means no limit.
        window: length of the sliding window in tokens.
        page: tokens per page.
        swa_host_hit_length: window tokens to load from host to device; 0 once device pages are
            allocated for them.
        max_new: answer tokens for which memory is reserved.
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
    """What one step may still compute, and the memory that is already reserved for requests.

    `chunk_tokens`: prompt tokens that the step may still compute. `reserved_tokens`: full-attention
    KV tokens that are reserved, but not allocated yet. `reserved_windows`: the same for each kind
    of sliding window, in tokens.
    """

    chunk_tokens: int  # extend tokens left
    reserved_tokens: float  # full tokens reserved and not yet taken
    reserved_windows: dict[int, int] = field(default_factory=dict)  # by kind


class NewTokenRatio:
    """Computes the fraction of future answer tokens for which admission reserves memory.

    The fraction falls linearly from `first` to `floor` over `decay_steps` decode steps. It rises
    when memory runs out and a running request is sent back to the queue (a retraction).
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
        """Set the reserved fraction of answer tokens anew after a retraction, by SGLang's formula.

        A retraction sends a running request back to the queue, for lack of memory. `running` is the
        number of requests that still run. Together they have decoded `decoded` of at most `max_new`
        answer tokens.
        """
        self._base = max(self._floor, min(1.0, (decoded + 20 * running) / (max_new + 1)))
        self._steps = 0
