"""Explain a run: why a request was slow, and why its tokens were computed.

hicache explain RUN                     the three slowest requests
hicache explain RUN --slowest 10
hicache explain RUN --request 412
hicache explain RUN --session chat-7    all requests of a session, by its id in the trace
hicache explain RUN --perfetto trace.json

The program replays a simulated run from its config.yaml and records all events, which takes about
twice as long as the run did. The trace opens in https://ui.perfetto.dev and in chrome://tracing. A
run that names a policy, a storage engine or a tokenizer of its user needs --trust, which runs that
code; its module is looked for in the current directory and on PYTHONPATH.
"""

from collections.abc import Sequence
from pathlib import Path

from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.explain.rerun import Rerun, rerun
from hicache.cli.explain.story import Storyteller
from hicache.cli.explain.trace import write_trace
from hicache.results.metrics import RequestRecord


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache explain", __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="directory of a simulated run")
    add(
        "--request",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="id of a request to explain; may be repeated",
    )
    add(
        "--session",
        action="append",
        default=[],
        metavar="ID",
        help="id of a session, as the trace or the results name it; may be repeated",
    )
    add("--slowest", type=int, metavar="COUNT", help="explain the slowest by TTFT (default 3)")
    add("--trust", action="store_true", help="run the classes and functions that the run names")
    add("--perfetto", type=Path, metavar="FILE", help="write a trace of the run")
    options = parser.parse_args(arguments)
    with in_one_sentence():
        run = rerun(options.run, trust=options.trust)
        slowest = options.slowest
        if slowest is None:
            slowest = 0 if options.request or options.session or options.perfetto else 3
        requests = [*options.request, *requests_of(run, options.session)]
        for line in lines(run, requests, slowest):
            print(line)
        if options.perfetto is not None:
            num_events = write_trace(options.perfetto, run)
            print(f"{num_events:,} events in {options.perfetto}")


def requests_of(run: Rerun, sessions: Sequence[str]) -> list[int]:
    found = []
    for session in sessions:
        names = (record for record in run.records.values() if session in _names(record))
        numbers = [record.id for record in names]
        if not numbers:
            some = sorted({_names(record)[0] for record in run.records.values()})[:3]
            raise ValueError(f"the run has no session {session}; it has {', '.join(some)}, …")
        found += numbers
    return found


def _names(record: RequestRecord) -> tuple[str, ...]:
    return (record.session_name or str(record.session_id), str(record.session_id))


def lines(run: Rerun, requests: Sequence[int], slowest: int) -> list[str]:
    unknown = [number for number in requests if number not in run.records]
    if unknown:
        raise ValueError(
            f"the run has no request {unknown[0]}: request ids go from {min(run.records)} to "
            f"{max(run.records)}"
        )
    chosen: list[RequestRecord] = [run.records[number] for number in requests]
    answered = [record for record in run.records.values() if record.ttft_ns is not None]
    chosen += sorted(answered, key=lambda record: (-(record.ttft_ns or 0), record.id))[:slowest]
    told = []
    if run.differences:
        told.append(
            f"the replay differs from the stored run ({', '.join(run.differences[:3])}): the code "
            "or the trace has changed; the explanations below are those of the replay"
        )
    teller = Storyteller(run)
    for record in chosen:
        told += ["", *teller.tell(record)]
    return told
