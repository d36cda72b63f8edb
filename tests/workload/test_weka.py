"""Agentic sessions of the Weka format: turns, sub-agents, think times, and refusals."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from hicache.config import TraceConfig, TraceTokens
from hicache.request import Request
from hicache.runs.schema import config_of
from hicache.workload.trace import Trace, TraceError
from hicache.workload.weka import load_weka
from tests.workload.infinite_cache import token_hit_rate
from tests.workload.traces import ids, shared_len, whole, write_lines

Entry = dict[str, object]


def ask(t: float, prompt: int, blocks: list[int], **more: object) -> Entry:
    """Return a raw request at `t` s; its prompt has `prompt` tokens, its answer 40 in 2 s."""
    request: Entry = {"t": t, "type": "n", "in": prompt, "out": 40, "hash_ids": blocks}
    return request | {"stop": "tool_use", "api_time": 2.0, "think_time": 3.0} | more


def session(*requests: Entry, name: str = "a") -> Entry:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def load(
    folder: Path,
    *sessions: Entry,
    seed: int = 0,
    rate: float = 1.0,
    tokens: TraceTokens = TraceTokens.reconstructed,
) -> list[Request]:
    """Write each session to a file of `folder`, and return the requests that are loaded from it."""
    for place, record in enumerate(sessions):
        (folder / f"trace_{place}.json").write_text(json.dumps(record))
    config = TraceConfig(tokens=tokens, think_cap_s=100, session_rate=rate)
    return load_weka(Trace(folder), config, seed=seed)


THREE_TURNS = session(
    ask(0.0, 200, [1, 2, 3], think_time=0.0),
    ask(5.0, 300, [1, 2, 3, 4]),
    ask(10.0, 400, [1, 2, 3, 4, 5, 6], stop="end_turn"),
)


def test_a_turn_follows_the_turn_before_after_its_think_time(tmp_path):
    requests = load(tmp_path, THREE_TURNS)
    assert [(r.parent_id, r.think_ns, r.stop_reason) for r in requests] == [
        (None, 0, "tool_use"),
        (0, 3 * 10**9, "tool_use"),
        (1, 3 * 10**9, "end_turn"),
    ]


@pytest.mark.parametrize(
    ("tokens", "shared"),
    [(TraceTokens.reconstructed, [240, 340]), (TraceTokens.literal, [192, 256])],
)
def test_a_turn_repeats_the_turn_before_and_its_answer_or_full_blocks(tmp_path, tokens, shared):
    turns = load(tmp_path, THREE_TURNS, tokens=tokens)
    pairs = pairwise(turns)
    assert [shared_len(whole(one), ids(two.prompt)) for one, two in pairs] == shared


def test_a_turn_with_a_changed_context_does_not_repeat_the_answer(tmp_path):
    first, second = load(tmp_path, session(ask(0.0, 200, [1, 2, 3]), ask(5.0, 300, [1, 2, 9, 10])))
    assert second.parent_id == first.id
    assert shared_len(whole(first), ids(second.prompt)) == 128


def test_a_turn_that_returns_to_an_older_context_repeats_it_and_its_answer(tmp_path):
    turns = ask(0.0, 200, [1, 2, 3]), ask(5.0, 150, [20, 21]), ask(10.0, 300, [1, 2, 3, 4])
    requests = load(tmp_path, session(*turns))
    assert shared_len(whole(requests[0]), ids(requests[2].prompt)) == 240


def test_equal_block_ids_of_two_sessions_share_no_token(tmp_path):
    requests = load(tmp_path, THREE_TURNS, session(ask(0.0, 210, [1, 2, 3]), name="b"))
    left, right = {r.session_id: set(ids(r.prompt).tolist()) for r in requests}.values()
    assert not left & right


def subagent(t: float, *requests: Entry, **more: object) -> Entry:
    return {"t": t, "type": "subagent", "requests": list(requests), **more}


def test_the_first_request_of_a_sub_agent_follows_the_request_that_started_it(tmp_path):
    agent = subagent(1.5, ask(0.0, 130, [7, 8]), ask(4.0, 200, [7, 8, 9]))
    turns = ask(0.0, 200, [1, 2, 3]), agent, subagent(3.0), ask(9.0, 300, [1, 2, 3, 4])
    requests = load(tmp_path, session(*turns))
    start = requests[0].arrival_ns
    assert [(r.prompt_len, r.session_id, r.parent_id, r.arrival_ns - start) for r in requests] == [
        (200, 0, None, 0),
        (130, 1, 0, 1_500_000_000),
        (200, 1, 1, 5_500_000_000),
        (300, 0, 0, 9_000_000_000),
    ]


def test_a_capped_think_time_shortens_arrivals(tmp_path):
    first, second = load(
        tmp_path,
        session(ask(0.0, 200, [1, 2, 3]), ask(5002.0, 300, [1, 2, 3, 4], think_time=5000.0)),
    )
    assert second.think_ns == 100 * 10**9
    assert second.arrival_ns - first.arrival_ns == 102 * 10**9


def test_a_missing_think_time_is_computed_from_request_times(tmp_path):
    second = ask(9.0, 300, [1, 2, 3, 4])
    del second["think_time"]
    assert load(tmp_path, session(ask(0.0, 200, [1, 2, 3]), second))[1].think_ns == 7 * 10**9


def test_an_answer_without_tokens_gets_one_token(tmp_path):
    assert load(tmp_path, session(ask(0.0, 200, [1, 2, 3], out=0)))[0].output_len == 1


def test_sessions_start_at_the_session_rate_from_the_seed(tmp_path):
    sessions = [session(ask(0.0, 200 + n, [1, 2, 3]), name=str(n)) for n in range(200)]
    drawn = [load(tmp_path, *sessions, seed=seed, rate=0.5) for seed in (3, 3, 4)]
    times = [[(r.arrival_ns, r.prompt_len) for r in each] for each in drawn]
    assert times[0] == times[1] != times[2]
    assert drawn[0][-1].arrival_ns == pytest.approx(400e9, rel=0.2)


def test_a_packed_file_gives_the_requests_of_its_raw_folder(tmp_path):
    agent = subagent(1.5, ask(0.0, 130, [7, 8]))
    raw = load(tmp_path, session(ask(0.0, 200, [1, 2, 3]), agent, ask(9.0, 300, [1, 2, 9, 4])))
    timed = {"out": 40, "api_time": 2.0}
    packed = session(
        packed_request(**timed),
        subagent(1.5, packed_request(**timed, new=[7, 2]) | {"in": 130}),
        packed_request(**timed, t=9.0, keep=2, new=[9, 1, 4, 1]) | {"in": 300},
    )
    path = write_lines(tmp_path / "packed.jsonl.gz", [packed])
    loaded = load_weka(Trace(path), TraceConfig(think_cap_s=100), seed=0)
    assert [(r.arrival_ns, r.parent_id, whole(r).tolist()) for r in loaded] == [
        (r.arrival_ns, r.parent_id, whole(r).tolist()) for r in raw
    ]


def test_of_sessions_with_equal_beginnings_the_longest_is_kept(tmp_path):
    longer = session(*THREE_TURNS["requests"], ask(15.0, 500, [1, 2, 3, 4, 5, 6, 7]))
    assert len(load(tmp_path, THREE_TURNS, longer, THREE_TURNS)) == 4


def packed_request(**changes: object) -> Entry:
    request: Entry = {"t": 0.0, "in": 200, "out": 5, "stop": "", "keep": 0, "new": [1, 3]}
    return request | changes


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (
            {"requests": [packed_request(keep=4)]},
            "request 0: keep is 4, but the previous request has only 0",
        ),
        ({"requests": [packed_request(new=[1])]}, "request 0: new must be a flat list of"),
        ({"requests": [packed_request(t=-1)]}, r"requests\[0\].t must be a number of at least 0"),
        ({"requests": 5}, "requests must be a list, got an integer"),
        ({"requests": [], "block_size": 0}, "block_size must be an integer of at least 1"),
        ({"requests": [], "hash_id_scope": "global"}, "hash_id_scope must be local"),
    ],
)
def test_an_invalid_session_is_refused(tmp_path, record, complaint):
    good = {"requests": [packed_request()]}
    path = write_lines(tmp_path / "sessions.jsonl", [good, record])
    with pytest.raises(TraceError, match=rf"sessions\.jsonl, line 2.*{complaint}"):
        load_weka(Trace(path), TraceConfig(), seed=0)


AGENTX = Path(__file__).parent / "fixtures" / "agentx.jsonl"


def load_agentx(tokens: TraceTokens = TraceTokens.literal) -> list[Request]:
    """Return the fixture's requests: 12 of its first session, then 2 of the other, long after."""
    config = TraceConfig(tokens=tokens, think_cap_s=600, session_rate=1e-6)
    requests = load_weka(Trace(AGENTX), config, seed=4)
    assert [len({r.session_id for r in each}) for each in (requests[:12], requests[12:])] == [4, 1]
    return requests


def test_nested_times_of_agentx_count_from_the_start_of_the_session():
    requests = load_agentx()[:12]
    begin_ns = requests[0].arrival_ns
    # 600 of the 747 s between 53 and 800 are kept
    assert [round((r.arrival_ns - begin_ns) / 1e9, 3) for r in requests] == [
        *(0, 9, 15.6, 15.8, 20, 25, 38, 41, 44.6, 50, 653, 753)
    ]
    assert [r.session_id for r in requests] == [0, 0, 2, 3, 2, 3, 2, 0, 8, 0, 0, 8]


def test_a_turn_joins_the_sub_agents_that_end_before_it():
    requests = load_agentx()
    assert [r.parent_id for r in requests] == [None, 0, 1, 1, 2, 3, 4, 1, 7, 7, 9, 8, None, 12]
    assert {r.id: r.joins for r in requests if r.joins} == {7: (6, 5)}
    think_s = [round(r.think_ns / 1e9, 3) for r in requests]
    # the second request is answered after 15 s, the last sub-agent's after 40 s
    assert (think_s[2], think_s[7], think_s[9]) == (0.6, 1, 6)


def test_an_unlimited_cache_hits_the_repeated_blocks_of_agentx():
    assert token_hit_rate(load_agentx()) == pytest.approx(4928 / 8782)


def test_a_later_turn_waits_for_a_sub_agent_until_its_duration_ends(tmp_path):
    asked = ask(0.0, 130, [7, 8]), ask(20.0, 200, [7, 8, 9])
    agent = subagent(30.0, *asked, duration_ms=25_000)
    requests = load(tmp_path, session(ask(1.0, 200, [1, 2, 3]), agent, ask(40.0, 300, [1, 2, 3])))
    start_ns = requests[0].arrival_ns - 10**9
    assert [(r.arrival_ns - start_ns) // 10**9 for r in requests] == [1, 5, 25, 40]
    assert requests[3].joins == (2,)
    assert requests[3].think_ns == 13 * 10**9


def test_sessions_of_other_block_sizes_are_read(tmp_path):
    first, second = load(
        tmp_path,
        session(ask(0.0, 40, [1, 2, 3]), ask(5.0, 60, [1, 2, 4, 5])) | {"block_size": 16},
        tokens=TraceTokens.literal,
    )
    assert shared_len(ids(first.prompt), ids(second.prompt)) == 32


def test_max_context_of_the_shipped_sessions_is_that_of_the_model():
    config = config_of("workload=weka_agentic", "model=qwen3_next_80b")
    assert config.workload.max_context == config.model.max_len == 262_144
