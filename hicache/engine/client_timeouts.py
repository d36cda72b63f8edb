"""Those who give up on a request that is not answered in time, in the order in which they do."""

import heapq
from collections.abc import Mapping

from hicache.request import Request
from hicache.scheduler.batch import Outcome


class ClientTimeouts:
    """Who waits for which request, and until when.

    Holds only requests that are here: nothing happens when the patience of an answered one ends.
    """

    def __init__(self, patience_ns: Mapping[int, int]) -> None:
        """`patience_ns`: from a request's arrival, by its id; who is not named waits for ever."""
        self._patience_ns = patience_ns
        self._line: list[tuple[int, int]] = []  # (when, request)
        self._engines: dict[int, int] = {}  # of the requests that are here
        self.next_ns: int | None = None  # when the next one gives up

    def arrived(self, request: Request, engine: int, now_ns: int) -> None:
        """A request has come."""
        patience_ns = self._patience_ns.get(request.id)
        if patience_ns is not None:
            heapq.heappush(self._line, (now_ns + patience_ns, request.id))
            self._engines[request.id] = engine
            self._look()

    def ended(self, outcome: Outcome) -> None:
        """Nobody waits for these any more."""
        for req in (*outcome.finished, *(req for req, _ in outcome.rejected)):
            self._engines.pop(req.request.id, None)
        self._look()

    def until(self, now_ns: int) -> list[tuple[int, int]]:
        """Who gives up by now: (engine, request)."""
        gone: list[tuple[int, int]] = []
        while self.next_ns is not None and self.next_ns <= now_ns:
            request_id = heapq.heappop(self._line)[1]
            gone.append((self._engines.pop(request_id), request_id))
            self._look()
        return gone

    def _look(self) -> None:
        while self._line and self._line[0][1] not in self._engines:
            heapq.heappop(self._line)
        self.next_ns = self._line[0][0] if self._line else None
