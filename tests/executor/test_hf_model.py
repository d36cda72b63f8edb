"""Models of transformers on three tiers: logits are those without a cache, mistakes are found."""

import os
import sys
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported

import pytest
import torch

from hicache import experiment
from hicache.cache.kinds import MAMBA
from hicache.runs.schema import config_of
from tests.executor.hf_runs import BASE, FOLDER, KINDS, PAGE, arrivals, config, run

hf_model = pytest.importorskip(
    "hicache.executor.real.hf_model", reason="transformers is not installed", exc_type=ImportError
)

STEPPED = ("gemma3", "falcon_h1")  # a window, and a state beside full attention


@pytest.mark.parametrize(
    ("family", "call"),
    [
        *((family, "page") for family in KINDS),
        *(
            pytest.param(family, "step", marks=[] if family in STEPPED else [pytest.mark.soak])
            for family in KINDS
        ),
    ],
)
def test_logits_are_those_without_a_cache_with_hits_of_every_kind_from_every_tier(family, call):
    with arrivals() as seen:
        result = run(family, f"executor.call={call}", num_requests=20)
    measures = result.measures
    assert all(seen[tier, kind] for tier in ("host", "storage") for kind in KINDS[family]), seen
    assert (measures["verify/checked_count"], measures["verify/untested_count"]) == (20, 0)
    assert (measures["verify/wrong_count"], measures["verify/greedy_agreement"]) == (0, 1)
    if call == "page":
        assert measures["verify/unequal_count"] == 0
    else:
        assert 0 < measures["verify/logit_error_max"] < 3e-5


def writes_no_state():
    return patch("hicache.executor.real.pools.TorchPools.copy_states", lambda *_: None)


def after_init(name, spoil):
    """Patch layer type `name`: `spoil` changes its layers in calls after the first token."""
    layer_type = getattr(hf_model, name)
    init = layer_type.__init__

    def spoiled(self, call, layer, shapes):
        init(self, call, layer, shapes)
        if call.start:
            spoil(self, call, layer)

    return patch.object(layer_type, "__init__", spoiled)


def reads_a_wrong_page():
    def spoil(self, call, layer):
        first = self._first_page
        self._pages[first] = self._pages[first + 1]

    return after_init("PagedLayer", spoil)


def sees_a_window_that_is_one_page_short():
    def spoil(self, call, layer):
        self._first_page += self.is_sliding

    return after_init("PagedLayer", spoil)


def takes_the_taps_of_another_slot():
    def spoil(self, call, layer):
        taps = call.memory.pools.ranks[0].taps[0]
        self._taps = taps[(call.stretch.slot + 1) % len(taps)].view_as(self._taps)

    return after_init("SlotLayer", spoil)


MISTAKES = [
    *((reads_a_wrong_page, family) for family in ("llama", "deepseek_v3")),
    (sees_a_window_that_is_one_page_short, "gemma3"),
    *((writes_no_state, family) for family in KINDS if MAMBA in KINDS[family]),
    (takes_the_taps_of_another_slot, "falcon_h1"),
]


@pytest.mark.parametrize(("mistake", "family"), MISTAKES)
def test_a_planted_mistake_in_pages_or_states_makes_logits_wrong(mistake, family):
    with mistake():
        measures = run(family, num_requests=12).measures
    assert measures["verify/wrong_count"] > 0
    assert measures["verify/logit_error_max"] > 0.5


@pytest.mark.soak
def test_logits_of_an_hf_model_are_equal_with_pages_moved_by_kernels():
    result = run("falcon_h1", "executor.kernels=triton", "executor.call=page")
    assert result.measures["verify/unequal_count"] == result.measures["verify/untested_count"] == 0


def test_an_hf_model_reads_its_weights_from_a_local_directory(tmp_path):
    def model_of(folder):
        shape = config("gemma3", f"model.from_hf={folder}").model
        return hf_model.HfModel(shape, page_size=PAGE, seed=3, device="cpu", is_cut=True)

    drawn = model_of(FOLDER / "gemma3")
    drawn._model.save_pretrained(tmp_path)
    read = model_of(tmp_path)
    pairs = zip(drawn._model.parameters(), read._model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert drawn.origin != read.origin  # pages of other weights are never taken
    measures = run("gemma3", f"model.from_hf={tmp_path}", num_requests=12).measures
    assert (measures["verify/checked_count"], measures["verify/wrong_count"]) == (12, 0)
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    safetensors.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"weights are missing: .*model\.norm\.weight"):
        model_of(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tp=2"], "executor.model=hf needs parallel.tp=1 and pp=1, got 2 ranks"),
        (["model.kv_dtype_bytes=1"], "kv_dtype_bytes of 2 or 4, got 1 in gemma3"),
        (["model.head_dim=16"], r"layer 0, .* caches \(128, 20, 0\) .* stands for \(256, 20, 0\)"),
        (["model.window_len=32"], r"caches \(128, 20, 0\) .* stands for \(128, 32, 0\)"),
    ],
)
def test_a_config_that_contradicts_the_hf_model_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        run("gemma3", *overrides, num_requests=1)


def test_the_error_names_a_missing_config_or_package(monkeypatch):
    with pytest.raises(ValueError, match=r"executor.model=hf needs model.from_hf"):
        experiment.run(config_of(*BASE, "model=tiny_hybrid", "workload.limit=1"))
    monkeypatch.delitem(sys.modules, hf_model.__name__)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'hicache\[hf\]'"):
        run("llama", num_requests=1)
