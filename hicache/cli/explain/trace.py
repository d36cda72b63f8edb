"""A run as a trace for Perfetto and chrome://tracing (Trace Event Format).

Each engine is a process, with one track for forward passes and one for each kind of copy. Requests
are another process, with one track each. Spans that overlap on a track are asynchronous events.
Times are microseconds since the start of the run.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hicache.cli.explain.rerun import Rerun
from hicache.cli.explain.segments import Steps, segments_of
from hicache.observe.timeline import Step, Transfer
from hicache.results.metrics import RequestRecord

Event = dict[str, Any]
REQUESTS = 1  # process id of the requests; engines follow
FORWARD = 1  # an engine's track of forward passes
SPAN_NAMES = {
    "queue": "queue: {}",
    "storage_wait": "storage wait",
    "load_back": "load-back",
    "prefill": "prefill",
}


def write_trace(path: Path, run: Rerun) -> int:
    events = list(events_of(run))
    with path.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        file.write("\n]}\n")
    return len(events)


def events_of(run: Rerun) -> Iterator[Event]:
    yield _named("process", "requests", REQUESTS)
    for engine in run.timeline.turns:
        yield _named("process", f"engine {engine}", REQUESTS + 1 + engine)
        yield _named("thread", "forward passes", REQUESTS + 1 + engine, FORWARD)
    steps = {engine: Steps(run.timeline, engine) for engine in run.timeline.turns}
    for record in run.records.values():
        if record.id in run.timeline.lives:
            yield from _request(run, record, steps[record.engine])
    for engine, each in steps.items():
        yield from _forward_passes(engine, each.all)
    for number, transfer in enumerate(run.timeline.transfers):
        if transfer.end_ns is not None:
            yield from _transfer(transfer, transfer.end_ns, number)


def _request(run: Rerun, record: RequestRecord, steps: Steps) -> Iterator[Event]:
    life = run.timeline.lives[record.id]
    track = record.id + 1
    assert record.finish_ns is not None
    yield _named("thread", f"request {record.id}", REQUESTS, track)
    yield _span(
        f"request {record.id}",
        "request",
        record.arrival_ns,
        record.finish_ns,
        (REQUESTS, track),
        session=record.session_id,
        status=record.status.value,
        prompt_tokens=record.prompt_len,
        answer_tokens=record.output_len,
        device_hit_tokens=record.device_hit_len,
        host_hit_tokens=record.host_hit_len,
        storage_hit_tokens=record.storage_hit_len,
        computed_tokens=dict(record.computed_for),
    )
    for segment in segments_of(record, life, run.timeline.turns[record.engine], steps):
        name = "held" if segment.cause == "held" else SPAN_NAMES[segment.part]
        yield _span(
            name.format(segment.cause),
            segment.part,
            segment.start_ns,
            segment.end_ns,
            (REQUESTS, track),
        )
    if record.first_token_ns is not None and record.finish_ns > record.first_token_ns:
        where = (REQUESTS, track)
        yield _span("answer", "decode", record.first_token_ns, record.finish_ns, where)


def _forward_passes(engine: int, steps: Sequence[Step]) -> Iterator[Event]:
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
            (REQUESTS + 1 + engine, FORWARD),
            steps=len(each),
            prompts=[request_id for request_id, _, _ in first.extends],
            answers=len(first.decodes),
            waited_for_load_back_us=last.load_stall_ns / 1000,
        )


def _goes_on(before: Step, step: Step) -> bool:
    is_decode = not (before.extends or step.extends)
    return is_decode and before.end_ns == step.start_ns and before.decodes == step.decodes


def _transfer(transfer: Transfer, end_ns: int, number: int) -> Iterator[Event]:
    amounts = {"bytes": transfer.num_bytes, "pages": transfer.num_pages}
    known: Event = {name: amount for name, amount in amounts.items() if amount is not None}
    if transfer.request_id is not None:
        known["request"] = transfer.request_id
    common: Event = {
        "name": transfer.kind,
        "cat": transfer.kind,
        "id": number,
        "pid": REQUESTS + 1 + transfer.engine,
        "tid": FORWARD,
    }
    yield {**common, "ph": "b", "ts": transfer.start_ns / 1000, "args": known}
    yield {**common, "ph": "e", "ts": end_ns / 1000}


def _span(
    name: str, category: str, start_ns: int, end_ns: int, where: tuple[int, int], **args: object
) -> Event:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "pid": where[0],
        "tid": where[1],
        "args": args,
    }


def _named(what: str, name: str, process: int, track: int = 0) -> Event:
    return {
        "name": f"{what}_name",
        "ph": "M",
        "pid": process,
        "tid": track,
        "args": {"name": name},
    }
