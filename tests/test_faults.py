"""Runs under storage faults: they end, leak nothing, and take simulated time, not real time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments import schema
from hicache import experiment
from hicache.config import ExperimentConfig, FaultsConfig, StorageConfig
from hicache.metrics import Result

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted(path.stem for path in (CONF / "faults").glob("*.yaml"))
STOPS = ("best_effort", "wait_complete", "timeout")
ENGINES = ("memory", "slab", "file")
# small enough to finish at once, large enough that tiers overflow and prefetches overlap faults
SMALL = (
    "workload=chat",
    "workload.num_sessions=12",
    "workload.session_rate=4",
    "workload.start=warm_storage",
    "cache.device_gib=8",
    "cache.host_gib=8",
    "cache.page_size=512",
    "prefetch.threshold=512",
    "engine.check_invariants=true",
    "tracker.wandb_mode=disabled",
)
# whatever a preset says, so that it bites within the short run
SOON = {"gone_from_s": 2.0, "gone_for_s": 4.0, "failure_ms": 500.0}


def load(*overrides: str) -> ExperimentConfig:
    schema.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return schema.to_config(compose("config", overrides=[*SMALL, *overrides]))


def soon(config: ExperimentConfig) -> ExperimentConfig:
    faults = config.storage.faults
    if faults.gone_from_s is not None:
        faults = replace(faults, **SOON)
    return replace(config, storage=replace(config.storage, faults=faults))


def run(*overrides: str) -> Result:
    return experiment.run(soon(load(*overrides)))


def ttft_s(result: Result) -> float:
    times = [
        record.first_token_ns - record.arrival_ns
        for record in result.records
        if record.first_token_ns is not None
    ]
    return sum(times) / len(times) / 1e9


def storage_hits(result: Result) -> int:
    return sum(record.storage_hit_len for record in result.records)


def fates(result: Result) -> list[tuple[int, str]]:
    return [(record.id, record.status.name) for record in result.records]


@pytest.fixture(scope="module")
def calm() -> Result:
    return run("faults=none")


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_under_faults_answers_everyone_and_leaks_nothing(
    preset: str, stop: str, calm: Result
) -> None:
    result = run(f"faults={preset}", f"prefetch.stop={stop}")  # ends with check_drained
    assert fates(result) == fates(calm)


@pytest.mark.parametrize("model", ["gemma3_27b", "qwen3_next_80b", "tiny_hybrid"])
@pytest.mark.parametrize("stop", STOPS)
def test_hybrids_leak_nothing_when_everything_goes_wrong(model: str, stop: str) -> None:
    roomy = () if model == "tiny_hybrid" else ("cache.device_gib=24", "cache.host_gib=12")
    result = run(f"model={model}", "faults=everything", f"prefetch.stop={stop}", *roomy)
    assert {record.status.name for record in result.records} == {"finished"}


@pytest.mark.parametrize("kind", ENGINES)
def test_every_local_engine_gives_the_same_run_under_the_same_faults(
    kind: str, tmp_path: Path
) -> None:
    memory = run("faults=everything")
    other = run("faults=everything", f"storage={kind}", f"storage.root={tmp_path}")
    assert [record.first_token_ns for record in other.records] == [
        record.first_token_ns for record in memory.records
    ]


@pytest.mark.parametrize(
    ("preset", "fault"),
    [
        ("slow", "delay"),
        ("errors", "error"),
        ("missing", "missing"),
        ("short", "short"),
        ("corrupt", "corrupt"),
        ("full", "full"),
        ("gone", "gone"),
    ],
)
def test_each_preset_injects_its_fault(preset: str, fault: str) -> None:
    faults = {"missing": 0.2, "short": 0.2, "corrupt": 0.2}
    rate = (f"storage.faults.{fault}_rate={faults[fault]}",) if fault in faults else ()
    start = ("workload.start=cold",) if preset == "full" else ()
    measures = run(f"faults={preset}", *rate, *start).measures
    assert measures[f"storage/injected_{fault}_count"] > 0


def test_nothing_is_injected_unless_asked_for(calm: Result) -> None:
    assert not any("injected" in name for name in calm.measures)


def test_delays_are_simulated_time(calm: Result) -> None:
    slow = run("storage.faults.delay_ms=60000", "prefetch.stop=wait_complete",
               "storage.deadline_s=1000")  # fmt: skip
    assert ttft_s(slow) > ttft_s(calm) + 60
    assert slow.wall_s < 30  # an hour and more of delays


def test_a_call_beyond_the_deadline_fails_then() -> None:
    cut = run("storage.faults.delay_ms=60000", "prefetch.stop=wait_complete",
              "storage.deadline_s=1")  # fmt: skip
    assert cut.measures["storage/failed_count"] > 0
    assert ttft_s(cut) < 60


def test_an_engine_that_is_gone_for_good_is_bypassed() -> None:
    result = experiment.run(load("storage.faults.gone_from_s=0"))
    assert result.measures["storage/bypassed_count"] > result.measures["storage/failed_count"]
    assert storage_hits(result) == 0


def test_an_engine_that_comes_back_is_used_again() -> None:
    gone = ("storage.faults.gone_from_s=0", "storage.breaker_retry_s=1")
    result = experiment.run(load(*gone, "storage.faults.gone_for_s=3"))
    assert storage_hits(result) > 0
    assert result.measures["storage/failed_count"] > 0


def test_corrupt_pages_cost_hits_and_nothing_else(calm: Result) -> None:
    result = run("storage.faults.corrupt_rate=0.2")
    assert 0 < storage_hits(result) < storage_hits(calm)


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = run("faults=everything"), run("faults=everything")
    assert json.dumps(one.measures) == json.dumps(other.measures)
    assert one.records == other.records


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"error_rate": 1.5}, r"storage.faults.error_rate must be a share .* got 1.5"),
        ({"delay_ms": -1.0}, r"storage.faults.delay_ms must be at least 0, got -1.0"),
        ({"gone_for_s": 1.0}, r"storage.faults.gone_for_s needs"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_by_name(
    values: dict[str, float], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        FaultsConfig(**values)  # type: ignore[arg-type]


def test_a_deadline_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="storage.deadline_s must be positive, got 0"):
        StorageConfig(deadline_s=0)
