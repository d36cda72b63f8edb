"""Service orders: the order in which the scheduler considers waiting requests.

The smallest key comes first, equal keys in order of submission. A request gets its key when it is
queued, and keeps it after a retraction.
"""

from collections.abc import Callable

from hicache.cache.tree.node import MatchResult
from hicache.policies.world import World
from hicache.scheduler.request_state import RequestState

AGING = 0.1  # seconds of work for each second that a request has waited, against starvation
SortKey = Callable[[RequestState, MatchResult], float]


def fcfs(world: World) -> SortKey:
    return lambda req, match: 0.0  # requests with the same key keep their order


def longest_prefix(world: World) -> SortKey:
    return lambda req, match: -match.usable_len


def shortest_remaining(world: World) -> SortKey:
    """Rank waiting requests by the prompt work that is not cached, the least first.

    The rank is that work in seconds, plus the time of submission in seconds times
    `AGING`. So a long prompt gets ahead of short ones that are submitted much later.
    """
    seconds = world.seconds

    def sort_key(req: RequestState, match: MatchResult) -> float:
        return seconds(match.usable_len, req.target_len) + AGING * req.submitted_ns * 1e-9

    return sort_key


ORDERS: dict[str, Callable[[World], SortKey]] = {
    "fcfs": fcfs,
    "longest_prefix": longest_prefix,
    "shortest_remaining": shortest_remaining,
}
