"""Service orders: the order in which the scheduler considers waiting requests.

An order is a class with `sort_key`. Its constructor takes the `scheduler` knobs and an estimate of
the computing time. The smallest key comes first, equal keys in order of submission. A request gets
its key when it is queued, and keeps it after a retraction.
"""

from collections.abc import Callable
from typing import Protocol

from hicache.cache.tree.node import MatchResult
from hicache.config import SchedulerConfig
from hicache.scheduler.request_state import RequestState

Estimate = Callable[[int, int], float]  # (cached, prompt) tokens -> seconds to compute the rest


class ServiceOrder(Protocol):
    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        """Sort key of a request, smallest first; `match` is its current match on any tier."""
        ...


class Fcfs:
    def __init__(self, config: SchedulerConfig, estimate_s: Estimate | None) -> None:
        pass

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        return req.number


class LongestPrefix:
    def __init__(self, config: SchedulerConfig, estimate_s: Estimate | None) -> None:
        pass

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        return -match.usable_len


class ShortestRemaining:
    """The least uncached work first, with aging.

    The key is the work in seconds plus `aging` times the submission time. The key of a request
    never changes: waiting is credited as a penalty on later requests.
    """

    def __init__(self, config: SchedulerConfig, estimate_s: Estimate | None) -> None:
        assert estimate_s is not None, "an order by work needs an estimate of it"
        self._aging = config.aging
        self._estimate_s = estimate_s

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        work = self._estimate_s(match.usable_len, req.target_len)
        return work + self._aging * req.submitted_ns * 1e-9


ORDERS: dict[str, Callable[..., ServiceOrder]] = {
    "fcfs": Fcfs,
    "longest_prefix": LongestPrefix,
    "shortest_remaining": ShortestRemaining,
}
