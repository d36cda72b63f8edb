"""What a request waited for until its first token, split into segments."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hicache.observe.timeline import Step, Timeline, Turn
from hicache.results.metrics import RequestRecord
from hicache.scheduler.request_state import RequestState


class Segment(NamedTuple):
    """A time interval before a request's first token, and what the request waited for.

    Attributes:
        part: `queue`, `storage_wait`, `load_back` (from host to device) or `prefill`.
        cause: what the request waited for in this part, such as free KV pages.
        start_ns, end_ns: the interval, in nanoseconds since the start of the run.
        first: the id of the request at the head of the queue, if it blocked the queue; else None.
    """

    part: str
    cause: str
    start_ns: int
    end_ns: int
    first: int | None = None

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


class Steps:
    def __init__(self, timeline: Timeline, engine: int) -> None:
        self.all = [step for step in timeline.steps if step.engine == engine]
        self._ends = [step.end_ns for step in self.all]
        self._extending: dict[int, list[Step]] = {}
        for step in self.all:
            for request_id, _, _ in step.extends:
                self._extending.setdefault(request_id, []).append(step)

    def during(self, start_ns: int, end_ns: int) -> Iterator[Step]:
        for step in self.all[bisect_right(self._ends, start_ns) :]:
            if step.start_ns >= end_ns:
                return
            yield step

    def extending(self, request_id: int, until_ns: int) -> list[Step]:
        steps = self._extending.get(request_id, [])
        return [step for step in steps if step.end_ns <= until_ns]


def segments_of(
    record: RequestRecord, life: RequestState, turns: Sequence[Turn], steps: Steps
) -> list[Segment]:
    """Split the time from a request's arrival to its first token, or to its abort, by cause.

    The segments are in order of time and leave no gap. A forward pass may wait for pages from the
    host; this wait is always shown at the start of the pass.

    Args:
        record: the times of the request.
        life: the final scheduler state of the request.
        turns: what the queue of the engine waited for, and since when, in order of time.
        steps: the forward passes of the engine.
    """
    until_ns = record.finish_ns if record.first_token_ns is None else record.first_token_ns
    assert until_ns is not None
    admitted_ns = until_ns if life.admitted_ns is None else life.admitted_ns
    segments = [Segment("queue", "step", record.arrival_ns, life.looked_ns)]
    at_ns = life.looked_ns
    for first_ns, last_ns in life.storage_waits:
        if first_ns >= admitted_ns:  # a wait after a retraction
            break
        segments += _queued(turns, at_ns, first_ns)
        segments.append(Segment("storage_wait", "prefetch", first_ns, last_ns))
        at_ns = last_ns
    segments += _queued(turns, at_ns, admitted_ns)
    at_ns = admitted_ns
    for step in steps.extending(record.id, until_ns):
        start_ns = max(step.start_ns, at_ns)  # chunks may overlap on pipeline stages
        computing_ns = min(max(step.start_ns + step.load_stall_ns, start_ns), step.end_ns)
        segments.append(Segment("prefill", "held", at_ns, start_ns))
        segments.append(Segment("load_back", "layers", start_ns, computing_ns))
        segments.append(Segment("prefill", "step", computing_ns, step.end_ns))
        at_ns = step.end_ns
    segments.append(Segment("prefill", "held", at_ns, until_ns))
    return [segment for segment in segments if segment.length_ns]


def _queued(turns: Sequence[Turn], start_ns: int, end_ns: int) -> Iterator[Segment]:
    place = max(bisect_right(turns, start_ns, key=lambda turn: turn.at_ns) - 1, 0)
    while start_ns < end_ns:
        next_ns = turns[place + 1].at_ns if place + 1 < len(turns) else end_ns
        turn = turns[place]
        yield Segment("queue", turn.lacks.cause, start_ns, min(next_ns, end_ns), turn.lacks.first)
        start_ns = min(next_ns, end_ns)
        place += 1
