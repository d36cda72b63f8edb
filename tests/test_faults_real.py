"""The fault matrix on the real executor: real bytes, real logits, engine by fault by stop policy.

One run fills a store. A second one, on an empty device and host, is served from a copy of it and
writes to it while it fails; a third one, healthy, is served from what the second one left. Logits
are compared with a cold recompute of every prompt, and a run that leaks fails by itself.

Presets are made for an hour of trace and a hundred thousand pages. Here is a second and a hundred
pages, so rates are higher and times shorter (`hasty`), or most faults would never be drawn.
"""

from dataclasses import replace
from functools import cache
from multiprocessing import Pipe
from random import Random
from shutil import copytree

import pytest
import yaml

from hicache import experiment
from hicache.config import STOP_POLICIES, FaultsConfig
from hicache.executor.real.io import TorchIo
from hicache.runs.schema import CONF, config_of
from hicache.storage import factory
from tests.forked import Forked

PRESETS = sorted(path.stem for path in (CONF / "faults").glob("*.yaml"))
KINDS = ("slab", "file")
NO_FAULTS = FaultsConfig()
BASE = (
    "workload=agents",
    "workload.num_sessions=16",
    "workload.session_rate=2",
    "workload.time_scale=0.02",
    "cache.page_size=16",
    "prefetch.threshold=16",
    "executor=torch",
    "executor.device=cpu",
    "executor.verify=true",
    "engine.check_invariants=true",
    "tracker.wandb_mode=disabled",
)
FAMILIES = CONF.resolve().parent / "examples" / "hugging_face"
FILL_REQUESTS, REQUESTS = 8, 16  # what comes after the fill is written while storage fails
MORE_OFTEN = 10.0
DAMAGED_MORE_OFTEN = 4.0  # of stored pages, while the other rates are of pages read
# with a delay the calls themselves take the run past the hour of the fault, however fast it is
SOON = {"delay_ms": 4.0, "gone_from_s": 0.03, "gone_for_s": 0.1, "failure_ms": 10.0}
SOON_FOR_GOOD = {**SOON, "gone_for_s": None}
# largest error of a logit in standard deviations, by the format of storage: twice what is seen
# without faults. A wrong page is farther away
LOSSY_ERROR = {"int8": 0.3, "fp8": 0.8}
TINY = "model=tiny_hybrid"
THEIRS = ("executor.model=hf", "cache.device_gib=0.0008", "cache.host_gib=0.001")
FORMS = {
    "plain": (TINY,),
    "int8": (TINY, "cache.host_format=int8"),
    "int8 in storage": (TINY, "storage.format=int8"),
    "fp8 in storage": (TINY, "storage.format=fp8"),
    "llama": (*THEIRS, f"model.from_hf={FAMILIES / 'llama'}"),
    "qwen3_next": (
        *(*THEIRS, f"model.from_hf={FAMILIES / 'qwen3_next'}"),
        *("cache.device.share.mamba=0.2", "cache.host.share.mamba=0.2"),
    ),
}
DAMAGED_BYTES = 256  # where damage is done: no page of the model is shorter


@pytest.fixture(autouse=True)
def tried_again_soon(monkeypatch):
    """Storage that failed is tried again within a short run."""
    monkeypatch.setattr(factory, "BREAKER_RETRY_S", 0.05)


def preset_of(name):
    return FaultsConfig(**yaml.safe_load((CONF / "faults" / f"{name}.yaml").read_text()))


def hasty(faults):
    """The same faults for a short run. Corruption is not drawn: it is done to the disk."""
    for name in ("missing_rate", "short_rate"):
        faults = replace(faults, **{name: min(getattr(faults, name) * MORE_OFTEN, 1.0)})
    faults = replace(faults, delay_ms=min(faults.delay_ms, 20.0), corrupt_rate=0.0)
    if faults.gone_from_s is None:
        return faults
    return replace(faults, **(SOON if faults.gone_for_s is not None else SOON_FOR_GOOD))


def run(config, num_requests):
    workload = replace(config.workload, limit=num_requests)
    result = experiment.run(replace(config, workload=workload))
    assert [record.status.name for record in result.records] == ["finished"] * num_requests
    assert result.measures["verify/checked_count"] == num_requests
    if config.is_lossy:
        assert result.measures["verify/logit_error_max"] < LOSSY_ERROR[config.storage_format]
        assert result.measures["verify/greedy_agreement"] > 0.9
    else:
        assert result.measures["verify/wrong_count"] == 0
    return result


def storage_hits(result):
    return sum(record.storage_hit_len for record in result.records)


def num_faults(result):
    """Faults that were injected, and pages that the engine found damaged."""
    return sum(
        count
        for name, count in result.measures.items()
        if name.startswith("storage/injected_") or name == "storage/damaged_pages"
    )


def with_storage(kind, root, form, faults=NO_FAULTS, stop="wait_complete"):
    config = config_of(*BASE, *FORMS[form], f"prefetch.stop={stop}")
    storage = replace(config.storage, kind=kind, root=str(root), faults=faults)
    return replace(config, storage=storage)


def flip_bits(root, share):
    """Flip a bit in this share of the stored pages, on the disk; return the number of pages."""
    rng = Random(0)
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
def filled(tmp_path_factory):
    """A function of engine and format: the directory that a first run filled, to be copied."""

    @cache
    def fill(kind, form):
        root = tmp_path_factory.mktemp(kind)
        run(with_storage(kind, root, form), FILL_REQUESTS)
        return root

    return fill


def forms(*quick):
    """All formats; those that are not quick are soaked."""
    soak = [pytest.param(each, marks=pytest.mark.soak) for each in FORMS if each not in quick]
    return pytest.mark.parametrize("form", [*quick, *soak])


@forms("plain", "qwen3_next")
def test_missing_and_damaged_pages_are_refused_and_no_logit_is_wrong(form, filled, tmp_path):
    root = copytree(filled("slab", form), tmp_path / "store")
    assert flip_bits(root, 0.04) > 0
    result = run(with_storage("slab", root, form, hasty(preset_of("missing"))), FILL_REQUESTS)
    assert storage_hits(result) > 0
    assert result.measures["storage/damaged_pages"] > 0
    assert result.measures["storage/injected_missing_count"] > 0


def write_and_tell(wire, config):
    """Run a config, and tell of each write."""
    store = TorchIo._store

    def storing(*arguments):
        stored = store(*arguments)
        wire.send("written")
        return stored

    TorchIo._store = storing
    experiment.run(config)


@forms("int8")
def test_a_killed_run_leaves_pages_that_the_next_run_can_use(form, tmp_path):
    overrides = [*BASE, "storage=slab", f"storage.root={tmp_path}", *FORMS[form]]
    heard, told = Pipe(duplex=False)
    writer = Forked(write_and_tell, told, config_of(*overrides))
    told.close()
    assert [heard.recv() for _ in range(8)] == ["written"] * 8
    writer.kill()
    writer.join()
    heard.close()
    assert storage_hits(run(with_storage("slab", tmp_path, form), FILL_REQUESTS)) > 0


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stop", STOP_POLICIES)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_gives_a_wrong_logit_or_a_leak(kind, preset, stop, form, filled, tmp_path):
    root = copytree(filled(kind, form), tmp_path / "store")
    faults = preset_of(preset)
    flip_bits(root, faults.corrupt_rate * DAMAGED_MORE_OFTEN)
    result = run(with_storage(kind, root, form, hasty(faults), stop), REQUESTS)
    assert storage_hits(run(with_storage(kind, root, form), REQUESTS)) > 0
    # best_effort may begin before it has read the damaged page; marginal, too, on a fast model
    if stop != "best_effort" and (stop != "marginal" or FORMS[form][0] == TINY):
        assert (num_faults(result) > 0) == (faults != NO_FAULTS)


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_is_corrupted_while_it_is_written_is_refused(kind, form, tmp_path):
    # memory for a part of the prompts: what this run has written it must read again
    config = with_storage(kind, tmp_path, form, FaultsConfig(corrupt_rate=0.5))
    gib = 1200 * config.model.full_token_bytes / 2**30
    device_gib, host_gib = (gib, gib / 3) if config.model.from_hf else (0.002, 0.0012)
    tight = replace(config.cache, device_gib=device_gib, host_gib=host_gib)
    result = run(replace(config, cache=tight), 40)
    assert result.measures["storage/injected_corrupt_count"] > 0
    assert result.measures["storage/changed_pages"] == num_faults(result)
