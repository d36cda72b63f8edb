import json
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.config import Arrivals, WorkloadConfig
from hicache.request import Request
from hicache.workload.windows import trees
from hicache.workload.workload import jitter_starts, load_workload, repeat_sessions, sample_sessions
from tests.workload.test_weka import ask, session
from tests.workload.traces import mooncake_record, write_lines

CHAT = WorkloadConfig(kind="chat", num_sessions=40, start_jitter_s=3.0)
WINDOWS = 5
WARM_UP_S = 2.0


def loaded(config: WorkloadConfig, seed: int = 0) -> list[Request]:
    return list(load_workload(config, data_dir=None, seed=seed).requests)


def window(number: int, config: WorkloadConfig = CHAT, **changes: object) -> WorkloadConfig:
    return replace(config, windows=WINDOWS, window=number, **({"warm_up_s": WARM_UP_S} | changes))


def prompts(requests: list[Request]) -> list[bytes]:
    return [request.prompt.to_bytes() for request in requests]


def measured(requests: list[Request], warm_up_s: float = WARM_UP_S) -> list[Request]:
    return [request for request in requests if request.arrival_ns >= warm_up_s * 1e9]


def test_windows_hold_what_comes_after_the_warm_up_once_and_in_order() -> None:
    whole = loaded(CHAT)
    parts = [measured(loaded(window(number))) for number in range(WINDOWS)]
    after = [r for r in whole if r.arrival_ns >= whole[0].arrival_ns + WARM_UP_S * 1e9]
    assert prompts([request for part in parts for request in part]) == prompts(after)
    assert all(parts)


def test_a_window_is_preceded_by_what_came_before_it() -> None:
    whole = loaded(CHAT)
    for number in range(WINDOWS):
        part = loaded(window(number))
        first = prompts(whole).index(part[0].prompt.to_bytes())
        assert prompts(part) == prompts(whole[first : first + len(part)])
        shifts = {
            before.arrival_ns - after.arrival_ns
            for before, after in zip(whole[first:], part, strict=False)
        }
        assert len(shifts) == 1
        before_ns = whole[first - 1].arrival_ns - min(shifts) if first else -1
        assert before_ns < 0 <= part[0].arrival_ns


def test_a_window_is_numbered_anew_and_who_follows_nobody_in_it_waits_for_nobody() -> None:
    whole = {request.prompt.to_bytes(): request for request in loaded(CHAT)}
    part = loaded(window(3))
    assert [request.id for request in part] == list(range(len(part)))
    orphans = 0
    for request in part:
        parent = whole[request.prompt.to_bytes()].parent_id
        assert request.parent_id is None or request.parent_id < request.id
        orphans += request.parent_id is None and parent is not None
    assert orphans > 0


def test_a_session_has_one_name_under_every_seed_and_in_every_window(tmp_path: Path) -> None:
    lines = [
        mooncake_record(
            (1000 * second, 1024 + 512 * turn, 4, [10 * chat + n for n in range(turn + 2)])
        )
        for second, (turn, chat) in enumerate(
            (turn, chat) for turn in range(4) for chat in range(6)
        )
    ]
    path = write_lines(tmp_path / "mooncake_conversation.jsonl", lines)
    config = WorkloadConfig(kind="mooncake_conversation", path=str(path), start_jitter_s=3.0)
    names: dict[bytes, set[int]] = {}
    orders = set()
    for seed in range(4):
        parts = [config, *(window(number, config) for number in range(WINDOWS))]
        for requests in (loaded(part, seed) for part in parts):
            orders.add(tuple(prompts(requests)))
            for request in requests:
                names.setdefault(request.prompt.to_bytes(), set()).add(request.session_id)
    assert len(orders) > 1 + WINDOWS  # a name that went by order would not have held
    assert [len(each) for each in names.values()] == [1] * 24
    assert len(set.union(*names.values())) == 6


def test_other_prompts_have_other_names() -> None:
    first, second = ({r.session_id for r in loaded(CHAT, seed)} for seed in (0, 1))
    assert len(first | second) == 80


def test_a_copy_of_a_session_is_another_session() -> None:
    plain = load_workload(CHAT, data_dir=None, seed=0)
    mine = {request.session_id for request in plain.requests}
    twice = {request.session_id for request in repeat_sessions(plain, 3, 0).requests}
    assert mine < twice
    assert len(twice) == 120


def test_turns_whose_parent_came_before_the_window_belong_together(tmp_path: Path) -> None:
    blocks = {0: [1, 2], 1000: [5, 6], 90_000: [1, 2, 3], 91_000: [1, 2, 4]}  # one chat, branched
    lines = [mooncake_record((at, 512 * len(ids), 4, ids)) for at, ids in blocks.items()]
    path = write_lines(tmp_path / "mooncake_conversation.jsonl", lines)
    config = WorkloadConfig(kind="mooncake_conversation", path=str(path), windows=2, window=1)
    one, other = loaded(config)
    assert one.parent_id is other.parent_id is None
    assert one.session_id == other.session_id
    moved = jitter_starts([one, other], 60.0, 0)
    assert moved[1].arrival_ns - moved[0].arrival_ns == 1_000_000_000
    whole = load_workload(config, data_dir=None, seed=0)
    assert len(sample_sessions(whole, 0.5, 0).requests) == 2


def test_windows_of_closed_arrivals_share_no_session_whatever_the_seed(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    agent = {"t": 1.0, "type": "subagent", "requests": [ask(0.0, 130, [7, 8])]}
    for number in range(12):
        record = session(ask(0.0, 200 + number, [1, 2, 3]), agent)
        (tmp_path / "raw" / f"trace_{number}.json").write_text(json.dumps(record))
    closed = WorkloadConfig(
        kind="weka_agentic", path=str(tmp_path / "raw"), arrivals=Arrivals.closed
    )
    seen: list[set[int]] = []
    for number in range(WINDOWS):
        one, other = (loaded(window(number, closed), seed) for seed in (0, 1))
        names = set(trees(one).values())
        assert names == set(trees(other).values())
        assert len(one) == 2 * len(names)  # with its sub-agent
        seen.append(names)
    assert [len(each) for each in seen] == [2, 3, 2, 3, 2]
    assert len(set.union(*seen)) == 12


def test_a_window_in_which_nothing_comes_is_refused(tmp_path: Path) -> None:
    lines = [mooncake_record((at, 600, 4, [at, at + 1])) for at in (0, 1000, 90_000)]
    path = write_lines(tmp_path / "mooncake_conversation.jsonl", lines)
    config = WorkloadConfig(kind="mooncake_conversation", path=str(path))
    wanted = r"workload\.window=2 of workload\.windows=5 is empty.*has 3 requests"
    with pytest.raises(ValueError, match=wanted):
        loaded(window(2, config))


@pytest.mark.parametrize(("windows", "number"), [(None, 1), (5, 5)])
def test_a_window_that_there_is_not_is_refused(windows: int | None, number: int) -> None:
    with pytest.raises(ValueError, match=r"workload\.window must be less than"):
        WorkloadConfig(windows=windows, window=number)
