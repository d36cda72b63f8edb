from pathlib import Path

import numpy as np
import pytest

from hicache.request import Request, TokenSpans
from hicache.workload.parsed import load_parsed

FIELDS = (
    "id", "session_id", "arrival_ns", "parent_id", "joins", "think_ns", "stop_reason", "namespace",
    "prompt_len", "output_len",
)  # fmt: skip


def request(number: int, **settings: object) -> Request:
    prompt = TokenSpans(np.array([7 * number, 0], np.int32), np.array([5, number + 1], np.int32))
    output = TokenSpans(np.array([2**31 - 9], np.int32), np.array([8], np.int32))
    values = {"id": number, "session_id": number, "arrival_ns": number * 10**15, **settings}
    return Request(prompt=prompt, output=output, **values)  # type: ignore[arg-type]


REQUESTS = [
    request(0),
    request(
        1,
        parent_id=0,
        joins=(0, 1),
        session_id=0,
        think_ns=5,
        stop_reason="tool_use",
        namespace="ä\0b",
    ),
    request(2, namespace="lora", joins=(1,)),
]


def portrait(requests: list[Request]) -> list[tuple[object, ...]]:
    return [
        (*(getattr(each, name) for name in FIELDS), each.prompt.to_bytes(), each.output.to_bytes())
        for each in requests
    ]


def parse() -> list[Request]:
    return REQUESTS


def parse_again() -> list[Request]:
    raise AssertionError("it was parsed before")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(str(tmp_path))  # no other test has it
    return path


def test_a_trace_that_is_read_again_is_the_same(trace: Path) -> None:
    assert portrait(load_parsed(trace, parse, None)) == portrait(REQUESTS)
    assert portrait(load_parsed(trace, parse_again, None)) == portrait(REQUESTS)


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_a_limit_leaves_the_rest(trace: Path, limit: int) -> None:
    assert portrait(load_parsed(trace, parse, limit)) == portrait(REQUESTS[:limit])


def test_other_settings_parse_anew(trace: Path) -> None:
    load_parsed(trace, parse, None, "literal")
    with pytest.raises(AssertionError, match="parsed before"):
        load_parsed(trace, parse_again, None, "reconstructed")


def test_other_contents_of_one_length_parse_anew(trace: Path) -> None:
    load_parsed(trace, parse, None)
    stat = trace.stat()
    trace.write_text(trace.read_text()[::-1])
    assert trace.stat().st_size == stat.st_size
    with pytest.raises(AssertionError, match="parsed before"):
        load_parsed(trace, parse_again, None)


def test_a_folder_with_another_file_parses_anew(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(str(tmp_path))
    load_parsed(tmp_path, parse, None)
    load_parsed(tmp_path, parse_again, None)
    (tmp_path / "two.json").write_text("{}")
    with pytest.raises(AssertionError, match="parsed before"):
        load_parsed(tmp_path, parse_again, None)
