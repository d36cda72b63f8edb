"""What a request waited for until its first token, split into segments."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hicache.observe.timeline import Step, Timeline, Turn
from hicache.results.metrics import RequestRecord
from hicache.scheduler.handover import Handover
from hicache.scheduler.request_state import RequestState


class Segment(NamedTuple):
    """A time interval before a request's first token, and what the request waited for.

    Attributes:
        part: `queue`, `storage_wait`, `load_back` (from host to device) or `prefill`; with
            separate engines also `transfer` and `restore`.
        cause: what the request waited for in this part, such as free KV pages.
        start_ns, end_ns: the interval, in nanoseconds since the start of the run.
        engine: the number of the engine where it waited.
        first: the id of the request at the head of the queue, if it blocked the queue; else None.
    """

    part: str
    cause: str
    start_ns: int
    end_ns: int
    engine: int
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
    record: RequestRecord, timeline: Timeline, steps: Mapping[int, Steps]
) -> list[Segment]:
    """Split the time from a request's arrival to its first token, or to its abort, by cause.

    The segments are in order of time and leave no gap. A forward pass may wait for pages from the
    host; this wait is always shown at the start of the pass.

    Args:
        record: the times of the request.
        timeline: the events of the run.
        steps: the forward passes of each engine.
    """
    life, arrival_ns = timeline.lives[record.id], record.arrival_ns
    until_ns = record.finish_ns if record.first_token_ns is None else record.first_token_ns
    assert until_ns is not None
    admitted_ns = until_ns if life.admitted_ns is None else life.admitted_ns
    attempts = attempts_of(life, until_ns)
    looked_ns = arrival_ns if attempts else life.looked_ns
    segments = [Segment("queue", "step", arrival_ns, looked_ns, record.engine)]
    stays = [(looked_ns, record.engine)]  # in which queue it is, from when on
    for each in attempts:
        stays += [(each.begun_ns or 0, each.prefill), (each.ended_ns or until_ns, record.engine)]
    waits = [wait for wait in life.storage_waits if wait[0] < admitted_ns]  # none after retraction
    for (at_ns, engine), (end_ns, _) in pairwise([*stays, (admitted_ns, 0)]):
        last_ns = min(end_ns, admitted_ns)
        for first_ns, wait_end_ns in waits:
            if at_ns <= first_ns < last_ns:
                segments += _queued(timeline.turns[engine], at_ns, first_ns, engine)
                at_ns = min(wait_end_ns, last_ns)
                segments.append(Segment("storage_wait", "prefetch", first_ns, at_ns, engine))
        segments += _queued(timeline.turns[engine], at_ns, last_ns, engine)
    segments += _computed(record, attempts, steps, admitted_ns, until_ns)
    return [segment for segment in segments if segment.length_ns]


def attempts_of(life: RequestState, until_ns: int) -> list[Handover]:
    """Return the attempts of separate engines to compute the prompt that began before a time."""
    return [each for each in life.handovers if (each.begun_ns or 0) < until_ns]


def steps_of_prompt(
    record: RequestRecord, attempts: Sequence[Handover], steps: Mapping[int, Steps], until_ns: int
) -> list[Step]:
    """Return the steps that computed parts of a prompt and ended by a time, by engine."""
    engines = dict.fromkeys([each.prefill for each in attempts] or [record.engine])
    return [step for each in engines for step in steps[each].extending(record.id, until_ns)]


def _computed(
    record: RequestRecord,
    attempts: Sequence[Handover],
    steps: Mapping[int, Steps],
    at_ns: int,
    until_ns: int,
) -> Iterator[Segment]:
    # from the admission to the first token
    last = attempts[-1] if attempts else None
    computed_ns = until_ns if last is None or last.computed_ns is None else last.computed_ns
    engine = last.prefill if last is not None else record.engine
    extending = steps_of_prompt(record, attempts, steps, computed_ns)
    for step in sorted(extending, key=lambda each: each.end_ns):
        start_ns = max(step.start_ns, at_ns)  # chunks may overlap on pipeline stages
        computing_ns = min(max(step.start_ns + step.load_stall_ns, start_ns), step.end_ns)
        yield Segment("prefill", "held", at_ns, start_ns, step.engine)
        yield Segment("load_back", "layers", start_ns, computing_ns, step.engine)
        yield Segment("prefill", "step", computing_ns, step.end_ns, step.engine)
        at_ns = step.end_ns
    yield Segment("prefill", "held", at_ns, computed_ns, engine)
    if last is not None:
        arrived_ns = min(last.arrived_ns or last.ended_ns or until_ns, until_ns)
        yield Segment("transfer", "link", computed_ns, arrived_ns, record.engine)
        cause = "held" if last.is_dead else "promised"
        yield Segment("restore", cause, arrived_ns, until_ns, record.engine)


def _queued(turns: Sequence[Turn], start_ns: int, end_ns: int, engine: int) -> Iterator[Segment]:
    place = max(bisect_right(turns, start_ns, key=lambda turn: turn.at_ns) - 1, 0)
    while start_ns < end_ns:
        next_ns = turns[place + 1].at_ns if place + 1 < len(turns) else end_ns
        lacks, next_ns = turns[place].lacks, min(next_ns, end_ns)
        yield Segment("queue", lacks.cause, start_ns, next_ns, engine, lacks.first)
        start_ns = next_ns
        place += 1
