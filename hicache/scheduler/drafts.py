"""How many tokens each decode step of a request gains where a draft model proposes some."""

from collections.abc import Iterable
from math import log

from hicache.config import SpeculationConfig
from hicache.scheduler.request_state import RequestState

_MASK = (1 << 64) - 1


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
        return 1 + min(int(log(self._uniform(req, number)) / log(rate)), config.drafts)

    def _uniform(self, req: RequestState, number: int) -> float:
        # in (0, 1]: the three numbers, mixed as in SplitMix64
        mixed = (self._seed * 0x9E3779B97F4A7C15 + req.request.id) * 0xD1342543DE82EF95 + number
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed &= _MASK
            mixed = (mixed ^ mixed >> shift) * factor
        return ((mixed & _MASK) + 1) / (_MASK + 1)


def expected_tokens(rate: float, num_drafts: int) -> float:
    """Return the mean tokens of a step; a draft is accepted with `rate` if the last one was."""
    return sum(rate**place for place in range(num_drafts + 1))
