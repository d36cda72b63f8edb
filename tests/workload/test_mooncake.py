"""Traces with block hashes: the tokens of blocks, the turns that they imply, and refusals."""

import numpy as np
import pytest

from hicache.config import TraceConfig, TraceTokens
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

TWO_TURNS: list[Row] = [(0, 1030, 10, [0, 1, 2]), (5, 1300, 10, [0, 1, 3])]


def test_a_prompt_has_the_tokens_of_its_blocks_cut_to_its_length(tmp_path):
    (request,) = load_rows(tmp_path, [(0, 1100, 7, [4, 9, 2])])
    wanted = [*range(2048, 2560), *range(4608, 5120), *range(1024, 1100)]
    assert ids(request.prompt).tolist() == wanted
    (request,) = load_rows(tmp_path, [(0, 1100, 7, [4, 5, 6])])
    assert request.prompt.starts.tolist() == [2048]  # adjacent blocks are one run


def test_answers_without_a_next_turn_have_token_ids_of_their_own(tmp_path):
    requests = load_rows(tmp_path, [(0, 600, 9, [0, 1]), (0, 600, 9, [0, 2])])
    answers = np.concatenate([ids(request.output) for request in requests])
    assert len(set(answers.tolist())) == 18
    assert answers.min() >= 3 * 512


@pytest.mark.parametrize(
    ("tokens", "shared"), [(TraceTokens.literal, 1024), (TraceTokens.reconstructed, 1040)]
)
def test_an_answer_takes_the_tokens_of_the_next_turn_if_tokens_are_reconstructed(
    tmp_path, tokens, shared
):
    first, second = load_rows(tmp_path, TWO_TURNS, tokens)
    assert shared_len(whole(first), ids(second.prompt)) == shared
    assert (first.parent_id, second.parent_id) == (None, 0)


def test_a_short_next_turn_gives_the_answer_its_first_tokens_only(tmp_path):
    rows: list[Row] = [(0, 1030, 100, [0, 1, 2]), (5, 1060, 10, [0, 1, 3])]
    first, second = load_rows(tmp_path, rows)
    assert shared_len(whole(first), whole(second)) == 1060


def test_only_the_first_of_two_next_turns_repeats_the_answer(tmp_path):
    rows: list[Row] = [
        (0, 1030, 10, [0, 1, 2]),
        (5, 1600, 10, [0, 1, 3, 4]),
        (6, 1600, 10, [0, 1, 5, 6]),
    ]
    first, second, third = load_rows(tmp_path, rows)
    assert third.parent_id == 0
    assert shared_len(whole(first), ids(second.prompt)) == 1040
    assert shared_len(whole(first), ids(third.prompt)) == 1024


@pytest.mark.parametrize(
    ("blocks", "parents", "sessions"),
    [
        # the parent is the latest request and not the one with the longest prefix
        ([[0, 1, 2, 3], [0, 1, 4], [0, 1, 2, 5, 6]], [None, None, 1], [0, 1, 1]),
        ([[0, 1], [0, 2, 3]], [None, None], [0, 1]),  # one common block is too little
        ([[7, 8, 9], [0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 5, 6]], [None, None, 1, 2], [0, 1, 1, 1]),
    ],
)
def test_parents_are_inferred_from_common_blocks(tmp_path, blocks, parents, sessions):
    rows: list[Row] = [(at, 512 * len(each) - 400, 1, each) for at, each in enumerate(blocks)]
    requests = load_rows(tmp_path, rows)
    assert [request.parent_id for request in requests] == parents
    assert [request.session_id for request in requests] == sessions


def test_requests_are_ordered_by_arrival_from_time_0(tmp_path):
    since_1970 = 1_700_000_000_000
    for first in (0, since_1970):
        requests = load_rows(tmp_path, [(first + 30, 600, 1, [0, 1]), (first, 700, 1, [2, 3])])
        # a float holds a time since 1970 to 256 ns
        assert [(r.id, r.arrival_ns // 1000) for r in requests] == [(0, 0), (1, 30_000)]
        assert [r.prompt_len for r in requests] == [700, 600]


def test_think_time_is_the_gap_between_arrivals_up_to_a_cap(tmp_path):
    rows: list[Row] = [
        (0, 1030, 1, [0, 1, 2]),
        (7_000, 1600, 1, [0, 1, 3, 4]),
        (900_000, 2100, 1, [0, 1, 3, 5, 6]),
    ]
    requests = load_rows(tmp_path, rows)
    assert [request.think_ns for request in requests] == [0, 7 * 10**9, 600 * 10**9]


def test_equal_blocks_of_two_namespaces_imply_no_parent(tmp_path):
    records = [
        mooncake_record(row) | {"namespace": name}
        for row, name in zip(TWO_TURNS, ("left", "right"), strict=True)
    ]
    path = write_lines(tmp_path / "trace.jsonl", records)
    requests = load_mooncake(Trace(path), TraceConfig())
    assert [(r.namespace, r.parent_id) for r in requests] == [("left", None), ("right", None)]


@pytest.mark.parametrize("seed", range(3))
def test_turns_of_random_conversations_share_all_tokens_of_the_turn_before(tmp_path, seed):
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    blocks: dict[tuple[int, ...], int] = {}
    # conversations of 3 turns, interleaved; every turn repeats the last with its answer
    texts = [list(rng.integers(0, 1000, int(rng.integers(1030, 2500)))) for _ in range(4)]
    for turn in range(3):
        for text in texts:
            prefixes = [tuple(text[: begin + 512]) for begin in range(0, len(text), 512)]
            chain = [blocks.setdefault(prefix, len(blocks)) for prefix in prefixes]
            answer_len, added_len = (int(rng.integers(1, 900)) for _ in range(2))
            rows.append((turn, len(text), answer_len, chain))
            text.extend(rng.integers(0, 1000, answer_len + added_len))
    requests = load_rows(tmp_path, rows)
    for request in requests[4:]:
        parent = whole(requests[request.id - 4])
        assert request.parent_id == request.id - 4
        assert shared_len(parent, ids(request.prompt)) == len(parent)


def test_an_empty_or_damaged_file_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    rows = [mooncake_record((at, 600, 5, [0, 1])) for at in range(50)]
    contents = write_lines(path, rows).read_bytes()
    for part, told in ((contents[:-12], "damaged gzip file"), (b"", "no requests")):
        path.write_bytes(part)
        with pytest.raises(TraceError, match=told):
            load_mooncake(Trace(path), TraceConfig())
