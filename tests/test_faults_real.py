"""The fault matrix on the real executor: real bytes, real logits, engine by fault by stop policy.

One run fills a store. A second one, on an empty device and host, is served from a copy of it and
writes to it while it fails; a third one, healthy, is served from what the second one left. Logits
are compared with a cold recompute of every prompt, and a run that leaks fails by itself.

Presets are made for an hour of trace and a hundred thousand pages. Here is a second and a hundred
pages, so rates are higher and times shorter (`hasty`), or most faults would never be drawn.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from shutil import copytree

import pytest
import yaml

from hicache import experiment
from hicache.config import STOP_POLICIES, ExperimentConfig, FaultsConfig
from hicache.results.metrics import Result
from hicache.runs.schema import CONF, config_of

PRESETS = sorted(path.stem for path in (CONF / "faults").glob("*.yaml"))
KINDS = ("slab", "file")
BASE = (
    "workload=agents",
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
    "storage.breaker_retry_s=0.05",
    "tracker.wandb_mode=disabled",
)
FILL_REQUESTS, REQUESTS = 8, 16  # what comes after the fill is written while storage fails
MORE_OFTEN = 10.0
DAMAGED_MORE_OFTEN = 4.0  # of stored pages, while the other rates are of pages read
# with a delay the calls themselves take the run past the hour of the fault, however fast it is
SOON = {"delay_ms": 4.0, "gone_from_s": 0.03, "gone_for_s": 0.1, "failure_ms": 10.0}
SOON_FOR_GOOD = {**SOON, "gone_for_s": None}
# largest error of a logit in standard deviations, by the format of storage: twice what is seen
# without faults. A wrong page is farther away
LOSSY_ERROR = {"int8": 0.3, "fp8": 0.8}
FORMS = {
    "plain": (),
    "int8": ("cache.host_format=int8",),
    "int8 in storage": ("storage.format=int8",),
    "fp8 in storage": ("storage.format=fp8",),
}
DAMAGED_BYTES = 256  # where damage is done: no page of the model is shorter

# runs what its arguments say, and prints a line after each write; kill it then
WRITER = """
import sys
from hicache import experiment
from hicache.runs.schema import config_of
from hicache.executor.real.io import TorchIo
store = TorchIo._store
def storing(*arguments):
    stored = store(*arguments)
    print("written", flush=True)
    return stored
TorchIo._store = storing
experiment.run(config_of(*sys.argv[1:]))
"""

Fill = Callable[[str, str], Path]


def preset_of(name: str) -> FaultsConfig:
    return FaultsConfig(**yaml.safe_load((CONF / "faults" / f"{name}.yaml").read_text()))


def hasty(faults: FaultsConfig) -> FaultsConfig:
    """The same faults for a short run. Corruption is not drawn: it is done to the disk."""
    for name in ("missing_rate", "short_rate"):
        faults = replace(faults, **{name: min(getattr(faults, name) * MORE_OFTEN, 1.0)})
    faults = replace(faults, delay_ms=min(faults.delay_ms, 20.0), corrupt_rate=0.0)
    if faults.gone_from_s is None:
        return faults
    return replace(faults, **(SOON if faults.gone_for_s is not None else SOON_FOR_GOOD))


def run(config: ExperimentConfig, num_requests: int) -> Result:
    workload = replace(config.workload, limit=num_requests)
    result = experiment.run(replace(config, workload=workload))
    assert [record.status.name for record in result.records] == ["finished"] * num_requests
    assert result.measures["verify/checked_count"] == num_requests
    if config.is_lossy:
        assert result.measures["verify/logit_error_max"] < LOSSY_ERROR[config.storage_format]
        assert result.measures["verify/greedy_agreement"] > 0.9
    else:
        assert result.measures["verify/unequal_count"] == 0
    return result


def storage_hits(result: Result) -> int:
    return sum(record.storage_hit_len for record in result.records)


def bites(result: Result) -> float:
    """Faults that were injected, and pages that the engine found damaged."""
    return sum(
        count
        for name, count in result.measures.items()
        if name.startswith("storage/injected_") or name == "storage/damaged_pages"
    )


def with_storage(
    kind: str, root: Path, faults: FaultsConfig | None = None, form: str = "plain"
) -> ExperimentConfig:
    config = config_of(*BASE, *FORMS[form])
    storage = replace(config.storage, kind=kind, root=str(root), faults=faults or FaultsConfig())
    prefetch = replace(config.prefetch, stop="wait_complete")
    return replace(config, storage=storage, prefetch=prefetch)


def stopping(config: ExperimentConfig, stop: str) -> ExperimentConfig:
    return replace(config, prefetch=replace(config.prefetch, stop=stop))


def flip_bits(root: Path, share: float, rng: Random) -> int:
    """Flip a bit in this share of the stored pages, on the disk; how many there were."""
    pages = [(path, 0) for path in sorted(root.glob("*/*/*.page"))]
    for path in sorted(root.glob("*/pages-*.slab")):
        slot_bytes = int(path.stem.removeprefix("pages-"))
        pages += [(path, start) for start in range(0, path.stat().st_size, slot_bytes)]
    chosen = rng.sample(pages, round(share * len(pages)))
    for path, start in chosen:
        with path.open("r+b") as file:
            place = start + rng.randrange(DAMAGED_BYTES)
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return len(chosen)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Fill:
    """A directory that a first run filled, by engine and format. Copy it: others need it too."""

    @cache
    def fill(kind: str, form: str) -> Path:
        root = tmp_path_factory.mktemp(kind)
        run(with_storage(kind, root, form=form), FILL_REQUESTS)
        return root

    return fill


def survive(kind: str, root: Path, faults: FaultsConfig, stop: str, form: str) -> Result:
    """The second run and the third; returns the second."""
    flip_bits(root, faults.corrupt_rate * DAMAGED_MORE_OFTEN, Random(0))
    failing = run(stopping(with_storage(kind, root, hasty(faults), form), stop), REQUESTS)
    assert storage_hits(run(with_storage(kind, root, form=form), REQUESTS)) > 0
    return failing


def forms(*quick: str) -> pytest.MarkDecorator:
    """All formats, the others than these in the soak."""
    soak = [pytest.param(each, marks=pytest.mark.soak) for each in FORMS if each not in quick]
    return pytest.mark.parametrize("form", [*quick, *soak])


@forms("plain")
def test_pages_go_missing_and_no_logit_is_wrong(form: str, filled: Fill, tmp_path: Path) -> None:
    root = copytree(filled("slab", form), tmp_path / "store")
    faults = hasty(preset_of("missing"))
    result = run(with_storage("slab", root, faults, form), REQUESTS)
    assert storage_hits(result) > 0
    assert bites(result) > 0


@forms("plain")
def test_a_page_that_rots_on_the_disk_is_refused_and_no_logit_is_wrong(
    form: str, filled: Fill, tmp_path: Path
) -> None:
    root = copytree(filled("slab", form), tmp_path / "store")
    assert flip_bits(root, 0.04, Random(0)) > 0
    result = run(with_storage("slab", root, form=form), REQUESTS)
    assert storage_hits(result) > 0
    assert result.measures["storage/damaged_pages"] > 0


@forms("int8")
def test_a_killed_run_leaves_pages_that_the_next_one_can_use(form: str, tmp_path: Path) -> None:
    overrides = [*BASE, "storage=slab", f"storage.root={tmp_path}", *FORMS[form]]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, *overrides], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert [writer.stdout.readline() for _ in range(8)] == ["written\n"] * 8
        writer.kill()
    assert storage_hits(run(with_storage("slab", tmp_path, form=form), FILL_REQUESTS)) > 0


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stop", STOP_POLICIES)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_gives_a_wrong_logit_or_a_leak(
    kind: str, preset: str, stop: str, form: str, filled: Fill, tmp_path: Path
) -> None:
    root = copytree(filled(kind, form), tmp_path / "store")
    faults = preset_of(preset)
    result = survive(kind, root, faults, stop, form)
    # best_effort may begin before it has read the page that is to be spoiled
    if stop != "best_effort":
        assert (bites(result) > 0) == (faults != FaultsConfig())


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_is_spoiled_on_the_way_is_refused(kind: str, form: str, tmp_path: Path) -> None:
    # memory for a part of the prompts: what this run has written it must read again
    config = with_storage(kind, tmp_path, FaultsConfig(corrupt_rate=0.5), form)
    tight = replace(config.cache, device_gib=0.002, host_gib=0.0012)
    result = run(replace(config, cache=tight), 40)
    assert result.measures["storage/injected_corrupt_count"] > 0
    assert result.measures["storage/changed_pages"] == bites(result)


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stop", STOP_POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_are_given_up_spoil_nothing(
    kind: str, stop: str, form: str, filled: Fill, tmp_path: Path
) -> None:
    root = copytree(filled(kind, form), tmp_path / "store")
    config = with_storage(kind, root, FaultsConfig(delay_ms=20.0, delay_sigma=1.0), form)
    hurried = replace(config.executor, storage_deadline_s=0.03)
    result = run(stopping(replace(config, executor=hurried), stop), REQUESTS)
    assert result.measures["storage/failed_count"] > 0
    assert storage_hits(run(with_storage(kind, root, form=form), REQUESTS)) > 0
