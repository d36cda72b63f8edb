"""Decides when each request of a workload is released to the engine.

All times are nanoseconds since the start of the run. A root is a request that waits for no other.
The tree of a root holds all requests that wait for it, directly or not: its session, and the
sub-agents that the session started.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hicache.clock import NEVER, to_ns
from hicache.config import Arrivals, WorkloadConfig
from hicache.request import Request

Release = tuple[int, Request]  # (nanoseconds, request)


class Dropped(NamedTuple):
    """The consequences of a request that was rejected or aborted, and so gets no answer.

    `requests` would have waited for that answer, so they are dropped as well. With open arrivals,
    requests wait for no answer and the list is empty. `released` are pairs (time in ns, request):
    the requests that can start now because fewer others are active.
    """

    requests: list[Request]
    released: list[Release]


class Releases(Protocol):
    is_over: bool  # whether no further request is sent

    def initial(self) -> list[Release]: ...
    def on_answered(self, request_id: int, now_ns: int) -> list[Release]: ...
    def on_dropped(self, request_id: int, now_ns: int) -> Dropped: ...


class Feeder:
    """Decides when each request of a workload is released to the serving engine.

    The workload's setting `arrivals` determines the time of a release:

    - `open`: the request's arrival time in the trace.
    - `causal`: the arrival time, or the answer to the request's parent if that comes later. The
      parent is the previous turn of the session, or the request that started a sub-agent.
    - `closed`: `think_ns` nanoseconds after the answer to the parent. `concurrency` sessions are
      active at once, and a new session starts when one ends. The first sessions start `stagger_s`
      seconds apart.

    With causal and closed arrivals, a request also waits for the last answers of the sub-agents
    whose results it uses. The caller reports each request once, as answered or as dropped. Lists of
    releases are ordered by time, and then by request id.

    A closed loop may end before the workload: nothing is released from `end_s` seconds on, or once
    `end_jobs` trees have ended.
    """

    is_over = False

    def __init__(self, requests: Sequence[Request], config: WorkloadConfig) -> None:
        self._mode = config.arrivals
        self._requests = {request.id: request for request in requests}
        self._unsettled = set(self._requests)
        self._children: dict[int, list[Request]] = {}
        self._awaited: dict[int, int] = {}  # number of answers that a request still waits for
        self._root_of: dict[int, int] = {}
        self._tree_left: dict[int, int] = {}  # number of unsettled requests of each tree
        roots: list[Request] = []
        for request in sorted(requests, key=lambda r: (r.arrival_ns, r.id)):
            root_id = request.id
            if request.parent_id is None:
                roots.append(request)
            else:
                root_id = self._root_of.get(request.parent_id, -1)
                if root_id < 0:
                    raise ValueError(
                        f"request {request.id} follows request {request.parent_id}, "
                        f"which does not come before it in the workload"
                    )
                for before in (request.parent_id, *request.joins):
                    self._children.setdefault(before, []).append(request)
                self._awaited[request.id] = 1 + len(request.joins)
            self._root_of[request.id] = root_id
            self._tree_left[root_id] = self._tree_left.get(root_id, 0) + 1
        self._waiting_roots = deque(roots)
        self._free_places = config.concurrency
        self._stagger_ns = to_ns(config.stagger_s)
        self._end_ns = NEVER if config.end_s is None else to_ns(config.end_s)
        self._jobs_left = config.end_jobs

    def initial(self) -> list[Release]:
        """Return the first requests to release, each with its time in ns.

        These requests wait for no answer. The caller calls this method once, before all others.
        """
        if self._mode is Arrivals.closed:
            trees = enumerate(self._start_trees(0))
            return self._before_end(
                [(place * self._stagger_ns, request) for place, (_, request) in trees]
            )
        first = self._requests.values() if self._mode is Arrivals.open else self._waiting_roots
        released = [(request.arrival_ns, request) for request in first]
        self._waiting_roots.clear()
        return _in_order(released)

    def on_answered(self, request_id: int, now_ns: int) -> list[Release]:
        """Return the requests that the answer to `request_id` releases, each with its time in ns.

        `now_ns` is the time of the answer. No request is released earlier.
        """
        self._settle(request_id)
        released: list[Release] = []
        for child in self._children.get(request_id, ()):
            self._awaited[child.id] -= 1
            if self._awaited[child.id] or child.id not in self._unsettled:
                continue
            if self._mode is Arrivals.causal:
                released.append((max(child.arrival_ns, now_ns), child))
            elif self._mode is Arrivals.closed:
                released.append((now_ns + child.think_ns, child))
        return self._before_end(_in_order(released + self._start_trees(now_ns)))

    def on_dropped(self, request_id: int, now_ns: int) -> Dropped:
        """Drop a rejected or aborted request, and all requests that wait for its answer.

        Return those waiting requests, and the requests that can start at `now_ns` because a session
        has ended.
        """
        self._settle(request_id)
        gone: list[Request] = []
        line = deque(() if self._mode is Arrivals.open else self._children.get(request_id, ()))
        while line:
            request = line.popleft()
            # it was dropped already, since it joins several dropped requests
            if request.id not in self._unsettled:
                continue
            line.extend(self._children.get(request.id, ()))
            self._settle(request.id)
            gone.append(request)
        gone.sort(key=lambda request: request.id)
        return Dropped(gone, self._before_end(self._start_trees(now_ns)))

    def _settle(self, request_id: int) -> None:
        settle(self._unsettled, request_id)
        root_id = self._root_of[request_id]
        self._tree_left[root_id] -= 1
        if not self._tree_left[root_id]:
            self._free_places += 1
            if self._jobs_left is not None:
                self._jobs_left -= 1
                self.is_over = self._jobs_left <= 0

    def _before_end(self, releases: list[Release]) -> list[Release]:
        if self.is_over:
            return []
        return [each for each in releases if each[0] < self._end_ns]

    def _start_trees(self, now_ns: int) -> list[Release]:
        started: list[Release] = []
        while self._mode is Arrivals.closed and self._free_places and self._waiting_roots:
            self._free_places -= 1
            started.append((now_ns, self._waiting_roots.popleft()))
        return started


def settle(unsettled: set[int], request_id: int) -> None:
    if request_id not in unsettled:
        raise ValueError(
            f"request {request_id} was already answered or dropped, or is not part of this workload"
        )
    unsettled.remove(request_id)


def _in_order(releases: list[Release]) -> list[Release]:
    return sorted(releases, key=lambda release: (release[0], release[1].id))
