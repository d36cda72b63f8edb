"""A server whose host keeps no draft KV: what SGLang issue 32176 measured.

GLM-5.2 on eight H20, `write_through_selective`, hicache-ratio 3, five drafts. 24 requests of
agents, then 12 prompts of 111,000 to 175,000 tokens, then the 24 again: 18 of them load from the
host, and a step gains 1.589 instead of 4.487 tokens. The lengths of the 24 and the size of the pool
are not given. Here six agents ask four times each, all lengths are divided by 16, and the rates are
inputs.
"""

from bisect import bisect_left

import pytest

from hicache.request import Request
from hicache.results.metrics import Result
from hicache.scheduler.drafts import expected_tokens
from tests.speculation.test_keys import request, served

AGENTS, TURNS, FILLERS = 6, 4, 12


def rate_of(tokens: float) -> float:
    """The acceptance with which a step of five drafts is expected to gain so many tokens."""
    rates = [step / 10_000 for step in range(10_001)]
    return rates[bisect_left(rates, tokens, key=lambda rate: expected_tokens(rate, 5))]


def asked(first: int) -> list[Request]:
    # each turn repeats the last one and adds 500 tokens
    return [
        request(first + turn * AGENTS + agent, (10**5 * agent, 2000 + 500 * turn), answer=120)
        for turn in range(TURNS)
        for agent in range(AGENTS)
    ]


@pytest.fixture(scope="module")
def again() -> Result:
    num = AGENTS * TURNS
    fillers = [request(num + i, (10**7 + 10**5 * i, 7000 + 300 * i)) for i in range(FILLERS)]
    result = served(
        *asked(0),
        *fillers,
        *asked(num + FILLERS),
        size=64,
        key="bigram",
        more=(
            *("compat=sglang_0_5_23", "cache.unlimited=false", "cache.device_gib=null"),
            *("cache.device.tokens.full=40960", "cache.host.sglang_ratio=3"),
            *("cache.write_policy=write_through_selective", "speculation.draft_kv=none"),
            *("speculation.drafts=5", f"speculation.acceptance={rate_of(4.487)}"),
            f"speculation.cold_acceptance={rate_of(1.589)}",
        ),
    )
    result.records[:] = result.records[-num:]
    return result


def test_eighteen_of_the_repeated_requests_load_from_the_host(again: Result) -> None:
    assert sum(record.host_hit_len > 0 for record in again.records) == 18


def test_the_last_turns_hit_on_the_device_pages_loaded_without_draft_kv(again: Result) -> None:
    last = again.records[-AGENTS:]
    assert [record.host_hit_len for record in last] == [0] * AGENTS
    assert all(0 < record.draft_cold_len == record.device_hit_len for record in last)


def test_steps_after_such_hits_gain_hardly_more_tokens_than_without_draft_kv(again: Result) -> None:
    gained = sum(record.output_len - 1 for record in again.records)
    steps = sum(record.num_steps - 1 for record in again.records)
    assert 1.589 < gained / steps < 2.2
