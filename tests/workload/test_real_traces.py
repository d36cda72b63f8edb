"""Public facts about the public traces, checked where HICACHE_DATA holds them."""

import os
from collections.abc import Sequence

import pytest

from hicache import experiment
from hicache.config import TraceConfig, TraceTokens
from hicache.request import Request
from hicache.results.metrics import summarize
from hicache.results.verdict import objections
from hicache.runs.schema import config_of
from hicache.workload.workload import load_workload
from tests.workload.infinite_cache import token_hit_rates

DATA_DIR = os.environ.get("HICACHE_DATA")
pytestmark = pytest.mark.skipif(
    DATA_DIR is None, reason="HICACHE_DATA names no directory with the real traces"
)


def load(kind: str, tokens: TraceTokens) -> Sequence[Request]:
    try:
        return load_workload(
            TraceConfig(kind=kind, tokens=tokens), data_dir=DATA_DIR, seed=0
        ).requests
    except FileNotFoundError as error:
        pytest.skip(str(error))


# Mooncake's paper (FAST'25) says that an infinite cache hits 0.40; block ids alone give 0.373. The
# last number is the hit rate of states that are kept at the ends of requests
@pytest.mark.parametrize(
    ("tokens", "hit_rate", "of_states"),
    [(TraceTokens.literal, 0.373, 0.087), (TraceTokens.reconstructed, 0.389, 0.334)],
)
def test_the_conversation_trace_has_its_published_size_and_hit_rates(tokens, hit_rate, of_states):
    requests = load("mooncake_conversation", tokens)
    assert len(requests) == 12_031
    assert sum(r.prompt_len for r in requests) == pytest.approx(144.8e6, rel=0.001)
    assert sum(r.parent_id is not None for r in requests) / 12_031 == pytest.approx(0.33, abs=0.005)
    assert token_hit_rates(requests) == pytest.approx((hit_rate, of_states), abs=0.003)


def test_nine_of_ten_turns_of_agentic_sessions_extend_the_prompt_before():
    requests = load("weka_agentic", TraceTokens.reconstructed)
    followed = [r for r in requests if r.parent_id is not None]
    extending = [
        r
        for r in followed
        if r.prompt.starts[0] == requests[r.parent_id or 0].prompt.starts[0]
        and r.prompt_len >= requests[r.parent_id or 0].prompt_len
    ]
    assert len(requests) == 29_100
    assert max(r.prompt_len for r in requests) == 880_502
    assert len(extending) / len(followed) > 0.9


def test_a_slice_of_the_agentic_sessions_holds_the_same_sessions_in_every_release():
    """Results in `docs/` name slices; if this fails, those of `weka_agentic` are stale."""
    config = config_of("workload=weka_agentic", "workload.slice=0/12")
    try:
        requests = load_workload(config.workload, data_dir=DATA_DIR, seed=0).requests
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert (len(requests), sum(r.prompt_len for r in requests)) == (1129, 90_294_869)


SMALL_POOLS = ("cache.device.tokens.full=200000", "cache.host.tokens.full=600000")
RECENT = {  # small pools, in which pages are evicted and loaded back
    "deepseek_v4_flash": (
        *SMALL_POOLS,
        "cache.page_size=256",
        "cache.device.tokens.swa=40000",
        "cache.host.tokens.swa=80000",
    ),
    "glm5_3": (*SMALL_POOLS, "parallel.tp=8"),
    "minimax_m3": (*SMALL_POOLS, "parallel.tp=8"),
    "llama4_scout": (
        *SMALL_POOLS,
        "parallel.tp=8",
        "cache.device.tokens.swa=80000",
        "cache.host.tokens.swa=160000",
    ),
    "kimi_k3": (*SMALL_POOLS, "parallel.tp=16", "cache.device.states=60", "cache.host.states=300"),
}


@pytest.mark.soak
@pytest.mark.parametrize("workload", ["mooncake_conversation", "weka_agentic"])
@pytest.mark.parametrize("model", RECENT)
def test_runs_of_recent_models_keep_all_invariants(model, workload):
    told = (f"model={model}", f"workload={workload}", *RECENT[model])
    result = experiment.run(config_of(*told, "workload.limit=1000", "engine.check_invariants=true"))
    assert result.measures["evict/device_full_pages"] > 0
    assert result.measures["transfer/back_up_bytes"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("model", ["llama3_8b", "qwen3_next_80b", "gemma3_27b"])
def test_the_shipped_agentic_sessions_neither_idle_nor_overload_the_machine(model):
    result = experiment.run(config_of("workload=weka_agentic", f"model={model}"))
    summary = summarize(result.records, result.measures)
    assert summary["cache/rejected_tokens"] <= 0.02 * summary["request/prompt_tokens"]
    assert not {"idle", "overloaded GPU", "overloaded queue", "overloaded storage"} & {
        found.name for found in objections([summary])
    }
