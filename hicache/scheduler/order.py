"""In which order the scheduler looks at waiting requests.

An order is any class that is built with the `scheduler` knobs and an estimate of computing, and
has `sort_key`: the smallest is looked at first, equal ones as they came. A request is given one
when it is queued, and keeps it when it is sent back.
"""

from collections.abc import Callable
from typing import Protocol

from hicache.cache.tree.node import MatchResult
from hicache.config import SchedulerConfig
from hicache.scheduler.request_state import RequestState

Estimate = Callable[[int, int], float]  # (cached, prompt) tokens: seconds that the rest takes


class ServiceOrder(Protocol):
    """Ranks requests."""

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        """What it is sorted by; `match`: what of its prompt is held anywhere, at this moment."""
        ...


class Fcfs:
    """As they came."""

    def __init__(self, config: SchedulerConfig, estimate_s: Estimate | None) -> None:
        pass

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        """The number of its submission."""
        return req.number


class LongestPrefix:
    """The longest usable prefix first."""

    def __init__(self, config: SchedulerConfig, estimate_s: Estimate | None) -> None:
        pass

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        """Its length, the other way round."""
        return -match.usable_len


class ShortestRemaining:
    """The least uncached work first, with aging.

    Waiting forgives work at the rate `aging`, for all alike: so a key can stand still, and work
    that came later counts for more instead.
    """

    def __init__(self, config: SchedulerConfig, estimate_s: Estimate | None) -> None:
        assert estimate_s is not None, "an order by work needs an estimate of it"
        self._aging = config.aging
        self._estimate_s = estimate_s

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        """Seconds of work, and of lateness."""
        work = self._estimate_s(match.usable_len, req.target_len)
        return work + self._aging * req.submitted_ns * 1e-9


ORDERS: dict[str, Callable[..., ServiceOrder]] = {
    "fcfs": Fcfs,
    "longest_prefix": LongestPrefix,
    "shortest_remaining": ShortestRemaining,
}
