"""How many tokens each decode step of a request gains where a draft model proposes some."""

from collections.abc import Iterable
from math import log

from xxhash import xxh3_64_intdigest

from hicache.config import SpeculationConfig
from hicache.scheduler.request_state import RequestState


class Drafts:
    """Draws the tokens that decode steps gain: those of the draft that are accepted, and one more.

    A draw depends on the seed, the request, the number of its step and its length alone, so that
    several steps may be drawn before they run.
    """

    def __init__(self, config: SpeculationConfig, seed: int) -> None:
        self._config = config
        self._seed = seed

    def draw(self, reqs: Iterable[RequestState], num_steps: int) -> None:
        """Draw the next `num_steps` decode steps of requests, or those up to their last."""
        for req in reqs:
            req.most_gain = self._config.drafts + 1
            left = req.left - sum(req.gains)
            while left > 0 and len(req.gains) < num_steps:
                gain = min(self._gain(req, req.kv_len + req.left - left), left)
                req.gains.append(gain)
                left -= gain

    def _gain(self, req: RequestState, length: int) -> int:
        # of the step that follows those drawn, at this length
        config, number = self._config, req.num_verified + len(req.gains)
        cold_share = min(req.cold_len / length, 1.0)
        rate = config.acceptance + (config.cold_acceptance - config.acceptance) * cold_share
        if config.accepted == "mean":
            mean = expected_tokens(rate, config.drafts)
            return int(mean * (number + 1)) - int(mean * number)
        if not 0.0 < rate < 1.0:
            return 1 + config.drafts * int(rate)
        digest = xxh3_64_intdigest(f"{self._seed} {req.request.id} {number}".encode())
        drawn = (digest + 1) / 2**64  # in (0, 1]
        return 1 + min(int(log(drawn) / log(rate)), config.drafts)


def expected_tokens(rate: float, num_drafts: int) -> float:
    """Return the mean tokens of a step; a draft is accepted with `rate` if the last one was."""
    return sum(rate**place for place in range(num_drafts + 1))
