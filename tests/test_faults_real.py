"""The fault matrix on the real executor: real bytes, real logits, engine by fault by stop policy.

One run fills a store; a second, on an empty device and host, is served from it while it fails.
Logits are compared with a cold recompute of every prompt, and a run that leaks fails by itself.
Corruption is left out: a second process trusts no page while pages are corrupted on the way (the
engines' own digests and `tests/storage` cover it).
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from experiments import schema
from hicache import experiment
from hicache.config import STOP_POLICIES, ExperimentConfig, FaultsConfig
from hicache.metrics import Result

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted(path.stem for path in (CONF / "faults").glob("*.yaml"))
BASE = (
    "workload=agents",
    "workload.limit=16",
    "workload.num_sessions=16",
    "workload.session_rate=2",
    "workload.time_scale=0.02",
    "cache.page_size=16",
    "prefetch.threshold=16",
    "model=tiny_hybrid",
    "executor=torch",
    "executor.device=cpu",
    "executor.verify=true",
    "engine.check_invariants=true",
    "tracker.wandb_mode=disabled",
)
# real seconds: small, and within the run
SOON = {"gone_from_s": 0.3, "gone_for_s": 0.5, "failure_ms": 20.0}


@cache
def base_config() -> ExperimentConfig:
    schema.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return schema.to_config(compose("config", overrides=list(BASE)))


def preset_of(name: str) -> FaultsConfig:
    faults = FaultsConfig(**yaml.safe_load((CONF / "faults" / f"{name}.yaml").read_text()))
    faults = replace(faults, delay_ms=min(faults.delay_ms, 20.0), corrupt_rate=0.0)
    return faults if faults.gone_from_s is None else replace(faults, **SOON)


def run(kind: str, root: Path, stop: str, faults: FaultsConfig) -> Result:
    config = base_config()
    storage = replace(config.storage, kind=kind, root=str(root), faults=faults)
    prefetch = replace(config.prefetch, stop=stop)
    result = experiment.run(replace(config, storage=storage, prefetch=prefetch))
    assert {record.status.name for record in result.records} == {"finished"}
    assert result.measures["verify/checked_count"] == len(result.records)
    assert result.measures["verify/unequal_count"] == 0
    return result


def storage_hits(result: Result) -> int:
    return sum(record.storage_hit_len for record in result.records)


def survive(preset: str, stop: str, kind: str, root: Path) -> int:
    """Tokens that the second run had from storage."""
    run(kind, root, "wait_complete", FaultsConfig())
    return storage_hits(run(kind, root, stop, preset_of(preset)))


@pytest.mark.slow
def test_a_failing_store_gives_hits_and_no_wrong_logit(tmp_path: Path) -> None:
    assert survive("missing", "wait_complete", "slab", tmp_path) > 0


@pytest.mark.soak
@pytest.mark.parametrize("stop", STOP_POLICIES)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["slab", "file"])
def test_no_fault_gives_a_wrong_logit_or_a_leak(
    kind: str, preset: str, stop: str, tmp_path: Path
) -> None:
    survive(preset, stop, kind, tmp_path)
