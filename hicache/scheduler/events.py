"""Events of the scheduler, for the listener that also receives the cache's events."""

from typing import Protocol

from hicache.cache.tree.events import CacheListener
from hicache.cache.tree.node import MatchResult
from hicache.scheduler.request_state import RequestState


class Listener(CacheListener, Protocol):
    """Receives the events of one serving engine: those of its cache and those of its requests."""

    def matched(self, req: RequestState, match: MatchResult) -> None:
        """Called after the cache was searched for the prompt of a request; `match` is the result.

        The search happens when the request is submitted, and each time the scheduler considers it.
        """

    def starting(self, req: RequestState, match: MatchResult) -> None:
        """Called just before a request takes the cached prefix that `match` describes.

        The request may still fail to start; this event then comes again later. The prefix may be
        shorter than the one that `matched` reported, if only the shorter one leaves enough memory.
        """

    def admitted(self, req: RequestState) -> None:
        """Called when a request starts to run, with `req.cached_len` tokens from the cache.

        `req.admitted_ns` is None if the request starts for the first time.
        """

    def canceled(self, req: RequestState) -> None: ...
