"""Traces that are tables of prompt lengths, answer lengths and arrival times."""

import csv
from pathlib import Path
from typing import Any

import pytest

from hicache.request import Request
from hicache.workload.trace import TraceError
from tests.workload.traces import ids, load_requests, session_starts, shared_len, whole

HEADER = ["timestamp", "input_length", "output_length", "session_id"]


def load(folder: Path, header: list[str], *rows: list[Any]) -> list[Request]:
    path = folder / "trace.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return load_requests(path)


def test_a_table_is_read_as_it_was_written(tmp_path):
    rows = [[0, 100, 7, "a"], [1.25, 30, 1, "b"], [2.5, 150, 9, "a"], [4, 8000, 400, ""]]
    found = load(tmp_path, HEADER, *rows)
    assert [[r.arrival_ns / 1e9, r.prompt_len, r.output_len] for r in found] == [
        row[:3] for row in rows
    ]
    assert session_starts(found) == [0, 1, 0, 3]
    assert [r.parent_id for r in found] == [None, None, 0, None]


def test_a_turn_repeats_the_previous_prompt_and_answer_up_to_its_own_length(tmp_path):
    rows = [0, 100, 7, "a"], [1, 150, 9, "a"], [2, 60, 9, "a"]
    first, second, third = load(tmp_path, HEADER, *rows)
    assert shared_len(whole(first), ids(second.prompt)) == 107
    assert shared_len(ids(second.prompt), ids(third.prompt)) == 60


def test_requests_without_sessions_share_no_token(tmp_path):
    found = load(tmp_path, HEADER[:3], *([n, 50, 5] for n in range(9)))
    tokens = [int(token) for request in found for token in whole(request)]
    assert len(set(tokens)) == len(tokens) == 9 * 55


@pytest.mark.parametrize(
    ("header", "times"),
    [
        (["TIMESTAMP", "ContextTokens", "GeneratedTokens"], ["2023-11-16 18:15:46.6805900",
                                                              "2023-11-16 18:15:50.9951690"]),
        (["Timestamp", "Request tokens", "Response tokens"], ["5", "9.314579"]),
        (["timestamp_ms", "input_length", "output_length"], ["1000", "5314.579"]),
        (["arrived_at", "num_prefill_tokens", "num_decode_tokens"], ["0", "4.314579"]),
    ],
)  # fmt: skip
def test_the_columns_of_public_tables_are_recognized(tmp_path, header, times):
    found = load(tmp_path, header, *([time, 4808, 10] for time in times))
    assert [(r.arrival_ns, r.prompt_len, r.output_len) for r in found] == [
        (0, 4808, 10),
        (4_314_579_000, 4808, 10),
    ]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([1, 0, 5], "line 3: input_length must be an integer of at least 1"),
        ([1, 9], "line 3: no answer tokens"),
        ([1, "many", 5], "line 3: input_length must be an integer, got text"),
        (["soon", 9, 5], "line 3: timestamp must be a number or a date"),
        (["inf", 9, 5], "line 3: timestamp must be a number of at least 0"),
        (["2024-01-01", 9, 5], "line 3: it arrives more than ten years after .*line 2"),
        ([1, 1, 200, 5], "line 3: the row must be an object with the fields"),
    ],
)
def test_an_invalid_row_is_refused_with_its_line(tmp_path, row, told):
    with pytest.raises(TraceError, match=told):
        load(tmp_path, HEADER[:3], [0, 9, 5], row)


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        ("time,in\n0,5\n", r"expected a column output_length or .*, got time, in"),
        ("timestamp,input_length,output_length\n", "no requests"),
        ('"{""messages"": [{""content"": ""Quince""}]}"\n0\n', "with the fields no names"),
        ('time,in,out,note\n0,9,5,"a\nb\nc"\n\n1,many,5,"a\nb"\n', "line 6: input_length must"),
        (
            'timestamp,input_length,output_length,session_id\n0,9,5,a\n1,9,5,"no end of a quote\n',
            r"trace\.CSV, after line \d: not a CSV table",
        ),
    ],
    ids=range(5),
)
def test_an_invalid_table_is_refused_without_its_texts(tmp_path, contents, told):
    path = tmp_path / "trace.CSV"
    path.write_text(contents)
    with pytest.raises(TraceError, match=told) as caught:
        load_requests(path)
    assert "Quince" not in str(caught.value)


def test_session_names_that_are_not_utf_8_are_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(",".join(HEADER).encode() + b"\n0,9,5,a\n1,9,5,caf\xe9\n2,9,5,a\n")
    assert session_starts(load_requests(path)) == [0, 1, 0]


def test_the_session_column_of_burst_gpt_is_recognized(tmp_path):
    header = ["Timestamp", "Session ID", "Request tokens", "Response tokens"]
    found = load(tmp_path, header, [5, "a", 100, 7], [9, "a", 150, 9])
    assert [each.parent_id for each in found] == [None, 0]
