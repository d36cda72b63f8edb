"""Policies of the literature that `test_peers.py` does not compare with their originals."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from hicache.config import STOCK_POLICIES
from hicache.experiment import run
from hicache.policies.agents import Hints
from hicache.policies.queues import LeCaR
from hicache.policies.stock import STOCK
from hicache.policies.values import Belady, TinyLfu
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of
from hicache.workload.page_numbers import page_numbers
from tests.policies.test_events import run_of
from tests.scheduler.world import request_of


def test_the_config_lists_all_built_in_policies() -> None:
    assert ("lru", *STOCK) == STOCK_POLICIES


@pytest.mark.parametrize("name", STOCK)
def test_a_run_with_each_policy_keeps_the_invariants_and_hits(name: str) -> None:
    more = (f"cache.policy={name}", "parallel.tp=8", "storage=memory", "workload.limit=20")
    result = run_of("qwen3_next_80b", *more)
    assert summarize(result.records, result.measures)["cache/token_hit_rate"] > 0


class Item:
    """A page of a cache of one tier."""

    count = 1
    hits = 0

    def __init__(self, key: int, used: int = 0) -> None:
        self.key, self.used = key, used
        self.kind, self.bytes = "full", 1


def test_hints_keep_the_prompt_of_a_tool_call_until_its_time_to_live_ends() -> None:
    hints = Hints(None, ttl=500)
    calling, other = (SimpleNamespace(key=key, parent=None, state=None, end=64) for key in (1, 2))
    for entry, reason in ((calling, "tool_use"), (other, "stop")):
        request = SimpleNamespace(id=entry.key, stop_reason=reason)
        hints.on_miss((entry.key,), request)
        hints.on_insert(entry, "device")
        hints.on_finish(request, "finished")
    answer = SimpleNamespace(key=3, parent=calling, state=None, end=128)
    hints.on_insert(answer, "device")
    for calling.used, other.used, is_kept in ((0, 499, True), (0, 501, False)):
        answer.used = calling.used
        for kept in (calling, answer):
            ranks = [hints.rank(each, "device", "full") for each in (kept, other)]
            assert (ranks[0] > ranks[1]) == is_kept


def test_lecar_ranks_a_page_that_was_hit_above_one_that_was_used_later() -> None:
    pool = LeCaR(SimpleNamespace(seed=1), 4)
    often, late = Item(1), Item(2, used=9)
    for item in (often, late):
        pool.insert(item)
    pool.hit(often)
    assert pool.rank(often) > pool.rank(late)


TIGHT = (
    "workload=multi_turn",
    "workload.arrivals=open",
    "model=llama3_8b",
    "cache.device_gib=4",
    "cache.host_gib=0",
    "workload.limit=60",
)


def hits_of(*more: str) -> float:
    result = run(config_of(*TIGHT, *more))
    return summarize(result.records, result.measures)["cache/token_hit_rate"]


def test_the_oracle_hits_more_than_lru() -> None:
    assert hits_of() < hits_of("cache.policy=oracle")


def test_the_oracle_expects_no_use_by_a_request_that_has_started_or_was_aborted() -> None:
    requests = [request_of(number, range(40), [1], number) for number in range(3)]
    world = SimpleNamespace(config=config_of(), page_size=16, requests=requests, now_ns=lambda: 0)
    oracle = Belady(world)
    page = np.frombuffer(page_numbers(requests, 16)[0].to_bytes(), "<i4").tolist()[0]
    assert oracle.next_use(page) == 0
    oracle.on_hit(None, requests[0])
    assert oracle.next_use(page) == 1
    oracle.on_finish(requests[1], "aborted")
    assert oracle.next_use(page) == 2


def test_tinylfu_keeps_prompts_that_return_from_being_displaced_by_a_scan(tmp_path) -> None:
    # two prompts of four pages return twice before a scan of other prompts, and once after it; the
    # device holds one prompt at a time, and the host holds the two
    returning = [range(4), range(10, 14)]
    scan = [range(100 + 10 * number, 104 + 10 * number) for number in range(12)]
    prompts = [*returning * 3, *scan, *returning]
    lines = [
        {"timestamp": 1000 * at, "input_length": 257, "output_length": 1, "hash_ids": [*each, at]}
        for at, each in enumerate(prompts)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pools = ("cache.device.tokens.full=384", "cache.host.tokens.full=512")
    trace = ("workload=trace", f"workload.path={tmp_path}/trace.jsonl", "workload.block_tokens=64")
    more = (*pools, "compat.rules.backs_up_answers=false", "storage=none")
    late = {}
    for policy in ("lru", "tinylfu"):
        result = run(config_of(*trace, *more, f"cache.policy={policy}"))
        late[policy] = sum(each.prompt_len - each.computed_len for each in result.records[-2:])
    assert late == {"lru": 0, "tinylfu": 2 * 256}


def test_tinylfu_halves_all_counts_after_as_many_uses_as_its_period_says() -> None:
    world = SimpleNamespace(capacity={"host": {"full": 1}}, kinds=("full",))
    tinylfu = TinyLfu(world, period=4)
    held, other = Item(7), Item(8)
    tinylfu.on_insert(held, "host")
    full = SimpleNamespace(target_free_bytes=0)
    tinylfu.on_miss([7, 7, 7, 7], None)  # now two uses
    tinylfu.on_miss([8, 8], None)
    assert tinylfu.admit(other, "device", "host", full) is False
    tinylfu.on_miss([8], None)
    assert tinylfu.admit(other, "device", "host", full) is None


def test_tinylfu_keeps_one_use_of_two_when_it_halves() -> None:
    world = SimpleNamespace(capacity={"host": {"full": 1}}, kinds=("full",))
    tinylfu = TinyLfu(world, period=4)
    tinylfu.on_insert(Item(7), "host")
    tinylfu.on_miss([7, 7, 9, 9, 8], None)
    full = SimpleNamespace(target_free_bytes=0)
    assert tinylfu.admit(Item(8), "device", "host", full) is False


def test_the_weight_of_an_lecar_expert_falls_less_the_older_its_error_is() -> None:
    capacity, rate = 4, 0.45
    pool = LeCaR(SimpleNamespace(seed=1), capacity, rate=rate)
    pages = [Item(key, used=key) for key in range(3)]
    for page in pages:
        pool.insert(page)
    pool.victim(pages)
    evicted_by = pool._chooser
    pool.hit(pages[1])  # time 1
    pool.evict(pages[0])
    pool.hit(pages[1])  # time 2
    pool.hit(pages[2])  # time 3
    pool.miss([0])  # time 4: evicted three requests ago
    grown = 0.5 * math.exp(rate * 0.005 ** (3 / capacity))
    other = {"lru": "lfu", "lfu": "lru"}[evicted_by]
    for _ in range(2):  # the second miss is no new error
        assert pool.weights[other] == pytest.approx(grown / (grown + 0.5))
        assert sum(pool.weights.values()) == pytest.approx(1)
        pool.miss([0])
