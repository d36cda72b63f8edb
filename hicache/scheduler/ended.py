"""The requests that ended since the engine last asked."""

from hicache.cache.prefix_cache import PrefixCache
from hicache.scheduler.batch import NOTHING, Outcome
from hicache.scheduler.events import Listener
from hicache.scheduler.request_state import RequestState


class Ended:
    """Collects the requests that end, and reports each to the eviction policy and the listener."""

    def __init__(self, cache: PrefixCache, listener: Listener | None) -> None:
        self.outcome = Outcome()
        self._entries = cache.tree.entries
        self._listener = listener

    def finish(self, req: RequestState) -> None:
        self._report(req, "finished")
        self.outcome.finished.append(req)

    def reject(self, req: RequestState, reason: str) -> None:
        self._cancel(req, "rejected")
        self.outcome.rejected.append((req, reason))

    def abort(self, req: RequestState) -> None:
        self._cancel(req, "aborted")
        self.outcome.aborted.append(req)

    def take(self) -> Outcome:
        outcome = self.outcome
        if not (outcome.finished or outcome.rejected or outcome.aborted):
            return NOTHING
        self.outcome = Outcome()
        return outcome

    def _cancel(self, req: RequestState, how: str) -> None:
        if self._listener is not None:
            self._listener.canceled(req)
        self._report(req, how)

    def _report(self, req: RequestState, how: str) -> None:
        if self._entries is not None:
            self._entries.finished(req.request, how)
