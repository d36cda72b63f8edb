"""A trace is parsed once for the same contents and settings."""

from pathlib import Path

import pytest

from hicache.config import TraceConfig, TraceTokens
from hicache.request import Request
from hicache.workload import workload
from hicache.workload.trace import Trace
from tests.workload.traces import load_requests, mooncake_record, write_lines

FIELDS = (
    "id", "session_id", "arrival_ns", "parent_id", "joins", "think_ns", "stop_reason", "namespace",
    "prompt_len", "output_len",
)  # fmt: skip
ROWS = [(0, 1024, 5, [1, 2]), (3000, 1500, 7, [1, 2, 3]), (5000, 600, 2, [9, 8])]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    records = [mooncake_record(row) | {"namespace": str(tmp_path)} for row in ROWS]
    return write_lines(tmp_path / "trace.jsonl", records)  # no other test has it


def portrait(requests: list[Request]) -> list[tuple[object, ...]]:
    return [
        (*(getattr(each, name) for name in FIELDS), each.prompt.to_bytes(), each.output.to_bytes())
        for each in requests
    ]


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were parsed, and not read from the folder of kept results."""
    parsed: list[Path] = []

    def load_mooncake(trace: Trace, config: TraceConfig, **more: object) -> list[Request]:
        parsed.append(trace.path)
        return original(trace, config, **more)

    original = workload.load_mooncake
    monkeypatch.setattr(workload, "load_mooncake", load_mooncake)
    return parsed


def test_a_second_load_is_equal_and_parses_nothing(trace, parses):
    first = portrait(load_requests(trace))
    assert portrait(load_requests(trace)) == first
    assert parses == [trace]
    assert first[1][FIELDS.index("parent_id")] == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_a_limit_is_applied_without_parsing_the_trace_again(trace, parses, limit):
    whole = portrait(load_requests(trace))
    assert portrait(load_requests(trace, limit=limit)) == whole[:limit]
    assert parses == [trace]


def test_other_settings_parse_the_trace_again(trace, parses):
    load_requests(trace)
    load_requests(trace, tokens=TraceTokens.literal)
    assert parses == [trace, trace]


def test_other_contents_parse_the_trace_again(trace, parses):
    load_requests(trace)
    trace.write_text(trace.read_text().replace("600", "601"))
    assert load_requests(trace)[2].prompt_len == 601
    assert parses == [trace, trace]
