"""Events of the scheduler, for the listener that also receives those of the cache."""

from typing import Protocol

from hicache.cache.tree.events import CacheListener
from hicache.cache.tree.node import MatchResult
from hicache.scheduler.request_state import RequestState


class Listener(CacheListener, Protocol):
    """Receives the events of one engine: of its cache, and of its requests."""

    def matched(self, req: RequestState, match: MatchResult) -> None:
        """The request was matched: first when it was submitted, then at each admission decision."""
        ...

    def starting(self, req: RequestState, match: MatchResult) -> None:
        """The request is about to take what `match` found; nothing has been taken yet.

        The admission may still fail; then the event is repeated later. `match` may be shorter than
        the last one that was reported as matched.
        """
        ...

    def admitted(self, req: RequestState) -> None:
        """The request starts at `req.cached_len`; at its first admission `admitted_ns` is None."""
        ...

    def canceled(self, req: RequestState) -> None:
        """The request was rejected or aborted after its submission."""
        ...
