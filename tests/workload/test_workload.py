"""Loading a workload: limits, copies, samples and jitter keep sessions and their times."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hicache.config import GeneratedConfig, TraceConfig, WorkloadConfig
from hicache.workload import workload
from hicache.workload.generators import chat
from hicache.workload.workload import (
    Workload,
    jitter_starts,
    load_workload,
    repeat_sessions,
    sample_sessions,
)
from tests.workload.test_weka import ask, session
from tests.workload.traces import mooncake_record, write_lines

CHAT = GeneratedConfig(kind="chat", num_sessions=40)
ROW = mooncake_record((5, 600, 4, [0, 1]))


def load(config: WorkloadConfig = CHAT, seed: int = 0, **changes: object) -> Workload:
    return load_workload(replace(config, **changes), data_dir=None, seed=seed)


def first_tokens(workload: Workload) -> set[int]:
    """Return the id after the last token of each first prompt, which identifies the session."""
    firsts = [r.prompt for r in workload.requests if r.parent_id is None]
    return {int(prompt.starts[-1] + prompt.counts[-1]) for prompt in firsts}


def shapes(workload: Workload) -> list[tuple[object, ...]]:
    return [(r.id, r.arrival_ns, r.prompt.to_bytes(), r.parent_id) for r in workload.requests]


def check_order(workload: Workload) -> None:
    """Check that requests are numbered by arrival, and follow their parents in one session."""
    requests = workload.requests
    assert [r.id for r in requests] == list(range(len(requests)))
    arrivals = [r.arrival_ns for r in requests]
    assert arrivals == sorted(arrivals)
    for request in requests:
        if request.parent_id is not None:
            assert request.parent_id < request.id
            assert requests[request.parent_id].session_id == request.session_id


def test_an_unknown_workload_kind_is_refused_with_the_known_kinds():
    with pytest.raises(ValueError, match=r"workload\.kind must be one of builtin, chat.*'chta'"):
        load(WorkloadConfig(kind="chta"))


def test_the_description_counts_requests_and_sessions():
    workload = load()
    wanted = f"chat: {len(workload.requests)} requests in 40 sessions, "
    assert workload.description.startswith(wanted)


def test_a_limit_keeps_the_first_requests():
    assert shapes(load(limit=7)) == shapes(load())[:7]


@pytest.mark.parametrize(("most", "calls"), [(1000, [0, 1]), (3, [0, 0, 1, 0])])
def test_jobs_of_one_process_share_a_few_generated_requests(monkeypatch, most, calls):
    made = []

    def generate(config, seed):
        made.append(seed)
        return chat(config, seed=seed)

    monkeypatch.setitem(workload.GENERATORS, "chat", generate)
    monkeypatch.setattr(workload, "_GENERATED", {})
    monkeypatch.setattr(workload, "MOST_SHARED", most)
    first, again, other, last = (load(limit=4, seed=seed) for seed in (0, 0, 1, 0))
    assert made == calls
    assert shapes(first) == shapes(again) == shapes(last) != shapes(other)
    again.requests[0].prompt = again.requests[1].prompt  # as a user's class may do
    assert shapes(first) == shapes(last) == shapes(load(limit=4)) != shapes(again)


def test_a_time_scale_stretches_arrivals():
    slow = load(time_scale=2.0).requests
    assert [r.arrival_ns for r in slow] == [2 * r.arrival_ns for r in load().requests]


@pytest.mark.parametrize("stride", [2, 7, 128])
def test_a_stride_keeps_every_nth_token(stride):
    for before, after in zip(load().requests, load(token_stride=stride).requests, strict=True):
        for part in ("prompt", "output"):
            ids = np.frombuffer(getattr(before, part).to_bytes(), "<i4")
            kept = np.frombuffer(getattr(after, part).to_bytes(), "<i4")
            wanted = ids[ids % stride == 0] // stride
            # a prompt or an answer without such a token keeps one
            assert np.array_equal(kept, wanted if len(wanted) else ids[:1] // stride)


def test_jitter_delays_each_session_by_a_time_of_its_own():
    plain, moved = load(seed=3), load(seed=3, start_jitter_s=2.0)
    check_order(moved)
    begun = {request.prompt.to_bytes(): request.arrival_ns for request in plain.requests}
    shifts: dict[int, set[int]] = {}
    for request in moved.requests:
        shift = request.arrival_ns - begun[request.prompt.to_bytes()]
        shifts.setdefault(request.session_id, set()).add(shift)
    assert all(len(each) == 1 for each in shifts.values())
    drawn = [shift for each in shifts.values() for shift in each]
    assert len(set(drawn)) > 1
    assert all(0 <= shift < 2_000_000_000 for shift in drawn)
    check_order(load(seed=3, start_jitter_s=30.0))


def test_the_jitter_of_session_starts_differs_between_seeds():
    requests = load().requests
    first, second = ([r.arrival_ns for r in jitter_starts(requests, 2.0, it)] for it in (0, 1))
    assert first != second


def test_only_weka_sessions_have_random_starts(tmp_path):
    write_lines(tmp_path / "mooncake_conversation.jsonl.gz", [ROW])
    config = TraceConfig(kind="mooncake_conversation")
    found = load_workload(config, data_dir=str(tmp_path), seed=0)
    assert [r.prompt_len for r in found.requests] == [600]
    assert not found.description.endswith("session starts drawn")
    packed = {"requests": [{"t": 0, "in": 200, "out": 4, "stop": "", "keep": 0, "new": [1, 3]}]}
    path = write_lines(tmp_path / "sessions.jsonl", [packed])
    found = load(TraceConfig(kind="weka_agentic", path=str(path)))
    assert found.description.endswith("session starts drawn")


def test_a_sample_has_the_given_share_of_the_sessions():
    workload = load()
    quarter, one = (first_tokens(sample_sessions(workload, share, 3)) for share in (0.25, 1e-9))
    assert (len(quarter), len(one)) == (10, 1)
    assert shapes(sample_sessions(workload, 1.0, 3)) == shapes(workload)
    small, large, other = (
        first_tokens(sample_sessions(workload, *each)) for each in ((0.2, 3), (0.6, 3), (0.6, 4))
    )
    assert small < large != other


def test_a_sample_keeps_whole_sessions():
    workload = load()
    everything = {r.prompt.to_bytes(): r for r in workload.requests}
    sample = sample_sessions(workload, 0.5, 3)
    check_order(sample)
    for request in sample.requests:
        old_parent = everything[request.prompt.to_bytes()].parent_id
        assert (request.parent_id is None) == (old_parent is None)
        if request.parent_id is not None:
            parent = sample.requests[request.parent_id]
            assert parent.prompt.to_bytes() == workload.requests[old_parent].prompt.to_bytes()


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(ValueError, match=r"above 0 and at most 1.*repeat_sessions"):
        sample_sessions(load(), share, 3)


def weka_folder(folder: Path, *sessions: dict[str, object], **settings: object) -> Workload:
    for number, record in enumerate(sessions):
        (folder / f"{number}.json").write_text(json.dumps(record))
    return load(TraceConfig(kind="weka_agentic", path=str(folder), **settings))


def subagent(t: float, start: float) -> dict[str, object]:
    return {"t": t, "type": "subagent", "requests": [ask(start, 130, [7, 8])]}


def test_a_sample_keeps_sub_agents_with_their_session(tmp_path):
    sessions = [session(ask(0.0, 200 + n, [1, 2, 3]), subagent(1.0, 0.0)) for n in range(6)]
    sample = sample_sessions(weka_folder(tmp_path, *sessions), 0.5, 1)
    assert sorted(r.prompt_len == 130 for r in sample.requests) == [False] * 3 + [True] * 3


def test_a_changed_trace_is_read_again_and_a_limit_leaves_the_kept_trace_whole(tmp_path):
    path = tmp_path / "mooncake_conversation.jsonl"
    config = TraceConfig(kind="mooncake_conversation", path=str(path))
    for count in (1, 3):
        write_lines(path, [ROW] * count)
        os.utime(path, ns=(count, count))
        assert len(load(config, limit=1).requests) == 1
        assert len(load(config).requests) == count


def test_copies_of_sessions_have_tokens_of_their_own_and_the_same_gaps():
    plain = load()
    more = repeat_sessions(plain, 2.5, 0)
    check_order(more)
    assert len(first_tokens(more)) == len({r.session_id for r in more.requests}) == 100
    end = max((r.prompt.starts + r.prompt.counts).max() for r in plain.requests)
    copied = [r for r in more.requests if r.prompt.starts[0] >= end]
    assert len(copied) == len(more.requests) - len(plain.requests)
    thrice = repeat_sessions(plain, 3, 0)
    lengths = [sorted(r.prompt_len for r in each.requests) for each in (plain, thrice)]
    gaps = [
        sorted(
            r.arrival_ns - each.requests[r.parent_id].arrival_ns
            for r in each.requests
            if r.parent_id is not None
        )
        for each in (plain, thrice)
    ]
    assert lengths[1] == sorted(3 * lengths[0])
    assert gaps[1] == sorted(3 * gaps[0])
    arrivals = [request.arrival_ns for request in thrice.requests]
    first, last = plain.requests[0].arrival_ns, plain.requests[-1].arrival_ns
    assert first <= min(arrivals) <= max(arrivals) <= last


def test_more_copies_than_there_are_token_ids_are_refused():
    with pytest.raises(ValueError, match="can be repeated at most"):
        repeat_sessions(load(), 1e5, 0)


def test_a_session_ends_before_its_first_request_beyond_the_context(tmp_path):
    turns = [ask(10.0 * turn, 200 + 64 * turn, [*range(4 + turn)]) for turn in range(6)]
    agents = subagent(20.0, 20.0), subagent(40.0, 40.0)
    long = session(*turns[:3], agents[0], *turns[3:5], agents[1])
    short = session(ask(0.0, 100, [1, 2]), name="b")
    kept = weka_folder(tmp_path, long, short, max_context=200 + 3 * 64 + 39)
    # the fourth turn and its answer of 40 tokens are one token too many
    assert sorted(r.prompt_len for r in kept.requests) == [100, 130, 200, 264, 328]
    assert [r.id for r in kept.requests] == list(range(5))
    (note,) = kept.notes
    assert note.startswith("3 of 8 requests and 49% of the prompt tokens left out")
    longer = weka_folder(tmp_path, long, short, max_context=432)
    assert (len(longer.requests), len(longer.notes)) == (6, 1)
    assert weka_folder(tmp_path, long, short, max_context=None).notes == ()
    with pytest.raises(ValueError, match="max_context=9 leaves no request"):
        weka_folder(tmp_path, long, short, max_context=9)


def test_copies_of_sessions_join_their_own_sub_agents(tmp_path):
    sessions = [
        session(ask(0.0, 200 + n, [1, 2, 3]), subagent(3.0, 3.0), ask(90.0, 300, [1, 2, 3, 4]))
        for n in range(2)
    ]
    workload = weka_folder(tmp_path, *sessions, session_rate=0.001)
    for each in (workload, repeat_sessions(workload, 2.0, seed=1)):
        joined = [(r, each.requests[join]) for r in each.requests for join in r.joins]
        assert len(joined) == len(each.requests) // 3
        for request, last in joined:
            assert last.parent_id == request.parent_id
            assert last.prompt_len == 130
            sibling = each.requests[request.parent_id or 0]
            assert np.isin(last.prompt.starts - sibling.prompt.starts[0], range(2000)).all()
