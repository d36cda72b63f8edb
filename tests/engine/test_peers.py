"""Engines that read from each other's hosts: hits, times, pages that leave, and lost engines."""

import pytest

from hicache import experiment
from hicache.clock import to_ns
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of
from hicache.workload.workload import Workload
from tests.scheduler.world import request_of

PAGE_BYTES = 8 << 20  # of 64 tokens of Llama-3.1-8B
BASE = (
    *("model=llama3_8b", "workload=chat", "storage=peers", "prefetch.stop=wait_complete"),
    *("parallel.replicas=2", "parallel.router=round_robin", "parallel.tp=1"),
    *("workload.arrivals=open", "workload.start_jitter_s=0", "cache.host_gib=16"),
    *("engine.check_invariants=true", "engine.explain=true"),
    *("parallel.link_gbps=20", "parallel.link_s=0.001"),
    *("storage.query_s=0.0005", "storage.operation_s=0.0001"),
)
SECOND = 10**9
READ_NS = to_ns(0.0005 + 0.0001 + 0.001)  # of a query and one batch, without its bytes
# separate engines: two for prompts, of which the second may ask the first
ROLES = (
    *("parallel.replicas=1", "parallel.prefill=2", "parallel.decode=1"),
    *("parallel.decode_cache=device", "storage.batch_pages=1"),
)


def run(prompts, *words):
    """The records and the summary of requests: (which prompt, when in ns, its 1,024 tokens)."""
    requests = [
        request_of(number, [*range(name * 2000, name * 2000 + (*more, 1024)[0])], [1, 2], time_ns)
        for number, (name, time_ns, *more) in enumerate(prompts)
    ]
    config = config_of(*BASE, *words)
    result = experiment.run(config, workload=Workload(name="own", requests=requests))
    return result.records, summarize(result.records, result.measures)


def test_second_prompt_is_read_from_the_host_of_the_engine_that_computed_the_first():
    records, summary = run([(0, 0), (0, SECOND), (0, 2 * SECOND), (0, 3 * SECOND)])
    assert [each.peer_hit_len for each in records] == [0, 960, 0, 0]
    assert [each.device_hit_len for each in records] == [0, 0, 960, 960]
    first, second = records[:2]
    wait_ns = READ_NS + -(-15 * PAGE_BYTES // 20)  # 20 bytes a ns
    assert second.storage_wait_ns == wait_ns
    assert (second.queue_ns, second.computed_len) == (0, 64)
    # the rest is a step of 64 tokens, for which 960 are loaded from the host
    (_, stored), _ = run([(0, 0), (0, SECOND)], "storage=memory", "parallel.router=sticky")
    assert stored.storage_hit_len == 960
    assert second.ttft_ns - wait_ns == stored.ttft_ns - stored.storage_wait_ns
    assert first.storage_wait_ns == to_ns(0.0005)
    tiers = [summary[f"cache/{tier}_hit_tokens"] for tier in ("device", "host", "storage", "peer")]
    assert tiers == [1920, 0, 0, 960]
    assert summary["transfer/peer_bytes"] == 15 * PAGE_BYTES
    assert summary["transfer/storage_read_bytes"] == summary["storage/queued_write_pages"] == 0
    rate = 15 * PAGE_BYTES / 3 / 20e9  # requests arrive in 3 s
    assert summary["load/rho_link"] == pytest.approx(rate / 2)


def test_two_reads_from_one_host_share_its_link():
    words = ("parallel.replicas=3", "storage.batch_pages=100")
    prompts = [(0, 0), (1, 1), (1, 2), (0, SECOND), (0, SECOND), (0, SECOND)]
    records, _ = run(prompts, *words)
    assert [each.peer_hit_len for each in records[4:]] == [960, 960]
    waited = [each.storage_wait_ns - READ_NS for each in records[4:]]
    assert waited == pytest.approx([2 * 15 * PAGE_BYTES / 20] * 2, abs=2)


def test_windows_and_states_are_read_with_the_pages():
    prompts = [(0, 0), (0, SECOND, 1200), (0, 2 * SECOND, 1201)]
    records, summary = run(prompts, "model=hymba_1b5")
    assert [each.peer_hit_len for each in records] == [0, 1024, 0]
    assert summary["prefetch/used_pages"] == summary["prefetch/read_pages"] == 16
    _, stored = run(prompts, "model=hymba_1b5", "storage=memory")
    assert summary["transfer/peer_bytes"] == stored["transfer/storage_read_bytes"]


def test_pages_leave_before_a_read_but_not_during_it():
    # the host of an engine has room for three prompts, its device for one. Engine 1 reads the
    # oldest for 6 s; meanwhile the fourth takes the room of the next, whose read has not begun
    small = ("cache.device.tokens.full=1600", "cache.host.tokens.full=3072")
    slow = ("parallel.link_gbps=0.02", "prefetch.occupied_share=1")
    start = 10 * SECOND
    prompts = [(0, 0), (9, 1), (1, SECOND), (0, start), (8, start + 1), (1, start + 2)]
    records, summary = run([*prompts, (7, start + SECOND)], *small, *slow)
    assert [each.engine for each in records] == [0, 1, 0, 1, 0, 1, 0]
    read, left = records[3], records[5]
    assert (read.peer_hit_len, left.peer_hit_len) == (960, 0)
    assert left.computed_for["prefetch_lost"] == 960
    assert summary["prefetch/discarded_short_pages"] == 15


def test_a_lost_engine_is_not_read():
    prompts = [(0, 0), (0, 10 * SECOND), (1, 20 * SECOND), (0, 40 * SECOND)]
    lost = ("parallel.faults.gone_engine=0", "parallel.faults.gone_from_s=5")
    for gone_for_s in (0.1, 1e4):  # it is also empty when it is back
        words = (*ROLES, *lost, f"parallel.faults.gone_for_s={gone_for_s}")
        assert [each.peer_hit_len for each in run(prompts, *words)[0]] == [0, 0, 0, 0]
    assert [each.peer_hit_len for each in run(prompts, *ROLES)[0]] == [0, 960, 0, 0]


@pytest.mark.parametrize("gone_s", [0.1, 200])
def test_an_engine_that_is_lost_during_a_read_returns_when_the_read_has_ended(gone_s):
    # each page takes .84 s; when the engine is lost, the third is under way
    words = ("parallel.link_gbps=0.01", "parallel.faults.gone_engine=0")
    times = ("parallel.faults.gone_from_s=102", f"parallel.faults.gone_for_s={gone_s}")
    prompts = [(0, 0), (0, 100 * SECOND), (0, 1000 * SECOND)]
    records, summary = run(prompts, *ROLES, *words, *times)
    assert records[1].peer_hit_len == 3 * 64
    assert records[1].computed_for["prefetch_lost"] == 12 * 64
    assert records[2].peer_hit_len == 960  # the first engine reads from the second
    assert summary["decode/failed_handovers_count"] == 0


def test_a_decode_engine_promises_what_peers_hold_and_a_prompt_is_read_from_its_answer():
    words = ("parallel.replicas=1", "parallel.prefill=1", "parallel.decode=2")
    records, summary = run([(0, 0), (0, SECOND)], *words)
    second = records[1]
    assert (second.device_hit_len, second.peer_hit_len) == (960, 0)  # of the prefill engine
    assert second.reused_len == summary["decode/peer_reused_tokens"] == 1024
    assert summary["transfer/peer_bytes"] == 16 * PAGE_BYTES


def test_one_engine_finds_as_much_as_without_peers():
    prompts = [(0, 0), (1, 1), (0, SECOND)]
    words = ("parallel.replicas=1", "prefetch.stop=best_effort")
    records, _ = run(prompts, *words)
    others, _ = run(prompts, *words, "storage=none")
    assert records == others


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("executor.kind=torch", ()),
        ("parallel.ranks=2", ()),
        ("storage.faults", ("storage.faults.error_rate=0.1",)),
        ("storage.format=int8", ()),
        ("parallel.decode_cache=offload", ROLES),
        ("speculation.draft_kv=sidecar", ("speculation.drafts=2",)),
    ],
)
def test_what_peers_do_not_support_is_refused(setting, words):
    words += (setting,) * ("=" in setting)
    with pytest.raises(ValueError, match=f"storage.kind=peers does not support {setting}$"):
        config_of(*BASE, *words)
