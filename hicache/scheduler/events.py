"""Events of the scheduler, for the listener that also receives the cache's events."""

from typing import Protocol

from hicache.cache.tree.events import CacheListener
from hicache.cache.tree.node import MatchResult
from hicache.scheduler.request_state import RequestState


class Listener(CacheListener, Protocol):
    """Receives the events of one engine: those of its cache and of its requests."""

    def matched(self, req: RequestState, match: MatchResult) -> None:
        """The request was matched: at its submission, and at each admission decision."""
        ...

    def starting(self, req: RequestState, match: MatchResult) -> None:
        """The request is about to acquire what `match` found.

        The admission may still fail; then the event is repeated later. `match` may be shorter than
        the last one that `matched` reported.
        """
        ...

    def admitted(self, req: RequestState) -> None:
        """The request starts at `req.cached_len`; `admitted_ns` is None at its first admission."""
        ...

    def canceled(self, req: RequestState) -> None: ...
