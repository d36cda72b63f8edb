"""Generated workloads: equal for equal seeds, and with the statistics of the traces."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from hicache.config import AgentsConfig, GeneratedConfig, WorkloadConfig
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


def config(num_sessions: int, **changes: float) -> WorkloadConfig:
    return GeneratedConfig(kind="generated", num_sessions=num_sessions, **changes)


def fingerprint(requests: Sequence[Request]) -> list[object]:
    return [
        (r.arrival_ns, r.parent_id, r.think_ns, r.namespace, r.prompt.to_bytes(), r.output_len)
        for r in requests
    ]


@pytest.mark.parametrize("generate", [chat, agents, builtin])
def test_the_seed_decides_the_requests_and_the_rate_their_times(generate):
    requests, again, other = (generate(config(10), seed=seed) for seed in (5, 5, 6))
    assert fingerprint(requests) == fingerprint(again) != fingerprint(other)
    slow, fast = (generate(config(10, session_rate=rate), seed=5) for rate in (0.1, 10))
    assert Counter(whole(r).tobytes() for r in slow) == Counter(whole(r).tobytes() for r in fast)
    assert [r.id for r in requests] == list(range(len(requests)))
    arrivals = [r.arrival_ns for r in requests]
    assert arrivals == sorted(arrivals)
    assert all(r.parent_id is None or r.parent_id < r.id for r in requests)


@pytest.mark.parametrize("generate", [chat, agents, builtin])
def test_a_limit_keeps_the_first_generated_requests(generate):
    first = generate(config(10, limit=9), seed=5)
    assert fingerprint(first) == fingerprint(generate(config(10), seed=5)[:9])


def test_generated_chats_have_the_statistics_of_the_conversation_trace():
    chats = chat(config(3000), seed=1)
    roots = [r for r in chats if r.parent_id is None]
    turns = [(chats[r.parent_id], r) for r in chats if r.parent_id is not None]
    assert len(roots) == 3000
    assert roots[-1].arrival_ns == pytest.approx(3000e9, rel=0.1)  # five standard errors
    parent, child = turns[0]
    assert shared_len(whole(parent), ids(child.prompt)) == parent.prompt_len + parent.output_len
    first = np.percentile([r.prompt_len for r in roots], [50, 90])
    assert first == pytest.approx([5933, 26280], rel=0.1)
    assert np.mean([r.output_len for r in chats]) == pytest.approx(343, rel=0.1)
    gaps_s = [(child.arrival_ns - parent.arrival_ns) / 1e9 for parent, child in turns]
    assert np.percentile(gaps_s, [50, 95]) == pytest.approx([126, 612], rel=0.15)
    assert len(turns) / len(chats) == pytest.approx(0.33, abs=0.03)
    depth: dict[int, int] = {}
    for request in chats:
        depth[request.id] = 1 if request.parent_id is None else depth[request.parent_id] + 1
    reached = Counter(depth.values())
    continued = [reached[turn + 1] / reached[turn] for turn in (1, 2)]
    assert continued == pytest.approx(CHAT_CONTINUES[:2], abs=0.05)
    assert token_hit_rate(chats) == pytest.approx(0.389, abs=0.04)


def test_generated_agents_have_the_statistics_of_the_agentic_trace():
    requests = agents(config(150), seed=1)
    turns = [(requests[r.parent_id], r) for r in requests if r.parent_id is not None]
    assert len({ids(r.prompt)[:AGENT_SHARED_TOKENS].tobytes() for r in requests[::9]}) == 1
    assert max(r.prompt_len for r in requests) <= AGENT_CONTEXT_TOKENS
    counts = Counter(r.session_id for r in requests)
    assert np.median(list(counts.values())) == pytest.approx(14, abs=4)
    think_s: dict[str, list[float]] = {"tool_use": [], "end_turn": []}
    for parent, request in turns:
        think_s[parent.stop_reason].append(request.think_ns / 1e9)
    assert np.median(think_s["tool_use"]) == pytest.approx(9, rel=0.1)
    assert np.median(think_s["end_turn"]) == pytest.approx(184, rel=0.4)
    assert max(think_s["end_turn"]) == 600
    last = {r.session_id: r.stop_reason for r in requests}
    assert set(last.values()) == {"end_turn"}
    # some turns drop their context
    shrunk = [(parent, r) for parent, r in turns if r.prompt_len < parent.prompt_len]
    assert 0.005 < len(shrunk) / len(requests) < 0.05
    parent, request = shrunk[0]
    assert shared_len(ids(request.prompt), ids(parent.prompt)) == AGENT_SHARED_TOKENS
    assert token_hit_rate(agents(config(15), seed=1)) == pytest.approx(0.96, abs=0.03)


def test_a_tool_takes_about_its_duration():
    compiles = AgentsConfig(kind="agents", num_sessions=60, tools={"compile": 40.0})
    requests = agents(compiles, seed=1)
    turns = [(requests[r.parent_id], r) for r in requests if r.parent_id is not None]
    waits_s = [r.think_ns / 1e9 for parent, r in turns if parent.tool]
    assert np.median(waits_s) == pytest.approx(40, rel=0.1)


def test_the_builtin_mix_has_one_agent_for_four_conversations():
    requests = builtin(config(50), seed=0)
    of_agents = {r.session_id for r in requests if r.stop_reason == "tool_use"}
    assert len({r.session_id for r in requests}) == 50
    assert 7 <= len(of_agents) <= 10  # an agent may answer at once


def test_drawn_values_have_the_given_quantiles():
    rng = np.random.default_rng(0)
    drawn = [Quantiles((0, 0.5, 1), (1, 10, 1000)).draw(rng) for _ in range(4000)]
    assert np.percentile(drawn, [25, 50, 75]) == pytest.approx([10**0.5, 10, 100], rel=0.1)
    assert 1 <= min(drawn) <= max(drawn) <= 1000
