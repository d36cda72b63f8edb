"""Cache hits lower the latency, which a simulator misses if its times ignore the cache.

(BLIS issue 1699: offloading was switched on, hits rose, and no latency moved.)
"""

from functools import cache

import numpy as np
import pytest

from hicache.clock import SECOND_NS
from hicache.models.cost import CostModel
from hicache.results.metrics import RequestRecord
from hicache.runs.schema import config_of
from hicache.workload.workload import Workload
from tests.scheduler.world import request_of
from tests.validity import runs

PREFIX, TAIL = 6400, 640
GIB_OF_TOKENS = 131072 / 2**30  # llama3_8b: 128 KiB a token


def first_and_again(num_between: int) -> Workload:
    """One long prompt, `num_between` unrelated ones of the same length, then its prefix again."""
    requests = []
    for number in range(num_between + 2):
        again = number == num_between + 1
        start = 0 if again else number * 2 * PREFIX
        prompt = [*range(start, start + PREFIX)]
        if again:
            prompt += range(10**7, 10**7 + TAIL)
        answer = [2 * 10**7 + number]
        requests.append(request_of(number, prompt, answer, number * 30 * SECOND_NS))
    return runs.workload(requests)


@cache
def last_record(num_between: int, device_tokens: int, host_tokens: int) -> RequestRecord:
    result = runs.run(
        first_and_again(num_between),
        "model=llama3_8b",
        "parallel.tp=1",
        f"cache.device_gib={device_tokens * GIB_OF_TOKENS}",
        f"cache.host_gib={host_tokens * GIB_OF_TOKENS}",
        # above 4.7 GB/s a token comes sooner from storage than it is computed
        "storage.read_gbps=16",
        "prefetch.stop=wait_complete",
        "prefetch.occupied_share=1",
    )
    return result.records[-1]


# (strangers between, device tokens, host tokens): what the strangers push out is one tier further
PLACES = {
    "device": (0, 40_000, 60_000),
    "host": (6, 20_000, 90_000),
    "storage": (9, 20_000, 30_000),
}


@pytest.mark.parametrize("tier", PLACES)
def test_a_hit_on_any_tier_makes_the_first_token_come_sooner(tier: str) -> None:
    hit = last_record(*PLACES[tier])
    miss = runs.run(
        runs.workload(first_and_again(0).requests[1:]), "model=llama3_8b", "parallel.tp=1"
    ).records[0]

    assert getattr(hit, f"{tier}_hit_len") == PREFIX
    assert miss.computed_len == PREFIX + TAIL
    assert hit.ttft_ns is not None
    assert miss.ttft_ns is not None
    assert hit.ttft_ns < miss.ttft_ns


def test_the_nearer_the_tier_the_sooner_the_first_token() -> None:
    times = [last_record(*PLACES[tier]).ttft_ns for tier in ("device", "host", "storage")]

    assert times == sorted(times)
    assert len(set(times)) == 3


@pytest.mark.parametrize("tier", PLACES)
def test_prefill_takes_the_time_to_compute_the_tokens_that_were_not_hit(tier: str) -> None:
    record = last_record(*PLACES[tier])

    config = config_of("model=llama3_8b")
    cost = CostModel(config.model, config.hardware, tp=1)
    hit_len = record.prompt_len - record.computed_len
    alone = cost.forward_ns([(hit_len, record.prompt_len)], np.empty(0, np.int64))
    slowdown = config.hardware.copy_slowdown.value
    assert alone.compute_ns <= record.prefill_ns <= alone.compute_ns * slowdown + 1
