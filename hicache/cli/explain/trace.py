"""A run as a trace for Perfetto and chrome://tracing (Trace Event Format).

Each engine is a process, with one track for forward passes and one for each kind of copy. Requests
are another process, with one track each. Spans that overlap on a track are asynchronous events.
Times are microseconds since the start of the run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache.cli.explain.rerun import Rerun
from hicache.cli.explain.segments import Steps, segments_of
from hicache.observe.timeline import Step, Transfer
from hicache.results.metrics import RequestRecord

Event = dict[str, Any]
REQUESTS = 1  # process id of the requests; engines follow
FORWARD = 1  # an engine's track of forward passes


def write_trace(path: Path, run: Rerun) -> int:
    events = list(events_of(run))
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    return len(events)


def events_of(run: Rerun) -> Iterator[Event]:
    yield _named("process", "requests", REQUESTS)
    for engine in run.timeline.turns:
        yield _named("process", run.engine_name(engine), REQUESTS + 1 + engine)
    steps = {engine: Steps(run.timeline, engine) for engine in run.timeline.turns}
    for record in run.records.values():
        if record.id in run.timeline.lives:
            yield from _request(run, record, steps)
    for engine, each in steps.items():
        for number in {0, *(step.number for step in each.all)}:  # batches in flight overlap
            track = REQUESTS + 1 + engine, FORWARD + number
            name = f"forward passes, batch {number}" if number else "forward passes"
            yield _named("thread", name, *track)
            yield from _forward_passes(track, [s for s in each.all if s.number == number])
    for number, transfer in enumerate(run.timeline.transfers):
        if transfer.end_ns is not None:
            yield from _transfer(transfer, transfer.end_ns, number)


def _request(run: Rerun, record: RequestRecord, steps: Mapping[int, Steps]) -> Iterator[Event]:
    track = REQUESTS, record.id + 1
    assert record.finish_ns is not None
    yield _named("thread", f"request {record.id}", *track)
    name, about = f"request {record.id}", asdict(record)
    yield _span(name, "request", record.arrival_ns, record.finish_ns, track, **about)
    for segment in segments_of(record, run.timeline, steps):
        name = "held" if segment.cause == "held" else segment.part.replace("_", " ")
        if segment.part == "queue":
            name = f"queue: {segment.cause}"
        yield _span(name, segment.part, segment.start_ns, segment.end_ns, track)
    if record.first_token_ns is not None and record.finish_ns > record.first_token_ns:
        yield _span("answer", "decode", record.first_token_ns, record.finish_ns, track)


def _forward_passes(track: tuple[int, int], steps: Sequence[Step]) -> Iterator[Event]:
    passes: list[list[Step]] = []
    for step in steps:
        if passes and _goes_on(passes[-1][-1], step):
            passes[-1].append(step)
        else:
            passes.append([step])
    for each in passes:
        first, last = each[0], each[-1]
        num_tokens = sum(end - start for _, start, end in first.extends)
        yield _span(
            f"prefill {num_tokens} tokens" if first.extends else "decode",
            "forward",
            first.start_ns,
            last.end_ns,
            track,
            steps=len(each),
            prompts=[request_id for request_id, _, _ in first.extends],
            answers=len(first.decodes),
            waited_for_load_back_us=last.load_stall_ns / 1000,
        )


def _goes_on(before: Step, step: Step) -> bool:
    is_decode = not (before.extends or step.extends)
    return is_decode and before.end_ns == step.start_ns and before.decodes == step.decodes


def _transfer(transfer: Transfer, end_ns: int, number: int) -> Iterator[Event]:
    # a handover is on the tracks of both engines
    for engine in {transfer.engine, transfer.about.get("to", transfer.engine)}:
        process = REQUESTS + 1 + (engine or 0)
        common = _event(transfer.kind, "b", (process, FORWARD), transfer.about)
        common |= {"cat": transfer.kind, "id": number}
        yield {**common, "ts": transfer.start_ns / 1000}
        yield {**common, "ph": "e", "ts": end_ns / 1000}


def _span(
    name: str, category: str, start_ns: int, end_ns: int, track: tuple[int, int], **about: object
) -> Event:
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {**_event(name, "X", track, about), "cat": category, **times}


def _named(what: str, name: str, process: int, track: int = 0) -> Event:
    return _event(f"{what}_name", "M", (process, track), {"name": name})


def _event(name: str, phase: str, track: tuple[int, int], about: Mapping[str, object]) -> Event:
    return {"name": name, "ph": phase, "pid": track[0], "tid": track[1], "args": about}
