"""What the Trace Event Format demands of the events that we write."""

from collections import defaultdict
from typing import Any

NUMBER = (int, float)
WHERE = {"name": str, "pid": int, "tid": int}
SPAN = WHERE | {"cat": str, "ts": NUMBER}
# by phase: the fields an event must have and may have, and of which type
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "X": (SPAN | {"dur": NUMBER}, {"args": dict}),
    "M": (WHERE | {"args": dict}, {}),
    "b": (SPAN | {"id": int}, {"args": dict}),
    "e": (SPAN | {"id": int}, {}),
}


class TraceFormatError(AssertionError):
    """A trace is not what the format wants."""


def check_trace(trace: Any) -> None:
    """Check every event, that spans of a track lie inside or beside each other, and that what
    begins ends.

    Raises:
        TraceFormatError: one is wrong, with the event.
    """
    _hold(isinstance(trace, dict) and isinstance(trace.get("traceEvents"), list), trace)
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    begun: dict[tuple[str, int, int], float] = {}
    named: set[tuple[str, int, int]] = set()
    for event in trace["traceEvents"]:
        _check_fields(event)
        phase = event["ph"]
        if phase == "M":
            _hold(event["name"] in ("process_name", "thread_name"), event)
            _hold(set(event["args"]) == {"name"}, event)
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        _hold(event["ts"] >= 0, event)
        _hold(("process_name", event["pid"], 0) in named, event)
        if phase == "X":
            _hold(event["dur"] >= 0, event)
            _hold(("thread_name", event["pid"], event["tid"]) in named, event)
            first = round(event["ts"] * 1000)
            spans[event["pid"], event["tid"]].append((first, first + round(event["dur"] * 1000)))
            continue
        key = (event["cat"], event["id"], event["pid"])
        if phase == "b":
            _hold(key not in begun, event)
            begun[key] = event["ts"]
        else:
            _hold(key in begun and begun.pop(key) <= event["ts"], event)
    _hold(not begun, begun)
    for track in spans.values():
        _check_nesting(track)


def _check_fields(event: Any) -> None:
    _hold(isinstance(event, dict) and event.get("ph") in FIELDS, event)
    needed, allowed = FIELDS[event["ph"]]
    _hold(set(needed) <= set(event) - {"ph"} <= set(needed) | set(allowed), event)
    for name, kind in (needed | allowed).items():
        value = event.get(name)
        _hold(name not in event or (isinstance(value, kind) and value is not True), event)


def _check_nesting(spans: list[tuple[float, float]]) -> None:
    around: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda each: (each[0], -each[1])):
        while around and around[-1][1] <= span[0]:
            around.pop()
        _hold(not around or span[1] <= around[-1][1], (span, around[-1:]))
        around.append(span)


def _hold(condition: object, what: object) -> None:
    if not condition:
        raise TraceFormatError(f"not a trace: {what}")
