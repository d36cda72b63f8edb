import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.workload import (
    KINDS,
    Workload,
    jitter_starts,
    load_workload,
    repeat_sessions,
    sample_sessions,
)
from tests.workload.test_weka import ask, session
from tests.workload.traces import mooncake_record, write_lines

CHAT = WorkloadConfig(kind="chat", num_sessions=40)


def first_tokens(workload: Workload) -> set[int]:
    """What tells sessions apart whatever their number: the last token of their first prompt."""
    return {
        int(r.prompt.starts[-1] + r.prompt.counts[-1])
        for r in workload.requests
        if r.parent_id is None
    }


def shape(request: Request) -> tuple[object, ...]:
    return (request.id, request.arrival_ns, request.prompt.to_bytes(), request.parent_id)


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"workload\.kind must be one of builtin, chat.*'chta'"):
        load_workload(WorkloadConfig(kind="chta"), data_dir=None, seed=0)


def test_a_workload_says_in_one_line_what_it_holds() -> None:
    workload = load_workload(CHAT, data_dir=None, seed=0)
    assert workload.description.startswith(
        f"chat: {len(workload.requests)} requests in 40 sessions, "
    )


def test_a_limit_keeps_the_first_requests() -> None:
    everything = load_workload(CHAT, data_dir=None, seed=0).requests
    some = load_workload(replace(CHAT, limit=7), data_dir=None, seed=0).requests
    assert [shape(r) for r in some] == [shape(r) for r in everything[:7]]


def test_a_time_scale_stretches_arrivals() -> None:
    plain = load_workload(CHAT, data_dir=None, seed=0).requests
    slow = load_workload(replace(CHAT, time_scale=2.0), data_dir=None, seed=0).requests
    assert [r.arrival_ns for r in slow] == [2 * r.arrival_ns for r in plain]


@pytest.mark.parametrize("stride", [2, 7, 128])
def test_a_token_stride_keeps_the_ids_it_divides(stride: int) -> None:
    whole = load_workload(CHAT, data_dir=None, seed=0).requests
    thinned = load_workload(replace(CHAT, token_stride=stride), data_dir=None, seed=0).requests
    for before, after in zip(whole, thinned, strict=True):
        for of in (lambda request: request.prompt, lambda request: request.output):
            ids = np.frombuffer(of(before).to_bytes(), "<i4")
            kept = np.frombuffer(of(after).to_bytes(), "<i4")
            wanted = ids[ids % stride == 0] // stride
            # a prompt or an answer of no such id still has one
            assert np.array_equal(kept, wanted if len(wanted) else ids[:1] // stride)


def test_jitter_moves_whole_sessions_by_less_than_it_says() -> None:
    plain = load_workload(CHAT, data_dir=None, seed=3).requests
    moved = load_workload(replace(CHAT, start_jitter_s=2.0), data_dir=None, seed=3).requests
    begun = {request.prompt.to_bytes(): request.arrival_ns for request in plain}
    shifts: dict[int, set[int]] = {}
    for request in moved:
        shift = request.arrival_ns - begun[request.prompt.to_bytes()]
        shifts.setdefault(request.session_id, set()).add(shift)
    assert all(len(each) == 1 for each in shifts.values())
    drawn = [shift for each in shifts.values() for shift in each]
    assert len(set(drawn)) > 1
    assert all(0 <= shift < 2_000_000_000 for shift in drawn)


def test_jittered_requests_are_numbered_by_arrival_and_follow_their_parents() -> None:
    moved = load_workload(replace(CHAT, start_jitter_s=30.0), data_dir=None, seed=3).requests
    assert [request.id for request in moved] == list(range(len(moved)))
    arrivals = [request.arrival_ns for request in moved]
    assert arrivals == sorted(arrivals)
    assert all(r.parent_id is None or r.parent_id < r.id for r in moved)


def test_jitter_differs_between_seeds() -> None:
    config = replace(CHAT, start_jitter_s=2.0)
    first, second = (
        [
            r.arrival_ns
            for r in jitter_starts(
                load_workload(CHAT, data_dir=None, seed=0).requests, config.start_jitter_s, seed
            )
        ]
        for seed in (0, 1)
    )
    assert first != second


def test_a_mooncake_trace_is_found_in_the_data_directory(tmp_path: Path) -> None:
    record = mooncake_record((5, 600, 4, [0, 1]))
    write_lines(tmp_path / "mooncake_conversation.jsonl.gz", [record])
    config = WorkloadConfig(kind="mooncake_conversation")
    workload = load_workload(config, data_dir=str(tmp_path), seed=0)
    assert [r.prompt_len for r in workload.requests] == [600]
    assert not workload.description.endswith("session starts drawn")


def test_weka_sessions_have_no_start_times(tmp_path: Path) -> None:
    packed = {
        "requests": [{"t": 0, "in": 200, "out": 4, "stop": "", "keep": 0, "new": [1, 3]}],
    }
    path = write_lines(tmp_path / "sessions.jsonl", [packed])
    config = WorkloadConfig(kind="weka_agentic", path=str(path))
    workload = load_workload(config, data_dir=None, seed=0)
    assert workload.description.endswith("session starts drawn")


def test_every_kind_is_known() -> None:
    assert set(KINDS) >= {"builtin", "chat", "agents", "mooncake_conversation", "weka_agentic"}


def test_a_sample_has_the_share_of_sessions_asked_for() -> None:
    workload = load_workload(CHAT, data_dir=None, seed=0)
    assert len({r.session_id for r in sample_sessions(workload, 0.25, 3).requests}) == 10


def test_a_smaller_sample_is_a_part_of_a_larger_one() -> None:
    workload = load_workload(CHAT, data_dir=None, seed=0)
    small, large = (first_tokens(sample_sessions(workload, share, 3)) for share in (0.2, 0.6))
    assert small < large


def test_other_seeds_sample_other_sessions() -> None:
    workload = load_workload(CHAT, data_dir=None, seed=0)
    one, other = (first_tokens(sample_sessions(workload, 0.5, seed)) for seed in (3, 4))
    assert one != other


def test_a_sample_keeps_whole_sessions_and_numbers_them_anew() -> None:
    workload = load_workload(CHAT, data_dir=None, seed=0)
    everything = {r.prompt.to_bytes(): r for r in workload.requests}
    sample = sample_sessions(workload, 0.5, 3).requests
    assert [r.id for r in sample] == list(range(len(sample)))
    for request in sample:
        old_parent = everything[request.prompt.to_bytes()].parent_id
        if old_parent is None:
            assert request.parent_id is None
        else:
            assert request.parent_id is not None
            parent = sample[request.parent_id]
            assert parent.prompt.to_bytes() == workload.requests[old_parent].prompt.to_bytes()
            assert request.session_id == parent.session_id


def test_the_whole_share_is_the_workload() -> None:
    workload = load_workload(CHAT, data_dir=None, seed=0)
    everything = [shape(r) for r in workload.requests]
    assert [shape(r) for r in sample_sessions(workload, 1.0, 3).requests] == everything


def test_a_tiny_share_keeps_one_session() -> None:
    workload = load_workload(CHAT, data_dir=None, seed=0)
    assert len({r.session_id for r in sample_sessions(workload, 1e-9, 3).requests}) == 1


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_an_impossible_share_is_refused(share: float) -> None:
    workload = load_workload(CHAT, data_dir=None, seed=0)
    with pytest.raises(ValueError, match=r"above 0 and at most 1.*repeat_sessions"):
        sample_sessions(workload, share, 3)


def test_sub_agents_stay_with_the_session_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    agent = {"t": 1.0, "type": "subagent", "requests": [ask(0.0, 130, [7, 8])]}
    for number in range(6):
        record = session(ask(0.0, 200 + number, [1, 2, 3]), agent)
        (tmp_path / "raw" / f"trace_{number}.json").write_text(json.dumps(record))
    config = WorkloadConfig(kind="weka_agentic", path=str(tmp_path / "raw"))
    sample = sample_sessions(load_workload(config, data_dir=None, seed=0), 0.5, 1)
    assert sorted(r.prompt_len == 130 for r in sample.requests) == [False] * 3 + [True] * 3


def test_a_trace_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mooncake_conversation.jsonl"
    config = WorkloadConfig(kind="mooncake_conversation", path=str(path))
    for count in (1, 2):
        write_lines(path, [mooncake_record((5, 600, 4, [0, 1]))] * count)
        os.utime(path, ns=(count, count))
        assert len(load_workload(config, data_dir=None, seed=0).requests) == count


def test_a_cut_leaves_the_trace_whole_for_the_next_run(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mooncake_conversation.jsonl", [mooncake_record((5, 600, 4, [0, 1]))] * 3
    )
    config = WorkloadConfig(kind="mooncake_conversation", path=str(path))
    short = load_workload(replace(config, limit=1), data_dir=None, seed=0)
    assert len(short.requests) == 1
    assert len(load_workload(config, data_dir=None, seed=0).requests) == 3


def test_sessions_are_repeated_with_tokens_of_their_own() -> None:
    plain = load_workload(CHAT, data_dir=None, seed=0)
    more = repeat_sessions(plain, 2.5, 0)
    assert len(first_tokens(more)) == len({r.session_id for r in more.requests}) == 100
    ends = [r.prompt.starts + r.prompt.counts for r in plain.requests]
    copied = [r for r in more.requests if r.prompt.starts[0] >= max(each.max() for each in ends)]
    assert len(copied) == len(more.requests) - len(plain.requests)
    lengths = sorted(r.prompt_len for r in plain.requests)
    assert sorted(r.prompt_len for r in repeat_sessions(plain, 2, 0).requests) == sorted(
        2 * lengths
    )
    assert [r.id for r in more.requests] == list(range(len(more.requests)))
    for request in more.requests:
        if request.parent_id is not None:
            parent = more.requests[request.parent_id]
            assert parent.session_id == request.session_id
            assert parent.arrival_ns <= request.arrival_ns


def test_repeated_sessions_come_in_the_time_of_the_workload_and_keep_their_own() -> None:
    plain = load_workload(CHAT, data_dir=None, seed=0)
    more = repeat_sessions(plain, 3, 0)
    arrivals, first, last = (
        sorted(request.arrival_ns for request in requests)
        for requests in (more.requests, plain.requests[:1], plain.requests[-1:])
    )
    assert first[0] <= arrivals[0] <= arrivals[-1] <= last[0]
    gaps = [
        sorted(
            request.arrival_ns - workload.requests[request.parent_id].arrival_ns
            for request in workload.requests
            if request.parent_id is not None
        )
        for workload in (plain, more)
    ]
    assert gaps[1] == sorted(3 * gaps[0])


def test_more_tokens_than_there_are_ids_is_refused() -> None:
    plain = load_workload(CHAT, data_dir=None, seed=0)
    with pytest.raises(ValueError, match="can be repeated at most"):
        repeat_sessions(plain, 1e5, 0)


def test_a_session_ends_before_its_first_request_beyond_the_context(tmp_path: Path) -> None:
    agent = {"t": 20.0, "type": "subagent", "requests": [ask(20.0, 130, [7, 8])]}
    late = {"t": 40.0, "type": "subagent", "requests": [ask(40.0, 130, [7, 8])]}
    turns = [ask(10.0 * turn, 200 + 64 * turn, [*range(4 + turn)]) for turn in range(6)]
    (tmp_path / "long.json").write_text(json.dumps(session(*turns[:3], agent, *turns[3:5], late)))
    (tmp_path / "short.json").write_text(json.dumps(session(ask(0.0, 100, [1, 2]), name="b")))
    config = WorkloadConfig(kind="weka_agentic", path=str(tmp_path), max_context=200 + 3 * 64 + 39)
    kept = load_workload(config, data_dir=None, seed=0)
    # the fourth turn and its answer of 40 tokens are one token too many
    assert sorted(r.prompt_len for r in kept.requests) == [100, 130, 200, 264, 328]
    assert [r.id for r in kept.requests] == list(range(5))
    (note,) = kept.notes
    assert note.startswith("3 of 8 requests and 49% of the prompt tokens left out")
    uncut = load_workload(replace(config, max_context=432), data_dir=None, seed=0)
    assert (len(uncut.requests), len(uncut.notes)) == (6, 1)
    assert load_workload(replace(config, max_context=None), data_dir=None, seed=0).notes == ()


def test_a_context_that_no_request_fits_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [session(ask(0.0, 100, [1, 2]))])
    config = WorkloadConfig(kind="weka_agentic", path=str(path), max_context=9)
    with pytest.raises(ValueError, match="max_context=9 leaves no request"):
        load_workload(config, data_dir=None, seed=0)


def test_joins_are_numbered_anew_in_samples_and_copies(tmp_path: Path) -> None:
    agent = {"t": 3.0, "type": "subagent", "requests": [ask(3.0, 130, [7, 8])]}
    for added, name in enumerate(("a", "b")):
        turns = [ask(0.0, 200 + added, [1, 2, 3]), agent, ask(90.0, 300, [1, 2, 3, 4])]
        (tmp_path / f"{name}.json").write_text(json.dumps(session(*turns, name=name)))
    config = WorkloadConfig(kind="weka_agentic", path=str(tmp_path), session_rate=0.001)
    workload = load_workload(config, data_dir=None, seed=0)
    twice = repeat_sessions(workload, 2.0, seed=1)
    for each in (workload, twice):
        joined = [(r, each.requests[join]) for r in each.requests for join in r.joins]
        assert len(joined) == len(each.requests) // 3
        for request, last in joined:
            assert last.parent_id == request.parent_id
            assert last.prompt_len == 130
            sibling = each.requests[request.parent_id or 0]
            assert np.isin(last.prompt.starts - sibling.prompt.starts[0], range(2000)).all()
