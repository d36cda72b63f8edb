"""Simulated runs under storage faults: they end, leak nothing, and take no real time."""

from dataclasses import replace

import pytest
import yaml

from hicache import experiment
from hicache.config import FaultsConfig, StartState
from hicache.runs.schema import CONF, config_of

# by preset: what it injects
PRESETS = {name: [name] for name in ("corrupt", "full", "gone", "missing", "short")} | {
    "errors": ["error"], "everything": ["delay", "error"], "gone_for_good": ["gone"],
    "none": [], "slow": ["delay"],
}  # fmt: skip
CALM = FaultsConfig()
# small enough to finish at once, large enough that tiers overflow and prefetches overlap faults
SMALL = (
    "workload=chat",
    "workload.num_sessions=24",
    "workload.session_rate=4",
    "cache.device_gib=8",
    "cache.host_gib=8",
    "cache.page_size=512",
    "prefetch.threshold=512",
    "engine.check_invariants=true",
)


def preset_of(name):
    """The preset, with faults that happen within a short run."""
    faults = FaultsConfig(**yaml.safe_load((CONF / "faults" / f"{name}.yaml").read_text()))
    if name in ("missing", "short", "corrupt"):  # the run has few pages
        return replace(faults, **{f"{name}_rate": 0.2})
    if faults.gone_from_s is None:
        return faults
    return replace(faults, gone_from_s=2.0, gone_for_s=4.0, failure_ms=500.0)


def run(faults=CALM, *overrides, stop="timeout", start=StartState.warm_storage, **storage):
    config = config_of(*SMALL, f"prefetch.stop={stop}", f"workload.start={start}", *overrides)
    storage = replace(config.storage, faults=faults, **storage)
    return experiment.run(replace(config, storage=storage))


def ttft_s(result):
    times = [each.ttft_ns for each in result.records if each.ttft_ns is not None]
    return sum(times) / len(times) / 1e9


def storage_hits(result):
    return sum(record.storage_hit_len for record in result.records)


def fates(result):
    return [(record.id, record.status.name) for record in result.records]


@pytest.fixture(scope="module")
def calm():
    return run()


@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONF / "faults").glob("*.yaml")))
def test_a_run_with_the_faults_of_a_preset_serves_every_request(preset, calm):
    start = StartState.cold if preset == "full" else StartState.warm_storage
    result = run(preset_of(preset), start=start)  # ends with check_drained
    assert fates(result) == fates(calm)
    injected = {key for key, count in result.measures.items() if "injected" in key and count}
    assert injected >= {f"storage/injected_{fault}_count" for fault in PRESETS[preset]}
    assert bool(injected) == (preset != "none")


def test_equal_faults_give_equal_runs_on_every_local_engine(tmp_path):
    memory, *others = (
        run(preset_of("everything"), kind=kind, root=str(tmp_path))
        for kind in ("memory", "memory", "slab", "file")
    )
    for other in others:
        assert other.records == memory.records


def test_injected_delays_take_simulated_time_and_no_real_time(calm):
    slow = run(FaultsConfig(delay_ms=60_000), stop="wait_complete", deadline_s=1000)
    assert ttft_s(slow) > ttft_s(calm) + 30
    assert slow.wall_s < 30  # minutes of delays


def test_a_call_beyond_the_deadline_fails_at_the_deadline():
    cut = run(FaultsConfig(delay_ms=60_000), stop="wait_complete", deadline_s=1)
    assert cut.measures["storage/failed_count"] > 0
    assert ttft_s(cut) < 30


def test_storage_that_is_gone_is_bypassed_and_used_again_when_it_returns():
    for_good = run(FaultsConfig(gone_from_s=0))
    assert for_good.measures["storage/bypassed_count"] > for_good.measures["storage/failed_count"]
    assert storage_hits(for_good) == 0
    for_a_while = run(FaultsConfig(gone_from_s=0, gone_for_s=1))
    assert for_a_while.measures["storage/failed_count"] > 0
    assert storage_hits(for_a_while) > 0


def test_corrupt_pages_cost_hits_and_nothing_else(calm):
    result = run(FaultsConfig(corrupt_rate=0.2))
    assert 0 < storage_hits(result) < storage_hits(calm)
    assert fates(result) == fates(calm)
