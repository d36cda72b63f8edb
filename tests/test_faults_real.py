"""The fault matrix on the real executor: real bytes, real logits, engine by fault by stop policy.

A run fails by itself if a page leaks (`check_drained`); logits are compared with a cold recompute
of every prompt.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from experiments import schema
from hicache import experiment
from hicache.config import ExperimentConfig, FaultsConfig, StopPolicy

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted(path.stem for path in (CONF / "faults").glob("*.yaml"))
BASE = (
    "workload=agents",
    "workload.limit=12",
    "model=tiny_hybrid",
    "executor=torch",
    "executor.device=cpu",
    "executor.verify=true",
    "engine.check_invariants=true",
    "tracker.wandb_mode=disabled",
)
# real seconds: small, and within the run
SOON = {"gone_from_s": 1.0, "gone_for_s": 2.0, "failure_ms": 50.0}


@cache
def base_config() -> ExperimentConfig:
    schema.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return schema.to_config(compose("config", overrides=list(BASE)))


def preset_of(name: str) -> FaultsConfig:
    faults = FaultsConfig(**yaml.safe_load((CONF / "faults" / f"{name}.yaml").read_text()))
    faults = replace(faults, delay_ms=min(faults.delay_ms, 20.0))
    return faults if faults.gone_from_s is None else replace(faults, **SOON)


def survive(preset: str, stop: StopPolicy, kind: str, root: Path) -> None:
    config = base_config()
    storage = replace(config.storage, kind=kind, root=str(root), faults=preset_of(preset))
    prefetch = replace(config.prefetch, stop=stop)
    result = experiment.run(replace(config, storage=storage, prefetch=prefetch))
    assert {record.status.name for record in result.records} == {"finished"}
    assert result.measures["verify/checked_count"] > 0
    assert result.measures["verify/unequal_count"] == 0


@pytest.mark.slow
def test_everything_at_once_gives_no_wrong_logit(tmp_path: Path) -> None:
    survive("everything", StopPolicy.timeout, "slab", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("stop", StopPolicy, ids=lambda stop: stop.name)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["memory", "slab", "file"])
def test_no_fault_gives_a_wrong_logit_or_a_leak(
    kind: str, preset: str, stop: StopPolicy, tmp_path: Path
) -> None:
    survive(preset, stop, kind, tmp_path)
