from pathlib import Path

import numpy as np
import pytest

from hicache.config import TraceTokens, WorkloadConfig
from hicache.workload.mooncake import load_mooncake
from hicache.workload.trace import Trace, TraceError
from tests.workload.traces import (
    Row,
    ids,
    load_rows,
    mooncake_record,
    shared_len,
    whole,
    write_lines,
)


def test_a_prompt_has_the_tokens_of_its_blocks_cut_to_its_length(tmp_path: Path) -> None:
    (request,) = load_rows(tmp_path, [(0, 1100, 7, [4, 9, 2])])
    wanted = [*range(2048, 2560), *range(4608, 5120), *range(1024, 1100)]
    assert ids(request.prompt).tolist() == wanted


def test_adjacent_blocks_are_one_run(tmp_path: Path) -> None:
    (request,) = load_rows(tmp_path, [(0, 1100, 7, [4, 5, 6])])
    assert request.prompt.starts.tolist() == [2048]


def test_answers_without_a_successor_have_ids_of_their_own(tmp_path: Path) -> None:
    requests = load_rows(tmp_path, [(0, 600, 9, [0, 1]), (0, 600, 9, [0, 2])])
    answers = np.concatenate([ids(request.output) for request in requests])
    assert len(set(answers.tolist())) == 18
    assert answers.min() >= 3 * 512


def test_an_answer_and_a_partial_block_take_the_tokens_of_the_next_turn(tmp_path: Path) -> None:
    rows: list[Row] = [(0, 1030, 10, [0, 1, 2]), (5, 1300, 10, [0, 1, 3])]
    first, second = load_rows(tmp_path, rows)
    assert whole(first).tolist() == ids(second.prompt)[:1040].tolist()


def test_literal_tokens_are_left_as_the_trace_names_them(tmp_path: Path) -> None:
    rows: list[Row] = [(0, 1030, 10, [0, 1, 2]), (5, 1300, 10, [0, 1, 3])]
    first, second = load_rows(tmp_path, rows, TraceTokens.literal)
    assert shared_len(whole(first), ids(second.prompt)) == 1024


def test_both_kinds_of_tokens_have_the_same_parents(tmp_path: Path) -> None:
    rows: list[Row] = [(0, 1030, 10, [0, 1, 2]), (5, 1300, 10, [0, 1, 3])]
    parents = [[r.parent_id for r in load_rows(tmp_path, rows, tokens)] for tokens in TraceTokens]
    assert parents == [[None, 0], [None, 0]]


def test_a_chain_of_turns_agrees_on_tokens_rewritten_twice(tmp_path: Path) -> None:
    rows: list[Row] = [
        (0, 1030, 10, [0, 1, 2]),
        (5, 1100, 10, [0, 1, 3]),  # its partial block is rewritten from the third
        (9, 1700, 10, [0, 1, 4, 5]),
    ]
    first, _, third = load_rows(tmp_path, rows)
    assert whole(first).tolist() == ids(third.prompt)[:1040].tolist()


def test_where_the_next_turn_is_shorter_the_answer_is_its_own(tmp_path: Path) -> None:
    rows: list[Row] = [(0, 1030, 100, [0, 1, 2]), (5, 1060, 10, [0, 1, 3])]
    first, second = load_rows(tmp_path, rows)
    assert shared_len(whole(first), whole(second)) == 1060


def test_only_the_first_successor_continues_the_answer(tmp_path: Path) -> None:
    rows: list[Row] = [
        (0, 1030, 10, [0, 1, 2]),
        (5, 1600, 10, [0, 1, 3, 4]),
        (6, 1600, 10, [0, 1, 5, 6]),
    ]
    first, second, third = load_rows(tmp_path, rows)
    assert third.parent_id == 0
    assert shared_len(whole(first), ids(second.prompt)) == 1040
    assert shared_len(whole(first), ids(third.prompt)) == 1024


def test_the_parent_is_the_latest_and_not_the_longest(tmp_path: Path) -> None:
    rows: list[Row] = [
        (0, 1600, 1, [0, 1, 2, 3]),
        (1, 1100, 1, [0, 1, 4]),
        (2, 2100, 1, [0, 1, 2, 5, 6]),
    ]
    assert load_rows(tmp_path, rows)[2].parent_id == 1


def test_one_common_block_makes_no_parent(tmp_path: Path) -> None:
    rows: list[Row] = [(0, 600, 1, [0, 1]), (1, 1100, 1, [0, 2, 3])]
    assert load_rows(tmp_path, rows)[1].parent_id is None


def test_a_session_is_named_by_its_first_request(tmp_path: Path) -> None:
    rows: list[Row] = [
        (0, 1030, 1, [7, 8, 9]),
        (1, 1030, 1, [0, 1, 2]),
        (2, 1600, 1, [0, 1, 3, 4]),
        (3, 2100, 1, [0, 1, 3, 5, 6]),
    ]
    assert [request.session_id for request in load_rows(tmp_path, rows)] == [0, 1, 1, 1]


def test_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    requests = load_rows(tmp_path, [(30, 600, 1, [0, 1]), (0, 700, 1, [2, 3])])
    assert [(r.id, r.arrival_ns, r.prompt_len) for r in requests] == [
        (0, 0, 700),
        (1, 30_000_000, 600),
    ]


def test_the_first_request_comes_at_0_whatever_the_clock(tmp_path: Path) -> None:
    since_1970 = 1_700_000_000_000
    rows = [(since_1970 + 30, 600, 1, [0, 1]), (since_1970, 700, 1, [2, 3])]
    # a float holds such a time to 256 ns
    assert [each.arrival_ns // 1000 for each in load_rows(tmp_path, rows)] == [0, 30_000]


def test_think_time_is_the_gap_between_arrivals_and_is_capped(tmp_path: Path) -> None:
    rows: list[Row] = [
        (0, 1030, 1, [0, 1, 2]),
        (7_000, 1600, 1, [0, 1, 3, 4]),
        (900_000, 2100, 1, [0, 1, 3, 5, 6]),
    ]
    requests = load_rows(tmp_path, rows)
    assert [request.think_ns for request in requests] == [0, 7 * 10**9, 600 * 10**9]


def test_equal_blocks_of_two_namespaces_make_no_parent(tmp_path: Path) -> None:
    rows: list[Row] = [(0, 1030, 1, [0, 1, 2]), (1, 1600, 1, [0, 1, 3, 4])]
    records = [
        mooncake_record(row) | {"namespace": tenant}
        for row, tenant in zip(rows, ("left", "right"), strict=True)
    ]
    path = write_lines(tmp_path / "trace.jsonl", records)
    requests = load_mooncake(Trace(path), WorkloadConfig())
    assert [(r.namespace, r.parent_id) for r in requests] == [("left", None), ("right", None)]


@pytest.mark.parametrize("seed", range(5))
def test_turns_of_random_conversations_share_what_they_truly_shared(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    next_block, blocks = 0, dict[tuple[int, ...], int]()
    # conversations of 3 turns, interleaved; every turn repeats the last with its answer
    texts = [list(rng.integers(0, 1000, int(rng.integers(1030, 2500)))) for _ in range(4)]
    for turn in range(3):
        for text in texts:
            chain = []
            for begin in range(0, len(text), 512):
                key = tuple(text[: begin + 512])
                if key not in blocks:
                    blocks[key] = next_block
                    next_block += 1
                chain.append(blocks[key])
            answer_len = int(rng.integers(1, 900))
            rows.append((turn, len(text), answer_len, chain))
            added = answer_len + int(rng.integers(1, 900))
            text.extend(rng.integers(0, 1000, added))
    requests = load_rows(tmp_path, rows)
    for request in requests[4:]:
        parent = whole(requests[request.id - 4])
        assert request.parent_id == request.id - 4
        assert shared_len(parent, ids(request.prompt)) == len(parent)


def _row(**changes: object) -> dict[str, object]:
    return mooncake_record((0, 600, 5, [0, 1])) | changes


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (_row(hash_ids=[0]), "600 prompt tokens need 2 blocks of 512 tokens, got 1"),
        (_row(hash_ids=[0, 1.5]), r"hash_ids\[1\] must be an integer or text, got a number"),
        (_row(session_id=[1]), "session_id must be an integer or text, got a list"),
        (_row(hash_ids="0"), "hash_ids must be a list or null, got text"),
        (_row(input_length=0), "input_length must be an integer of at least 1"),
        (_row(output_length=None), "no answer tokens"),
        (_row(timestamp="now"), "timestamp must be a number or a date"),
        (_row(timestamp=float("inf")), "not JSON"),
        (_row(timestamp=1e30), "its time is after the year 2106: check the unit"),
        (_row(timestamp=1.7e12), "it arrives more than ten years after .*line 1: check the unit"),
        ([1], "the row must be an object with the fields of this form"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, record: object, complaint: str) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [_row(), record])
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 2: {complaint}"):
        load_mooncake(Trace(path), WorkloadConfig())


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n{broken\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: not JSON"):
        load_mooncake(Trace(path), WorkloadConfig())


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [])
    with pytest.raises(TraceError, match="no requests"):
        load_mooncake(Trace(path), WorkloadConfig())


def test_a_cut_off_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole_file = write_lines(path, [_row(timestamp=n) for n in range(50)]).read_bytes()
    path.write_bytes(whole_file[:-12])
    with pytest.raises(TraceError, match="damaged gzip file"):
        load_mooncake(Trace(path), WorkloadConfig())
