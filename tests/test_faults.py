"""Runs under storage faults: they end, leak nothing, and take simulated time, not real time."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest
import yaml

from hicache import experiment
from hicache.config import STOP_POLICIES, ExperimentConfig, FaultsConfig, StartState, StorageConfig
from hicache.results.metrics import Result
from hicache.runs.schema import CONF, config_of

PRESETS = sorted(path.stem for path in (CONF / "faults").glob("*.yaml"))
HYBRIDS = ("gemma3_27b", "qwen3_next_80b", "tiny_hybrid")
CALM = FaultsConfig()
ENGINES = ("memory", "slab", "file")
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
    "tracker.wandb_mode=disabled",
)
# whatever a preset says, so that it bites within the short run
SOON = {"gone_from_s": 2.0, "gone_for_s": 4.0, "failure_ms": 500.0}


def base_config(*overrides: str) -> ExperimentConfig:
    return config_of(*SMALL, *overrides)


def preset_of(name: str) -> FaultsConfig:
    faults = FaultsConfig(**yaml.safe_load((CONF / "faults" / f"{name}.yaml").read_text()))
    return faults if faults.gone_from_s is None else replace(faults, **SOON)


def run(
    faults: FaultsConfig = CALM,
    *,
    base: ExperimentConfig | None = None,
    stop: str = "timeout",
    start: StartState = StartState.warm_storage,
    **storage: object,
) -> Result:
    config = base or base_config()
    return experiment.run(
        replace(
            config,
            prefetch=replace(config.prefetch, stop=stop),
            workload=replace(config.workload, start=start),
            storage=replace(config.storage, faults=faults, **storage),  # type: ignore[arg-type]
        )
    )


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


def answered_share(result: Result) -> float:
    return [status for _, status in fates(result)].count("finished") / len(result.records)


@pytest.fixture(scope="module")
def calm() -> Result:
    return run()


def seldom(pairs: Iterable[tuple[str, str]], often: Collection[tuple[str, str]]) -> list[object]:
    """All pairs; those that are not tried often are soaked."""
    return [
        pytest.param(*pair, marks=() if pair in often else pytest.mark.soak, id="-".join(pair))
        for pair in pairs
    ]


def dealt(names: Sequence[str]) -> set[tuple[str, str]]:
    """Each name with one way of stopping, in turn."""
    return set(zip(names, cycle(STOP_POLICIES)))


@pytest.mark.parametrize(
    ("preset", "stop"),
    seldom(
        product(PRESETS, STOP_POLICIES),
        dealt(PRESETS) | {("everything", stop) for stop in STOP_POLICIES},
    ),
)
def test_a_run_under_faults_answers_everyone_and_leaks_nothing(
    preset: str, stop: str, calm: Result
) -> None:
    result = run(preset_of(preset), stop=stop)  # ends with check_drained
    assert fates(result) == fates(calm)
    assert answered_share(result) > 0.9


@pytest.mark.parametrize(("model", "stop"), seldom(product(HYBRIDS, STOP_POLICIES), dealt(HYBRIDS)))
def test_hybrids_leak_nothing_when_everything_goes_wrong(model: str, stop: str) -> None:
    roomy = () if model == "tiny_hybrid" else ("cache.device_gib=24", "cache.host_gib=12")
    roomy += ("workload.num_sessions=8",)
    base = base_config(f"model={model}", *roomy)
    result = run(preset_of("everything"), base=base, stop=stop)
    assert fates(result) == fates(run(base=base, stop=stop))
    assert answered_share(result) == 1


@pytest.mark.parametrize("kind", ENGINES)
def test_every_local_engine_gives_the_same_run_under_the_same_faults(
    kind: str, tmp_path: Path
) -> None:
    memory = run(preset_of("everything"))
    other = run(preset_of("everything"), kind=kind, root=str(tmp_path))
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
    faults = preset_of(preset)
    if fault in ("missing", "short", "corrupt"):  # the run has few pages
        faults = replace(faults, **{f"{fault}_rate": 0.2})
    start = StartState.cold if fault == "full" else StartState.warm_storage
    measures = run(faults, start=start).measures
    assert measures[f"storage/injected_{fault}_count"] > 0


def test_nothing_is_injected_unless_asked_for(calm: Result) -> None:
    assert not any(count for name, count in calm.measures.items() if "injected" in name)


def test_delays_are_simulated_time(calm: Result) -> None:
    slow = run(FaultsConfig(delay_ms=60_000), stop="wait_complete", deadline_s=1000)
    assert ttft_s(slow) > ttft_s(calm) + 30
    assert slow.wall_s < 30  # minutes of delays


def test_a_call_beyond_the_deadline_fails_then() -> None:
    cut = run(FaultsConfig(delay_ms=60_000), stop="wait_complete", deadline_s=1)
    assert cut.measures["storage/failed_count"] > 0
    assert ttft_s(cut) < 30


def test_an_engine_that_is_gone_for_good_is_bypassed() -> None:
    result = run(FaultsConfig(gone_from_s=0))
    assert result.measures["storage/bypassed_count"] > result.measures["storage/failed_count"]
    assert storage_hits(result) == 0


def test_an_engine_that_comes_back_is_used_again() -> None:
    result = run(FaultsConfig(gone_from_s=0, gone_for_s=3), breaker_retry_s=1)
    assert result.measures["storage/failed_count"] > 0
    assert storage_hits(result) > 0


def test_corrupt_pages_cost_hits_and_nothing_else(calm: Result) -> None:
    result = run(FaultsConfig(corrupt_rate=0.2))
    assert 0 < storage_hits(result) < storage_hits(calm)
    assert fates(result) == fates(calm)


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = run(preset_of("everything")), run(preset_of("everything"))
    assert one.measures == other.measures
    assert one.records == other.records


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"error_rate": 1.5}, r"storage.faults.error_rate must be between 0 and 1, got 1.5"),
        ({"delay_ms": -1.0}, r"storage.faults.delay_ms must be at least 0, got -1.0"),
        ({"gone_for_s": 1.0}, r"storage.faults.gone_for_s=1.0 needs"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_by_name(
    values: dict[str, float], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        FaultsConfig(**values)  # type: ignore[arg-type]


def test_a_deadline_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"storage\.deadline_s must be above 0, got 0"):
        StorageConfig(deadline_s=0)
