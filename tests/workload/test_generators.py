from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hicache.config import WorkloadConfig
from hicache.request import Request
from hicache.workload.generators import (
    AGENT_CONTEXT_TOKENS,
    AGENT_SHARED_TOKENS,
    CHAT_CONTINUES,
    Quantiles,
    agents,
    builtin,
    chat,
)
from tests.workload.infinite_cache import token_hit_rate
from tests.workload.traces import ids, shared_len, whole

Generator = Callable[..., list[Request]]
GENERATORS = [chat, agents, builtin]


def config(num_sessions: int, **changes: float) -> WorkloadConfig:
    return WorkloadConfig(kind="generated", num_sessions=num_sessions, **changes)  # type: ignore[arg-type]


def fingerprint(requests: Sequence[Request]) -> list[object]:
    return [
        (r.arrival_ns, r.parent_id, r.think_ns, r.namespace, r.prompt.to_bytes(), r.output_len)
        for r in requests
    ]


@pytest.fixture(scope="module")
def chats() -> list[Request]:
    return chat(config(3000), seed=1)


@pytest.fixture(scope="module")
def agent_turns() -> list[Request]:
    return agents(config(200), seed=1)


@pytest.mark.parametrize("generate", GENERATORS)
def test_equal_seeds_give_equal_requests(generate: Generator) -> None:
    assert fingerprint(generate(config(10), seed=5)) == fingerprint(generate(config(10), seed=5))


@pytest.mark.parametrize("generate", GENERATORS)
def test_other_seeds_give_other_requests(generate: Generator) -> None:
    assert fingerprint(generate(config(10), seed=5)) != fingerprint(generate(config(10), seed=6))


@pytest.mark.parametrize("generate", GENERATORS)
def test_the_rate_changes_when_sessions_begin_and_not_what_they_ask(generate: Generator) -> None:
    slow, fast = (generate(config(10, session_rate=rate), seed=5) for rate in (0.1, 10))
    assert Counter(whole(r).tobytes() for r in slow) == Counter(whole(r).tobytes() for r in fast)


@pytest.mark.parametrize("generate", GENERATORS)
def test_requests_are_numbered_by_arrival_and_follow_their_parents(generate: Generator) -> None:
    requests = generate(config(30), seed=2)
    assert [r.id for r in requests] == list(range(len(requests)))
    arrivals = [r.arrival_ns for r in requests]
    assert arrivals == sorted(arrivals)
    assert all(r.parent_id is None or r.parent_id < r.id for r in requests)


def test_sessions_begin_at_the_rate_asked_for(chats: list[Request]) -> None:
    starts = [r.arrival_ns for r in chats if r.parent_id is None]
    assert len(starts) == 3000
    assert starts[-1] == pytest.approx(3000e9, rel=0.1)  # five standard errors


def test_a_chat_turn_repeats_the_one_before_and_its_answer(chats: list[Request]) -> None:
    child = next(r for r in chats if r.parent_id is not None)
    assert child.parent_id is not None
    parent = chats[child.parent_id]
    assert shared_len(whole(parent), ids(child.prompt)) == parent.prompt_len + parent.output_len


def test_chat_lengths_are_those_of_the_trace(chats: list[Request]) -> None:
    first = [r.prompt_len for r in chats if r.parent_id is None]
    assert np.percentile(first, [50, 90]) == pytest.approx([5933, 26280], rel=0.1)
    assert np.mean([r.output_len for r in chats]) == pytest.approx(343, rel=0.1)


def test_chat_gaps_are_those_of_the_trace(chats: list[Request]) -> None:
    gaps = [
        (r.arrival_ns - chats[r.parent_id].arrival_ns) / 1e9
        for r in chats
        if r.parent_id is not None
    ]
    assert np.percentile(gaps, [50, 95]) == pytest.approx([126, 612], rel=0.15)


def test_chat_sessions_end_as_often_as_in_the_trace(chats: list[Request]) -> None:
    turns: dict[int, int] = {}
    for request in chats:
        turns[request.id] = 1 if request.parent_id is None else turns[request.parent_id] + 1
    reached = Counter(turns.values())
    continued = [reached[turn + 1] / reached[turn] for turn in (1, 2)]
    assert continued == pytest.approx(CHAT_CONTINUES[:2], abs=0.05)


def test_a_third_of_chat_requests_extends_an_earlier_one(chats: list[Request]) -> None:
    extending = sum(r.parent_id is not None for r in chats)
    assert extending / len(chats) == pytest.approx(0.33, abs=0.03)


def test_chat_hits_about_as_much_as_the_trace(chats: list[Request]) -> None:
    assert token_hit_rate(chats) == pytest.approx(0.389, abs=0.04)


def test_agents_share_their_first_tokens(agent_turns: list[Request]) -> None:
    heads = {ids(r.prompt)[:AGENT_SHARED_TOKENS].tobytes() for r in agent_turns}
    assert len(heads) == 1


def test_agents_keep_within_their_context(agent_turns: list[Request]) -> None:
    assert max(r.prompt_len for r in agent_turns) <= AGENT_CONTEXT_TOKENS


def test_agents_have_about_fourteen_turns(agent_turns: list[Request]) -> None:
    turns = Counter(r.session_id for r in agent_turns)
    assert np.median(list(turns.values())) == pytest.approx(14, abs=4)


def test_agents_come_back_soon_after_a_tool_call_and_late_after_an_answer(
    agent_turns: list[Request],
) -> None:
    thought: dict[str, list[float]] = {"tool_use": [], "end_turn": []}
    for request in agent_turns:
        if request.parent_id is not None:
            thought[agent_turns[request.parent_id].stop_reason].append(request.think_ns / 1e9)
    assert np.median(thought["tool_use"]) == pytest.approx(9, rel=0.1)
    assert np.median(thought["end_turn"]) == pytest.approx(184, rel=0.4)
    assert max(thought["end_turn"]) == 600


def test_every_agent_session_ends_in_an_answer(agent_turns: list[Request]) -> None:
    last = {r.session_id: r.stop_reason for r in agent_turns}
    assert set(last.values()) == {"end_turn"}


def test_some_agent_turns_drop_their_context(agent_turns: list[Request]) -> None:
    shrunk = [
        r
        for r in agent_turns
        if r.parent_id is not None and r.prompt_len < agent_turns[r.parent_id].prompt_len
    ]
    assert 0.005 < len(shrunk) / len(agent_turns) < 0.05
    parent = agent_turns[shrunk[0].parent_id or 0]
    assert shared_len(ids(shrunk[0].prompt), ids(parent.prompt)) == AGENT_SHARED_TOKENS


def test_agents_hit_about_as_much_as_the_trace() -> None:
    assert token_hit_rate(agents(config(40), seed=1)) == pytest.approx(0.96, abs=0.03)


def test_the_mix_has_one_agent_for_four_conversations() -> None:
    requests = builtin(config(50), seed=0)
    of_agents = {r.session_id for r in requests if r.stop_reason == "tool_use"}
    assert len({r.session_id for r in requests}) == 50
    assert 7 <= len(of_agents) <= 10  # an agent may answer at once


def test_quantiles_are_met() -> None:
    rng = np.random.default_rng(0)
    drawn = [Quantiles((0, 0.5, 1), (1, 10, 1000)).draw(rng) for _ in range(4000)]
    assert np.percentile(drawn, [25, 50, 75]) == pytest.approx([10**0.5, 10, 100], rel=0.1)
    assert 1 <= min(drawn) <= max(drawn) <= 1000
