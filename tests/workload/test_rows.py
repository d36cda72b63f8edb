"""Traces of blocks of any size, with any block ids, and with or without sessions."""

import re
from pathlib import Path
from typing import Any

import pytest

from hicache.config import TraceConfig, TraceTokens
from hicache.workload.mooncake import load_mooncake
from hicache.workload.trace import Trace, TraceError
from hicache.workload.workload import load_workload
from tests.workload.traces import (
    Row,
    ids,
    load,
    mooncake_record,
    session_starts,
    shared_len,
    whole,
    write_lines,
)

# two conversations of blocks of 16 tokens; the first has a second turn
CHAINS: list[Row] = [(0, 40, 5, [0, 1, 2]), (10, 40, 5, [3, 4, 5]), (20, 70, 5, [0, 1, 6, 7, 8])]


def written(folder: Path, rows: list[Any], **columns: list[Any]) -> Path:
    """Write a trace of `rows` with further columns (one value per row), and return its path."""
    records = [
        mooncake_record(row) | {name: values[n] for name, values in columns.items()}
        for n, row in enumerate(rows)
    ]
    return write_lines(folder / "trace.jsonl", records)


def refused(path: Path, told: str, **settings: Any) -> None:
    with pytest.raises(TraceError, match=told):
        load(path, **settings)


def noted(path: Path, told: str, **settings: Any) -> list[int | None]:
    """Load a trace, check that a note of it matches `told`, and return each request's parent."""
    found = load(path, **settings)
    assert any(re.search(told, note) for note in found.notes), found.notes
    return [request.parent_id for request in found.requests]


@pytest.mark.parametrize("block_tokens", [16, 24, 512, 4096])
def test_a_trace_of_any_block_size_is_read_as_it_was_written(tmp_path, block_tokens):
    lengths = [2 * block_tokens + 1, 3 * block_tokens, 5 * block_tokens - block_tokens // 2]
    rows = [(row[0], length, *row[2:]) for row, length in zip(CHAINS, lengths, strict=True)]
    config = TraceConfig(tokens=TraceTokens.literal)
    path = written(tmp_path, rows)
    found = load_mooncake(Trace(path), config, block_tokens=block_tokens)
    assert rows == [
        (
            request.arrival_ns // 10**6,
            request.prompt_len,
            request.output_len,
            [int(token) // block_tokens for token in ids(request.prompt)[::block_tokens]],
        )
        for request in found
    ]
    assert [request.parent_id for request in found] == [None, None, 0]


@pytest.mark.parametrize(
    "blocks_of",
    [
        lambda blocks, _: blocks,
        lambda blocks, length: blocks[: length // 16],  # without the last partial block
        lambda blocks, _: [2**127 + n for n in blocks],
        lambda blocks, _: [f"{n:064x}" for n in blocks],
        lambda blocks, _: [-n - 1 for n in blocks],
    ],
)
def test_block_size_and_turns_are_inferred_from_block_ids_of_any_form(tmp_path, blocks_of):
    rows = [(at, length, out, blocks_of(blocks, length)) for at, length, out, blocks in CHAINS]
    found = load(written(tmp_path, rows)).requests
    assert [(r.arrival_ns, r.prompt_len, r.output_len) for r in found] == [
        (at * 10**6, length, out) for at, length, out, _ in CHAINS
    ]
    assert [r.parent_id for r in found] == [None, None, 0]
    assert shared_len(whole(found[0]), ids(found[2].prompt)) == 45
    assert shared_len(whole(found[0]), ids(found[1].prompt)) == 0


@pytest.mark.parametrize(
    ("columns", "parents", "sessions"),
    [
        ({"session_id": ["a", "b", "b"]}, [None, None, 1], [0, 1, 1]),
        ({"chat_id": [7, 8, 9], "parent_chat_id": [-1, 7, 8]}, [None, 0, 1], [0, 0, 0]),
        ({"chat_id": [7, 8, 9], "parent_chat_id": [None, 7, 8]}, [None, 0, 1], [0, 0, 0]),
    ],
)
def test_sessions_or_parents_that_a_trace_names_are_kept(tmp_path, columns, parents, sessions):
    found = load(written(tmp_path, CHAINS, **columns)).requests
    assert [r.parent_id for r in found] == parents
    assert session_starts(found) == sessions
    # the second shares no block with the first, so it does not repeat the answer
    assert shared_len(whole(found[0]), ids(found[1].prompt)) == 0


@pytest.mark.parametrize(
    ("columns", "parents", "told"),
    [
        (
            {"chat_id": [7, 8, 9], "parent_chat_id": [-1, -1, 6]},
            [None, None, None],
            "1 of 3 requests continue a request that is not before them in the trace: each begins",
        ),
        (
            {"chat_id": [7, 8, 7]},
            [None, None],
            "1 of 3 rows left out: an earlier request has the same id .*line 3",
        ),
        (
            {"chat_id": [7, 8, 1.5]},
            [None, None],
            "1 of 3 rows left out: chat_id must be an integer or text, got a number .*line 3",
        ),
    ],
)
def test_a_row_with_an_odd_id_is_left_out_or_begins_a_session(tmp_path, columns, parents, told):
    assert noted(written(tmp_path, CHAINS, **columns), told) == parents


@pytest.mark.parametrize("num_left_out", [0, 1])
def test_the_one_row_of_another_block_size_is_left_out(tmp_path, num_left_out):
    rows: list[Row] = [
        (line, 33 + line, 5, [100 * line, 100 * line + 1, 100 * line + 2][: 3 - num_left_out])
        for line in range(1, 15)
    ]
    rows[4] = (5, 20, 5, [500, 501, 502])
    rows.append((20, 200, 5, list(range(900, 913 - num_left_out))))  # the longest
    told = r"1 of 15 rows left out: 20 prompt tokens need \d blocks of 16 tokens, got 3 .*line 5"
    assert len(noted(written(tmp_path, rows), told)) == 14


def test_rows_of_different_block_sizes_are_refused(tmp_path):
    path = written(tmp_path, CHAINS)
    refused(path, "line 1: 40 prompt tokens need 2 blocks of 32 tokens, got 3", block_tokens=32)
    rows = [*CHAINS, (30, 40, 5, [10]), (40, 70, 5, [11]), (50, 90, 5, [12])]
    told = r"line 6 has 90 tokens in 1 .*: set workload\.block_tok"
    refused(written(tmp_path, rows), told)


def test_the_one_row_with_another_unit_of_time_is_left_out(tmp_path):
    rows: list[Row] = [(1_700_000_000_000 + line, 40, 5, [line]) for line in range(9)]
    rows[4] = (1_700_000_000, 40, 5, [4])
    told = "1 of 9 rows left out: it arrives more than ten years before .*: check the unit .*line 5"
    assert len(noted(written(tmp_path, rows), told, block_tokens=64)) == 8


@pytest.mark.parametrize(("chats", "num_sessions"), [(17, 1), (18, 18)])
def test_a_prompt_that_many_requests_begin_with_is_not_their_parent(tmp_path, chats, num_sessions):
    system = list(range(64))  # the first request asks hardly anything more
    rows: list[Row] = [(0, 1030, 5, [*system, 64])]
    for chat in range(1, chats):
        rows.append((chat, 1200, 5, [*system, *range(100 * chat, 100 * chat + 11)]))
    found = load(written(tmp_path, rows)).requests
    assert len({r.session_id for r in found}) == num_sessions
    assert shared_len(ids(found[3].prompt), ids(found[9].prompt)) == 1024


def test_questions_about_one_document_are_not_turns_of_a_conversation(tmp_path):
    document = list(range(64))  # of 1,024 tokens; most questions fit into a part of a block
    rows: list[Row] = [
        (at, 1028 + at % 20, 200, [*document, *range(100 * at, 100 * at + 1 + (at % 20 > 12))])
        for at in range(1, 200)
    ]
    assert {r.parent_id for r in load(written(tmp_path, rows)).requests} == {None}


def test_a_file_of_another_format_than_the_named_trace_is_refused_with_a_hint(tmp_path):
    path = written(tmp_path, CHAINS)
    config = TraceConfig(kind="mooncake_conversation", path=str(path))
    told = r"1 blocks of 512 tokens, got 3; .* workload=trace detects the format"
    with pytest.raises(TraceError, match=told):
        load_workload(config, data_dir=None, seed=0)
    path = write_lines(tmp_path / "trace.jsonl", [{"query": "x", "when": 3}])
    refused(path, "with the fields query, when")
