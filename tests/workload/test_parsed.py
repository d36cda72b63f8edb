"""A trace is parsed once for the same contents and settings."""

from pathlib import Path

import pytest

from hicache.config import TraceTokens, WorkloadConfig
from hicache.request import Request
from hicache.workload import workload
from hicache.workload.trace import Trace
from hicache.workload.workload import load_workload
from tests.workload.traces import mooncake_record, write_lines

FIELDS = (
    "id", "session_id", "arrival_ns", "parent_id", "joins", "think_ns", "stop_reason", "namespace",
    "prompt_len", "output_len",
)  # fmt: skip
ROWS = [(0, 1024, 5, [1, 2]), (3000, 1500, 7, [1, 2, 3]), (5000, 600, 2, [9, 8])]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    records = [mooncake_record(row) | {"namespace": str(tmp_path)} for row in ROWS]
    return write_lines(tmp_path / "trace.jsonl", records)  # no other test has it


def requests_of(path: Path, **settings: object) -> list[Request]:
    config = WorkloadConfig(kind="trace", path=str(path), **settings)  # type: ignore[arg-type]
    return list(load_workload(config, data_dir=None, seed=0).requests)


def portrait(requests: list[Request]) -> list[tuple[object, ...]]:
    return [
        (*(getattr(each, name) for name in FIELDS), each.prompt.to_bytes(), each.output.to_bytes())
        for each in requests
    ]


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were parsed and not read from the folder of what was kept."""
    parsed: list[Path] = []

    def load_mooncake(trace: Trace, config: WorkloadConfig, **more: object) -> list[Request]:
        parsed.append(trace.path)
        return original(trace, config, **more)  # type: ignore[arg-type]

    original = workload.load_mooncake
    monkeypatch.setattr(workload, "load_mooncake", load_mooncake)
    return parsed


def test_a_trace_that_is_read_again_is_the_same(trace: Path, parses: list[Path]) -> None:
    first = portrait(requests_of(trace))
    assert portrait(requests_of(trace)) == first
    assert parses == [trace]
    assert first[1][FIELDS.index("parent_id")] == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_a_limit_leaves_the_rest(trace: Path, parses: list[Path], limit: int) -> None:
    whole = portrait(requests_of(trace))
    assert portrait(requests_of(trace, limit=limit)) == whole[:limit]
    assert parses == [trace]


def test_other_settings_parse_anew(trace: Path, parses: list[Path]) -> None:
    requests_of(trace)
    requests_of(trace, tokens=TraceTokens.literal)
    assert parses == [trace, trace]


def test_other_contents_of_one_length_parse_anew(trace: Path, parses: list[Path]) -> None:
    requests_of(trace)
    trace.write_text(trace.read_text().replace("600", "601"))
    assert requests_of(trace)[2].prompt_len == 601
    assert parses == [trace, trace]
