"""Speculative decoding: steps that gain several tokens, and the KV of the draft model."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.tree.keys import keys
from hicache.config import SpeculationConfig
from hicache.engine.deployment import deploy
from hicache.executor.simulated.drafting import Drafting
from hicache.executor.simulated.sidecars import DRAFT, WithSidecars
from hicache.executor.simulated.stores import EndlessStore
from hicache.experiment import run
from hicache.results.metrics import Result, summarize
from hicache.results.speculation import expectation, outcome
from hicache.runs.schema import config_of
from hicache.scheduler.drafts import Drafts, expected_tokens
from hicache.scheduler.request_state import RequestState
from tests.speculation.test_keys import hits, request, served

CHAT = (
    *("workload=chat", "model=llama3_8b", "storage=none", "tracker.wandb_mode=disabled"),
    *("workload.num_sessions=6", "workload.token_stride=16", "workload.time_scale=0.02"),
    *("cache.device_gib=0.25", "cache.host_gib=1"),
)


def chat(*more: str) -> Result:
    return run(config_of(*CHAT, *more))


def told(result: Result) -> dict[str, float]:
    return summarize(result.records, result.measures)


@pytest.mark.parametrize("compat", ["hicache", "sglang_0_5_23", "vllm_0_33"])
def test_several_decode_steps_at_once_give_the_results_of_single_ones(compat: str) -> None:
    settings = (f"compat={compat}", "speculation.drafts=3", "cache.answer_pages=1")
    jumped, stepped = (chat(*settings, f"engine.jump={jump}") for jump in (True, False))
    assert jumped.records == stepped.records


@pytest.mark.parametrize(("rate", "gained"), [(0.0, 1.0), (1.0, 4.0)])
def test_a_step_gains_one_token_plus_its_accepted_drafts(rate: float, gained: float) -> None:
    (record,) = served(
        request(0, (0, 100), answer=1 + 4 * 25),
        size=16,
        key="token",
        more=(f"speculation.acceptance={rate}",),
    ).records
    assert record.num_steps == 1 + 100 / gained  # the prompt gives the first token


@pytest.mark.parametrize("accepted", ["random", "mean"])
def test_steps_gain_about_the_expected_number_of_tokens(accepted: str) -> None:
    more = ("speculation.acceptance=0.7", f"speculation.accepted={accepted}")
    result = served(request(0, (0, 100), answer=20_000), size=16, key="token", more=more)
    gained = told(result)["speculation/tokens_per_step"]
    assert gained == pytest.approx(expected_tokens(0.7, 3), rel=0.02)


def drawn(config: SpeculationConfig, req: RequestState, length: int) -> float:
    """The mean number of tokens gained per step by a request with a KV of `length` tokens."""
    drafts, counts = Drafts(config, 0), []
    for number in range(2000):
        req.kv_len, req.gains, req.num_verified = length, [], number
        drafts.draw([req], 1)
        counts.append(req.gains[0])
    return sum(counts) / len(counts)


def test_drafts_are_accepted_more_as_the_share_of_cold_tokens_falls() -> None:
    config = SpeculationConfig(drafts=3, acceptance=0.8, cold_acceptance=0.2)
    req = RequestState(request(0, (0, 1000), answer=10**6), b"", 1, 0)
    req.cold_len = 1000
    means = [drawn(config, req, length) for length in (1000, 2000, 10**5)]
    expected = [expected_tokens(rate, 3) for rate in (0.2, 0.5, 0.794)]
    assert means == pytest.approx(expected, rel=0.05)


def cold_run(draft_kv: str) -> Result:
    # the second turn comes after other prompts have taken its pages on the device
    others = [request(number, (10**5 * number, 1600)) for number in (1, 2, 3)]
    first, again = request(0, (0, 1600), answer=5), request(4, (0, 1600), (10**6, 40), answer=200)
    more = (
        *("cache.unlimited=false", "cache.device_gib=null", "cache.device.tokens.full=4096"),
        *("cache.host.tokens.full=65536", f"speculation.draft_kv={draft_kv}"),
    )
    return served(first, *others, again, size=16, key="bigram", more=more)


def test_without_draft_kv_on_the_host_the_hits_are_equal_but_lack_draft_kv() -> None:
    packed, none = cold_run("packed"), cold_run("none")
    assert hits(none) == hits(packed)
    assert hits(none)[-1] == none.records[-1].host_hit_len == 1600
    assert [record.draft_cold_len for record in packed.records] == [0] * 5
    assert none.records[-1].draft_cold_len == 1600
    assert told(none)["speculation/draft_cold_tokens"] == 1600
    assert none.records[-1].num_steps > 1.2 * packed.records[-1].num_steps


def test_pages_that_were_loaded_without_draft_kv_have_it_again_once_they_are_computed() -> None:
    # the others take all pages on the device
    others = [request(number, (10**5 * number, 1600)) for number in range(8)]
    first, loaded = request(0, (0, 1600), answer=5), request(4, (0, 1600), (10**6, 40))
    computed, again = request(8, (0, 800), answer=5), request(9, (0, 800), (2 * 10**6, 40))
    more = (
        *("cache.unlimited=false", "cache.device_gib=null", "cache.device.tokens.full=4096"),
        *("cache.host.tokens.full=65536", "speculation.draft_kv=none"),
        "compat.rules.load_back_threshold=1000",  # so that shorter hits on the host are computed
    )
    requests = (first, *others[1:4], loaded, *others[5:], computed, again)
    records = served(*requests, size=16, key="bigram", more=more).records
    told = [(each.device_hit_len, each.host_hit_len, each.draft_cold_len) for each in records]
    assert told[4] == (0, 1600, 1600)
    assert told[8:] == [(0, 0, 0), (784, 0, 0)]


def test_draft_kv_takes_the_bytes_of_its_layers_on_each_tier_that_holds_it() -> None:
    def page_bytes(*more: str) -> tuple[float, ...]:
        kinds = deploy(config_of(*CHAT, "cache.device_gib=8", *more))
        return kinds.kinds.page_bytes[0], kinds.host_kinds.page_bytes[0]

    plain, _ = page_bytes()
    drafts = ("speculation.drafts=3", "speculation.layers=2")
    assert page_bytes(*drafts) == (plain * 34 / 32, plain * 34 / 32)
    assert page_bytes(*drafts, "speculation.draft_kv=none") == (plain * 34 / 32, plain)


def test_a_page_whose_draft_kv_is_not_in_storage_counts_as_missing() -> None:
    inner = EndlessStore()
    store, pages = WithSidecars(inner), list(range(8))
    store.write(pages)
    inner.delete(keys([5], DRAFT))
    assert store.contains(pages) == [True] * 5 + [False] + [True] * 2
    assert store.read(pages) == 5
    window = keys([3, 4], 1)  # has no sidecars
    store.write(window)
    assert store.contains(window) == [True, True]
    assert store.read(window) == 2


def test_drafts_cost_time_even_if_none_is_accepted() -> None:
    def seconds(*more: str) -> float:
        (record,) = served(request(0, (0, 100), answer=50), size=16, key="token", more=more).records
        assert record.finish_ns is not None
        return record.finish_ns - record.arrival_ns

    off = seconds("speculation.drafts=0")
    one, five = (
        seconds("speculation.acceptance=0", f"speculation.drafts={count}") for count in (1, 5)
    )
    assert off < one < five
    assert seconds("speculation.acceptance=1") < off


def test_a_step_verifies_one_token_more_than_the_draft_proposes() -> None:
    def forward_ns(_: Any, lens: Any, *, slowdown: float, num_queries: int = 1) -> Any:
        return SimpleNamespace(total_ns=int(slowdown) * sum(lens) * num_queries)

    model: Any = SimpleNamespace(forward_ns=forward_ns)
    batch: Any = SimpleNamespace(decodes=[SimpleNamespace(gains=[3, 1])], num_steps=2)
    ends = Drafting(model, model, num_drafts=2).verify_ends_ns(batch, [10], 100, 1.0)
    assert list(ends) == [[100 + 3 * 10 + 2 * 10], [150 + 3 * 13 + 2 * 13]]


def test_a_run_reports_the_expected_gain_and_the_tokens_dropped_for_drafts() -> None:
    result = chat("compat=vllm_0_33", "speculation.drafts=3", "engine.explain=true")
    summary = told(result)
    assert any("expected to gain 2.53 tokens, 1.42" in note for note in result.notes)
    dropped = summary["speculation/dropped_tokens"]
    assert 0 < dropped == sum(record.dropped_len for record in result.records)
    assert summary["computed/dropped_for_draft_tokens"] == dropped
    assert f"{dropped:,} cached tokens dropped" in str(outcome(summary))


def test_a_run_without_speculation_reports_nothing_about_it() -> None:
    result = chat("speculation.acceptance=0.9")
    assert not [key for key in told(result) if key.startswith("speculation/")]
    assert outcome(told(result)) is None
    assert not [note for note in result.notes if "speculation" in note]


def test_the_expected_gain_is_given_with_and_without_draft_kv() -> None:
    speculation: Any = SimpleNamespace(
        drafts=2, layers=1, draft_kv="none", acceptance=0.5, cold_acceptance=0.0
    )
    config: Any = SimpleNamespace(speculation=speculation, draft_key="bigram")
    assert "gain 1.75 tokens, 1.00 where the draft has no KV" in expectation(config)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("speculation.key=bigram", "model=qwen3_next_80b"), "a model without states"),
        (("speculation.layers=33",), "at most the 32 layers of llama3_8b"),
        (("speculation.key=drop_block", "compat=sglang_0_5_23"), "one of bigram, token"),
        (("speculation.draft_kv=none", "executor=torch", "model=tiny_hybrid"), "simulated"),
    ],
)
def test_unsupported_speculation_is_refused(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        config_of("model=llama3_8b", "speculation.drafts=3", *overrides)
    assert "\n" not in str(error.value)
    assert config_of("model=llama3_8b", *overrides, "speculation.drafts=0")
