"""Windows of a workload: they share no measured request, and sessions keep their ids."""

from dataclasses import replace
from pathlib import Path

import pytest

from hicache.config import Arrivals, GeneratedConfig, TraceConfig, WorkloadConfig
from hicache.request import Request
from hicache.workload.windows import trees
from hicache.workload.workload import jitter_starts, load_workload, repeat_sessions, sample_sessions
from tests.workload.test_weka import ask, session
from tests.workload.traces import mooncake_record, write_lines

CHAT = GeneratedConfig(kind="chat", num_sessions=40, start_jitter_s=3.0)
WINDOWS = 5
WARM_UP_NS = 2 * 10**9


def loaded(config: WorkloadConfig, seed: int = 0) -> list[Request]:
    return list(load_workload(config, data_dir=None, seed=seed).requests)


def window(number: int, config: WorkloadConfig = CHAT) -> WorkloadConfig:
    return replace(config, slice=f"{number}/{WINDOWS}", warm_up_s=WARM_UP_NS / 1e9)


def prompts(requests: list[Request]) -> list[bytes]:
    return [request.prompt.to_bytes() for request in requests]


def mooncake(folder: Path, times_ms: list[int], blocks: list[list[int]]) -> WorkloadConfig:
    lines = [
        mooncake_record((at, 512 * len(ids), 4, ids))
        for at, ids in zip(times_ms, blocks, strict=True)
    ]
    path = write_lines(folder / "mooncake_conversation.jsonl", lines)
    return TraceConfig(kind="mooncake_conversation", path=str(path))


def test_windows_hold_each_request_after_the_warm_up_once_and_in_order():
    whole = loaded(CHAT)
    parts = [loaded(window(number)) for number in range(WINDOWS)]
    measured = [[r for r in part if r.arrival_ns >= WARM_UP_NS] for part in parts]
    after = [r for r in whole if r.arrival_ns >= whole[0].arrival_ns + WARM_UP_NS]
    assert prompts([request for part in measured for request in part]) == prompts(after)
    assert all(measured)


def test_a_window_starts_with_the_requests_of_its_warm_up_and_is_numbered_anew():
    whole, orphans = loaded(CHAT), 0
    for number in range(WINDOWS):
        part = loaded(window(number))
        assert [request.id for request in part] == list(range(len(part)))
        first = prompts(whole).index(part[0].prompt.to_bytes())
        assert prompts(part) == prompts(whole[first : first + len(part)])
        pairs = list(zip(whole[first:], part, strict=False))
        (shift,) = {before.arrival_ns - after.arrival_ns for before, after in pairs}
        before_ns = whole[first - 1].arrival_ns - shift if first else -1
        assert before_ns < 0 <= part[0].arrival_ns
        for before, after in pairs:
            assert after.parent_id is None or after.parent_id < after.id
            orphans += after.parent_id is None and before.parent_id is not None
    assert orphans > 0


def test_a_session_has_one_id_under_every_seed_and_in_every_window(tmp_path):
    turns = [(turn, chat) for turn in range(4) for chat in range(6)]
    blocks = [[10 * chat + n for n in range(turn + 2)] for turn, chat in turns]
    config = mooncake(tmp_path, [1000 * second for second in range(24)], blocks)
    config = replace(config, start_jitter_s=3.0)
    names: dict[bytes, set[int]] = {}
    orders = set()
    for seed in range(4):
        for part in (config, *(window(number, config) for number in range(WINDOWS))):
            requests = loaded(part, seed)
            orders.add(tuple(prompts(requests)))
            for request in requests:
                names.setdefault(request.prompt.to_bytes(), set()).add(request.session_id)
    assert len(orders) > 1 + WINDOWS  # so names do not follow from the order
    assert [len(each) for each in names.values()] == [1] * 24
    assert len(set.union(*names.values())) == 6


def test_sessions_with_other_prompts_and_copies_have_other_ids():
    first, second = ({r.session_id for r in loaded(CHAT, seed)} for seed in (0, 1))
    assert len(first | second) == 80
    plain = load_workload(CHAT, data_dir=None, seed=0)
    thrice = {request.session_id for request in repeat_sessions(plain, 3, 0).requests}
    assert first < thrice
    assert len(thrice) == 120


def test_turns_whose_parent_came_before_the_window_are_one_session(tmp_path):
    blocks = [[1, 2], [5, 6], [1, 2, 3], [1, 2, 4]]  # one chat branches
    config = mooncake(tmp_path, [0, 1000, 90_000, 91_000], blocks)
    config = replace(config, slice="1/2")
    one, other = loaded(config)
    assert one.parent_id is other.parent_id is None
    assert one.session_id == other.session_id
    moved = jitter_starts([one, other], 60.0, 0)
    assert moved[1].arrival_ns - moved[0].arrival_ns == 1_000_000_000
    whole = load_workload(config, data_dir=None, seed=0)
    assert len(sample_sessions(whole, 0.5, 0).requests) == 2


def test_windows_of_closed_arrivals_share_no_session_under_any_seed(tmp_path):
    agent = {"t": 1.0, "type": "subagent", "requests": [ask(0.0, 130, [7, 8])]}
    sessions = [
        session(ask(0.0, 200 + number, [1, 2, 3]), agent, name=str(number)) for number in range(12)
    ]
    path = write_lines(tmp_path / "sessions.jsonl", sessions)
    closed = TraceConfig(kind="weka_agentic", path=str(path), arrivals=Arrivals.closed)
    seen: list[set[int]] = []
    for number in range(WINDOWS):
        one, other = (loaded(window(number, closed), seed) for seed in (0, 1))
        seen.append(set(trees(one).values()))
        assert seen[-1] == set(trees(other).values())
        assert len(one) == 2 * len(seen[-1])  # with its sub-agent
    assert [len(each) for each in seen] == [2, 3, 2, 3, 2]
    assert len(set.union(*seen)) == 12


def test_an_empty_window_is_refused(tmp_path):
    config = mooncake(tmp_path, [0, 1000, 90_000], [[1, 2], [3, 4], [5, 6]])
    wanted = r"workload\.slice=2/5 is empty.*has 3 requests"
    with pytest.raises(ValueError, match=wanted):
        loaded(window(2, config))


@pytest.mark.parametrize("text", ["5/5", "0/0", "1", "-1/2", "a/b", "1/2/3"])
def test_a_slice_that_names_no_part_is_refused(text):
    with pytest.raises(ValueError, match=r"workload\.slice must be i/n with i from 0 to n - 1"):
        WorkloadConfig(slice=text)
