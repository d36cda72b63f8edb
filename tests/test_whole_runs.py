"""Claims about whole runs: ranks in lockstep, seeds, sidecar files, and cut prefetches."""

from hicache import experiment
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of

SMALL = (
    "workload=agents",
    "workload.num_sessions=8",
    "workload.limit=40",
    "model=qwen3_next_80b",
    "cache.device_gib=16",
    "cache.host_gib=8",
    "engine.check_invariants=true",
)
WARM = "workload.start=warm_storage"


def replay(*overrides):
    """The summary of a small run in simulated time."""
    result = experiment.run(config_of(*SMALL, *overrides))
    return summarize(result.records, result.measures)


def test_ranks_that_read_different_pages_publish_what_all_have_read():
    # the ranks' trees are compared in every step, and whole at the end
    faulty = ("storage.delay_s=0.01", "storage.faults.missing_rate=0.005", WARM)
    summary = replay("parallel.ranks=3", "workload.num_sessions=30", *faulty)
    assert summary["request/finished_count"] == summary["request/count"]
    assert summary["agreement/query_collectives_count"] > 0
    assert summary["agreement/step_collectives_count"] >= summary["engine/steps_count"]
    assert summary["agreement/unequal_reads_count"] > 0
    assert summary["agreement/illegal_lengths_count"] == 0


def test_ranks_without_delays_or_faults_serve_as_one_engine():
    plain = replay("workload.limit=12")
    ranked = replay("workload.limit=12", "parallel.ranks=2", "parallel.collective_s=0")
    for name in ("device_hit", "host_hit", "storage_hit", "computed"):
        assert ranked[f"cache/{name}_tokens"] == plain[f"cache/{name}_tokens"]


def test_the_seed_alone_decides_on_delays():
    first, again, other = (
        replay("storage.delay_s=0.05", "workload.limit=25", f"seed={seed}") for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_prefetch_that_awaits_its_sidecars_keeps_complete_pages():
    settings = ("prefetch.stop=timeout", "storage.sidecar_s=0.5", WARM)
    off, on = (
        replay(*settings, f"compat.quirks.await_sidecars={word}") for word in ("false", "true")
    )
    count = "prefetch/terminated_without_sidecars_count"
    assert off[count] > on[count] == 0
    assert on["cache/storage_hit_tokens"] > off["cache/storage_hit_tokens"]


def test_cutting_prefetches_starts_some_that_would_be_abandoned():
    off, on = (replay("cache.host_gib=2", WARM, f"arm={arm}") for arm in ("cut_off", "cut_on"))
    assert on["prefetch/cut_count"] > off["prefetch/cut_count"] == 0
    assert on["prefetch/abandoned_count"] < off["prefetch/abandoned_count"]
