"""The clients of a workload: they send requests, wait for the answers, and may give up."""

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from random import Random

from hicache.clock import NEVER, to_ns
from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.feeder import Release, Releases


class Clients:
    """Sends the requests that a feeder releases, and cancels those that take too long.

    The caller reports each request once it has ended, as answered or as dropped. `next_ns` is the
    time of the next arrival or timeout.
    """

    def __init__(
        self, feeder: Releases, *, late_ns: int = 0, patience_ns: Mapping[int, int] | None = None
    ) -> None:
        """Send the first requests of `feeder`.

        Args:
            feeder: decides when each request is released.
            late_ns: time in ns from the release of a request until it arrives.
            patience_ns: timeouts in ns after the release, by request id. Clients of other requests
                never give up.
        """
        self._feeder = feeder
        self._late_ns = late_ns
        self._patience_ns = patience_ns or {}
        self._numbers = count()
        self._sent: list[tuple[int, int, Request]] = []  # (release time, its number, request)
        self._timeouts: list[tuple[int, int]] = []  # (time, request id)
        self._engines: dict[int, int] = {}  # by unanswered request with a timeout
        self.next_ns = NEVER
        self._send(feeder.initial(), 0)

    def arrivals(self, now_ns: int) -> list[Release]:
        """Return the requests that arrive by `now_ns`, each with the time of its release."""
        come: list[Release] = []
        while self._sent and self._sent[0][0] + self._late_ns <= now_ns:
            released_ns, _, request = heappop(self._sent)
            come.append((released_ns, request))
        self._look()
        return come

    def wait(self, request_id: int, engine: int, since_ns: int) -> None:
        patience_ns = self._patience_ns.get(request_id)
        if patience_ns is not None:
            heappush(self._timeouts, (since_ns + patience_ns, request_id))
            self._engines[request_id] = engine
            self._look()

    def give_up(self, now_ns: int) -> list[tuple[int, int]]:
        """Return the requests whose timeouts end by `now_ns`, as pairs (engine, request id)."""
        gone: list[tuple[int, int]] = []
        while self._timeouts and self._timeouts[0][0] <= now_ns:
            request_id = heappop(self._timeouts)[1]
            gone.append((self._engines.pop(request_id), request_id))
            self._look()
        return gone

    def answered(self, request_id: int, now_ns: int) -> None:
        self._engines.pop(request_id, None)
        self._send(self._feeder.on_answered(request_id, now_ns), now_ns)

    def dropped(self, request_id: int, now_ns: int) -> list[Request]:
        """Report a request that gets no answer; return those that are dropped because of it."""
        self._engines.pop(request_id, None)
        dropped = self._feeder.on_dropped(request_id, now_ns)
        self._send(dropped.released, now_ns)
        return dropped.requests

    def _send(self, releases: Iterable[Release], now_ns: int) -> None:
        if self._feeder.is_over:  # those that think send nothing
            self._sent = sorted(each for each in self._sent if each[0] <= now_ns)
        for time_ns, request in releases:
            heappush(self._sent, (max(time_ns, now_ns), next(self._numbers), request))
        self._look()

    def _look(self) -> None:
        while self._timeouts and self._timeouts[0][1] not in self._engines:
            heappop(self._timeouts)  # the request has ended
        arrival_ns = self._sent[0][0] + self._late_ns if self._sent else NEVER
        timeout_ns = self._timeouts[0][0] if self._timeouts else NEVER
        self.next_ns = min(arrival_ns, timeout_ns)


def patience_of(
    requests: Iterable[Request], config: WorkloadConfig, *, seed: int
) -> dict[int, int]:
    """Return how long clients wait before they cancel, in ns after arrival, by request id.

    Only requests that may be canceled are in the dict; `config.abort_share` is their fraction. Each
    request is drawn on its own. So a smaller fraction leaves requests out, and does not change the
    others.
    """
    patience_ns: dict[int, int] = {}
    if not config.abort_share:
        return patience_ns
    for request in requests:
        draws = Random(f"{seed}/{request.id}")
        if draws.random() < config.abort_share:
            patience_ns[request.id] = max(to_ns(draws.expovariate(1 / config.patience_s)), 1)
    return patience_ns
