"""Releases requests as the benches of serving engines do.

`RoundFeeder`: clients ask in rounds. The next client is drawn from those that are ready (the
default of SGLang's bench_multiturn), or is the first of them. At most `parallel` requests run at a
time, and the gaps between releases are those of a Poisson process of `request_rate` per second. A
barrier delays the next round until the last client has its answer.

`StageFeeder`: each stage of the load waits for the end of the previous one, as in inference-perf.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import numpy as np

from hicache.clock import to_ns
from hicache.config import PrefixesConfig, RoundsConfig, WorkloadConfig
from hicache.request import Request
from hicache.workload.feeder import Dropped, Feeder, Release, Releases, settle


def make_feeder(requests: Sequence[Request], config: WorkloadConfig, *, seed: int) -> Releases:
    is_staged = isinstance(config, PrefixesConfig) and config.drain
    ends = config.end_jobs is not None or config.end_s is not None
    if ends and (is_staged or isinstance(config, RoundsConfig) or config.is_timed):
        raise ValueError(
            "workload.end_jobs and workload.end_s need workload.arrivals=closed without rounds or "
            f"workload.drain, got workload.arrivals={config.arrivals.name} of {config.kind}"
        )
    if isinstance(config, RoundsConfig):
        return RoundFeeder(requests, config, seed=seed)
    return StageFeeder(requests, config) if is_staged else Feeder(requests, config)


def stage_at(arrival_ns: int, config: WorkloadConfig) -> int:
    """Return the index of the load stage in which a request arrives.

    A load stage is a period with a fixed request rate. Arrivals after the planned end of the last
    stage count as part of it.
    """
    # the last stage has no end: a jitter may move its last requests beyond the planned end
    return bisect_right([to_ns(end_s) for end_s in config.stage_ends_s[:-1]], arrival_ns)


def stages_of(requests: Sequence[Request], config: WorkloadConfig) -> dict[int, int]:
    """Return the index of the load stage of each request, from 0, by request id.

    If clients ask in rounds, the stage of a request is its round. If a request rate lasts until
    all its requests have ended (`workload.drain`), the stage is the index of the rate. The dict is
    empty if the rate changes at fixed times, or if the load has no stages.
    """
    if isinstance(config, RoundsConfig):
        return rounds_of(requests)
    if config.is_timed or not config.stage_ends_s:
        return {}
    return {each.id: stage_at(each.arrival_ns, config) for each in requests}


def rounds_of(requests: Sequence[Request]) -> dict[int, int]:
    rounds: dict[int, int] = {}
    for request in requests:
        parent = request.parent_id
        rounds[request.id] = 0 if parent is None else rounds.get(parent, -1) + 1
    return rounds


class RoundFeeder:
    is_over = False

    def __init__(self, requests: Sequence[Request], config: RoundsConfig, *, seed: int) -> None:
        self._rng = np.random.default_rng((seed, 2))
        gaps = np.random.default_rng((seed, 3)).exponential(1 / config.request_rate, len(requests))
        self._gaps_ns = deque(to_ns(gap) for gap in gaps.tolist())
        self._parallel = config.in_flight
        self._barrier = config.barrier
        self._draws = config.ready_queue == "random"
        self._unsettled = {request.id for request in requests}
        self._child = {each.parent_id: each for each in requests if each.parent_id is not None}
        self._round = rounds_of(requests)
        # number of unsettled requests, by round
        self._left = [0] * (1 + max(self._round.values(), default=0))
        for number in self._round.values():
            self._left[number] += 1
        self._ready = [request for request in requests if request.parent_id is None]
        self._held: list[Request] = []  # delayed by the barrier
        self._in_flight = 0
        self._free_ns = 0  # earliest time of the next release

    def initial(self) -> list[Release]:
        return self._send(0)

    def on_answered(self, request_id: int, now_ns: int) -> list[Release]:
        self._settle(request_id)
        self._in_flight -= 1
        child = self._child.get(request_id)
        if child is not None:
            self._held.append(child)
        return self._send(now_ns)

    def on_dropped(self, request_id: int, now_ns: int) -> Dropped:
        self._settle(request_id)
        self._in_flight -= 1
        gone: list[Request] = []
        child = self._child.get(request_id)
        while child is not None:
            self._settle(child.id)
            gone.append(child)
            child = self._child.get(child.id)
        return Dropped(gone, self._send(now_ns))

    def _settle(self, request_id: int) -> None:
        settle(self._unsettled, request_id)
        self._left[self._round[request_id]] -= 1

    def _send(self, now_ns: int) -> list[Release]:
        held, self._held = self._held, []
        for request in held:
            waits = self._barrier and self._left[self._round[request.id] - 1]
            (self._held if waits else self._ready).append(request)
        sent: list[Release] = []
        while self._ready and (self._parallel is None or self._in_flight < self._parallel):
            self._free_ns = max(self._free_ns, now_ns) + self._gaps_ns.popleft()
            place = int(self._rng.integers(len(self._ready))) if self._draws else 0
            sent.append((self._free_ns, self._ready.pop(place)))
            self._in_flight += 1
        return sent


class StageFeeder:
    """Decides when requests are released to the serving engine, one load stage after another.

    A load stage is a period with a fixed request rate. A stage starts at its planned time, but not
    before all requests of the earlier stages have ended. If a stage starts late, all its requests
    are delayed equally.
    """

    is_over = False

    def __init__(self, requests: Sequence[Request], config: WorkloadConfig) -> None:
        ends_ns = [to_ns(end_s) for end_s in config.stage_ends_s]
        self._starts_ns = [0, *ends_ns[:-1]]
        self._stages: list[list[Request]] = [[] for _ in ends_ns]
        for request in requests:
            self._stages[stage_at(request.arrival_ns, config)].append(request)
        self._next = 0  # next stage
        self._left: set[int] = set()  # unsettled requests of the current stage
        self._late_ns = 0  # delay of the current stage

    def initial(self) -> list[Release]:
        return self._settled(0)

    def on_answered(self, request_id: int, now_ns: int) -> list[Release]:
        self._left.remove(request_id)
        return self._settled(now_ns)

    def on_dropped(self, request_id: int, now_ns: int) -> Dropped:
        return Dropped([], self.on_answered(request_id, now_ns))

    def _settled(self, now_ns: int) -> list[Release]:
        while not self._left and self._next < len(self._stages):
            requests, start_ns = self._stages[self._next], self._starts_ns[self._next]
            self._next += 1
            self._late_ns = max(self._late_ns, now_ns - start_ns)
            self._left = {request.id for request in requests}
            released = [(request.arrival_ns + self._late_ns, request) for request in requests]
            if released:
                return released
        return []
