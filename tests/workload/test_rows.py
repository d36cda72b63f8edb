"""Traces of blocks of any size, however blocks are called and sessions are told."""

import re
from pathlib import Path
from typing import Any

import pytest

from hicache.config import TraceTokens, WorkloadConfig
from hicache.request import Request
from hicache.workload.mooncake import load_mooncake
from hicache.workload.trace import Trace, TraceError
from hicache.workload.workload import Workload, load_workload
from tests.workload.traces import ids, session_starts, shared_len, whole, write_lines

Turn = tuple[int, int, int, list[Any]]  # timestamp_ms, input_length, output_length, hash_ids


def records(turns: list[Turn], **more: list[Any]) -> list[dict[str, Any]]:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [dict(zip(names, turn, strict=True)) for turn in turns]
    for name, values in more.items():
        for line, value in zip(lines, values, strict=True):
            line[name] = value
    return lines


def load(path: Path, **settings: Any) -> Workload:
    config = WorkloadConfig(kind="trace", path=str(path), **settings)
    return load_workload(config, data_dir=None, seed=0)


def shape(requests: list[Request]) -> list[tuple[Any, ...]]:
    return [
        (r.arrival_ns, r.parent_id, session, r.prompt_len, r.output_len, r.think_ns)
        for r, session in zip(requests, session_starts(requests), strict=True)
    ]


# two conversations of blocks of 16 tokens; the first has a second turn
CHAINS: list[Turn] = [
    (0, 40, 5, [0, 1, 2]),
    (10, 40, 5, [3, 4, 5]),
    (20, 70, 5, [0, 1, 6, 7, 8]),
]


@pytest.mark.parametrize("block_tokens", [16, 24, 512, 4096])
def test_a_trace_of_any_block_size_comes_back_as_it_was_written(
    tmp_path: Path, block_tokens: int
) -> None:
    lengths = [2 * block_tokens + 1, 3 * block_tokens, 5 * block_tokens - block_tokens // 2]
    turns = [
        (time, length, answer, blocks)
        for (time, _, answer, blocks), length in zip(CHAINS, lengths, strict=True)
    ]
    path = write_lines(tmp_path / "trace.jsonl", records(turns))
    config = WorkloadConfig(tokens=TraceTokens.literal)
    found = load_mooncake(Trace(path), config, block_tokens=block_tokens)
    back = [
        (
            request.arrival_ns // 10**6,
            request.prompt_len,
            request.output_len,
            [int(token) // block_tokens for token in ids(request.prompt)[::block_tokens]],
        )
        for request in found
    ]
    assert back == turns
    assert [request.parent_id for request in found] == [None, None, 0]


def test_the_block_size_is_found(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", records(CHAINS))
    found = load(path).requests
    assert [r.parent_id for r in found] == [None, None, 0]
    assert shared_len(whole(found[0]), ids(found[2].prompt)) == 45


def test_blocks_may_leave_out_the_last_partial_one(tmp_path: Path) -> None:
    without = [(t, n, out, blocks[: n // 16]) for t, n, out, blocks in CHAINS]
    whole_path = write_lines(tmp_path / "whole.jsonl", records(CHAINS))
    path = write_lines(tmp_path / "trace.jsonl", records(without))
    assert shape(list(load(path).requests)) == shape(list(load(whole_path).requests))


@pytest.mark.parametrize("name", [lambda n: 2**127 + n, lambda n: f"{n:064x}", lambda n: -n - 1])
def test_blocks_may_be_called_anything(tmp_path: Path, name: Any) -> None:
    renamed = [(t, n, out, [name(block) for block in blocks]) for t, n, out, blocks in CHAINS]
    plain = load(write_lines(tmp_path / "plain.jsonl", records(CHAINS))).requests
    found = load(write_lines(tmp_path / "renamed.jsonl", records(renamed))).requests
    assert [ids(r.prompt).tolist() for r in found] == [ids(r.prompt).tolist() for r in plain]


def test_sessions_may_be_told(tmp_path: Path) -> None:
    told = records(CHAINS, session_id=["a", "b", "b"])
    found = load(write_lines(tmp_path / "trace.jsonl", told)).requests
    assert [r.parent_id for r in found] == [None, None, 1]
    assert session_starts(found) == [0, 1, 1]


@pytest.mark.parametrize("nobody", [-1, None])
def test_parents_may_be_told(tmp_path: Path, nobody: int | None) -> None:
    told = records(CHAINS, chat_id=[7, 8, 9], parent_chat_id=[nobody, 7, 8])
    found = load(write_lines(tmp_path / "trace.jsonl", told)).requests
    assert [r.parent_id for r in found] == [None, 0, 1]
    # the second begins anew, so that nothing of it stands for the answer of the first
    assert shared_len(whole(found[0]), ids(found[1].prompt)) == 0


@pytest.mark.parametrize(
    ("more", "parents", "told"),
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
def test_a_row_with_an_odd_name_is_left_out_or_begins_a_session(
    tmp_path: Path, more: dict[str, list[Any]], parents: list[int | None], told: str
) -> None:
    found = load(write_lines(tmp_path / "trace.jsonl", records(CHAINS, **more)))
    assert [request.parent_id for request in found.requests] == parents
    assert any(re.search(told, note) for note in found.notes)


def test_a_block_size_that_does_not_suit_names_the_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", records(CHAINS))
    with pytest.raises(
        TraceError, match="line 1: 40 prompt tokens need 2 blocks of 32 tokens, got 3"
    ):
        load(path, block_tokens=32)


@pytest.mark.parametrize("left_out", [0, 1])
def test_the_one_line_of_another_block_size_is_named(tmp_path: Path, left_out: int) -> None:
    turns: list[Turn] = [
        (line, 33 + line, 5, [100 * line, 100 * line + 1, 100 * line + 2][: 3 - left_out])
        for line in range(1, 15)
    ]
    turns[4] = (5, 20, 5, [500, 501, 502])
    turns.append((20, 200, 5, list(range(900, 913 - left_out))))  # the longest
    found = load(write_lines(tmp_path / "trace.jsonl", records(turns)))
    assert len(found.requests) == len(turns) - 1
    told = r"1 of 15 rows left out: 20 prompt tokens need \d blocks of 16 tokens, got 3 .*line 5"
    assert any(re.search(told, note) for note in found.notes)
    assert found.counts == {"trace/left_out_rows": 1}


def test_lines_of_different_block_sizes_ask_for_one(tmp_path: Path) -> None:
    turns = [*CHAINS, (30, 40, 5, [10]), (40, 70, 5, [11]), (50, 90, 5, [12])]
    path = write_lines(tmp_path / "trace.jsonl", records(turns))
    with pytest.raises(TraceError, match=r"line 6 has 90 tokens in 1 .*: set workload\.block_tok"):
        load(path)


def test_the_one_line_with_another_unit_of_time_is_named(tmp_path: Path) -> None:
    turns: list[Turn] = [(1_700_000_000_000 + line, 40, 5, [line]) for line in range(9)]
    turns[4] = (1_700_000_000, 40, 5, [4])
    found = load(write_lines(tmp_path / "trace.jsonl", records(turns)), block_tokens=64)
    assert len(found.requests) == 8
    told = "1 of 9 rows left out: it arrives more than ten years before .*: check the unit .*line 5"
    assert any(re.search(told, note) for note in found.notes)


def system_prompt_trace(path: Path, *, chats: int) -> Path:
    """Conversations that begin with the same 64 blocks; the first asks hardly anything more."""
    system = list(range(64))
    first: Turn = (0, 1030, 5, [*system, 64])
    others = [
        (chat, 1200, 5, [*system, *range(100 * chat, 100 * chat + 11)]) for chat in range(1, chats)
    ]
    return write_lines(path, records([first, *others]))


def test_a_prompt_that_many_requests_begin_with_is_no_turn(tmp_path: Path) -> None:
    path = system_prompt_trace(tmp_path / "trace.jsonl", chats=18)
    found = load(path).requests
    assert len({r.session_id for r in found}) == 18
    assert shared_len(ids(found[3].prompt), ids(found[9].prompt)) == 1024


def test_a_system_prompt_of_a_few_chats_may_be_named(tmp_path: Path) -> None:
    path = system_prompt_trace(tmp_path / "trace.jsonl", chats=17)
    assert len({r.session_id for r in load(path).requests}) == 1
    assert len({r.session_id for r in load(path, system_tokens=1030).requests}) == 17


def test_questions_about_one_document_are_no_conversation(tmp_path: Path) -> None:
    document = list(range(64))  # of 1,024 tokens; most questions fit into a part of a block
    turns: list[Turn] = [
        (at, 1028 + at % 20, 200, [*document, *range(100 * at, 100 * at + 1 + (at % 20 > 12))])
        for at in range(1, 200)
    ]
    path = write_lines(tmp_path / "trace.jsonl", records(turns))
    assert {r.parent_id for r in load(path).requests} == {None}


def test_a_file_under_the_trace_of_others_is_told_where_it_belongs(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", records(CHAINS))
    config = WorkloadConfig(kind="mooncake_conversation", path=str(path))
    with pytest.raises(
        TraceError, match=r"1 blocks of 512 tokens, got 3; .* workload=trace detects the format"
    ):
        load_workload(config, data_dir=None, seed=0)


def test_a_file_of_no_known_form_says_what_it_has(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [{"query": "x", "when": 3}])
    with pytest.raises(TraceError, match="with the fields query, when"):
        load(path)


def test_a_table_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("timestamp,input_length,output_length\n0,9,5\n")
    assert [request.prompt_len for request in load(path).requests] == [9]
