"""Service orders: the order in which the scheduler considers waiting requests.

The smallest key comes first, equal keys in order of submission. A request gets its key when it is
queued, and keeps it after a retraction.
"""

from collections.abc import Callable

from hicache.cache.tree.node import MatchResult
from hicache.policies.world import World
from hicache.scheduler.request_state import RequestState


class Fcfs:
    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        return 0.0  # requests with the same key keep their order


class LongestPrefix:
    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        return -match.usable_len


class ShortestRemaining:
    """Ranks waiting requests by the prompt work that is not cached, the least first.

    The rank is that work in seconds, plus the time of submission in seconds times `aging`. So a
    long prompt gets ahead of short ones that are submitted much later.
    """

    def __init__(self, world: World) -> None:
        self._aging = world.config.scheduler.aging
        self._seconds = world.seconds

    def sort_key(self, req: RequestState, match: MatchResult) -> float:
        work = self._seconds(match.usable_len, req.target_len)
        return work + self._aging * req.submitted_ns * 1e-9


ORDERS: dict[str, Callable[..., object]] = {
    "fcfs": Fcfs,
    "longest_prefix": LongestPrefix,
    "shortest_remaining": ShortestRemaining,
}
