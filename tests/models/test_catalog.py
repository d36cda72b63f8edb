"""Bytes of a sequence by model, from the config.json that each is published with.

`catalog.json` has the bytes that kvcache-simulator 0.1.3 gives at 128, 1,024 and 131,072 tokens,
and a fourth number: at 131,072 tokens without recurrent states. KV and index keys are bf16.
Recurrent states have the precision of the config.json. `experiments/studies/catalog.py` at
09ab7c4b asks the package for these numbers.
"""

import json
from pathlib import Path

import pytest

from hicache.models import LayerKind, ModelConfig
from hicache.models.hugging_face import derive_model

FOLDER = Path(__file__).parent
ENTRIES = json.loads((FOLDER / "model_configs.json").read_text(encoding="utf-8"))
CATALOG = json.loads((FOLDER / "catalog.json").read_text())
PLAIN = {"kv_dtype_bytes": 2, "dense_param_bytes": 2.0, "expert_param_bytes": 2.0}


def model_of(name: str) -> ModelConfig:
    return derive_model(ENTRIES[name]["config"], {"name": name, **PLAIN})


def bytes_of(model: ModelConfig, num_tokens: int) -> dict[str, float]:
    """Return the bytes cached for a sequence of `num_tokens`, by layer kind and by model part."""
    lens = {part.name: part.window_len for part in model.parts if part.window_len}

    def held(place: str) -> int:
        window_len = lens.get(place, model.window_len if place == "swa" else 0)
        if place == "swa" and model.window_restarts:
            return num_tokens % window_len
        return min(num_tokens, window_len or num_tokens)

    found: dict[str, float] = {
        kind.value: model.page_bytes(kind, held(kind.value)) for kind in model.kinds
    }
    for part in model.parts:
        place = part.name if part.window_len else part.rides_on
        count = 1 if place == LayerKind.mamba.value else held(place) // part.tokens
        found[part.name] = model.part_layers(part) * count * part.entry_bytes
    return found


@pytest.mark.parametrize("name", CATALOG)
def test_a_sequence_takes_the_bytes_of_the_catalog(name):
    model = model_of(name)
    held = [bytes_of(model, length) for length in (128, 1024, 131_072)]
    # the catalog leaves out the state of a compressor
    totals = [sum(each.values()) - each.get("compressor", 0) for each in held]
    assert [*totals, totals[-1] - held[-1].get("mamba", 0)] == CATALOG[name]


def test_the_state_of_a_kv_compressor_counts_as_cached_bytes():
    held = bytes_of(model_of("deepseek-v4-flash"), 1024)
    assert held["compressor"] == 21 * 4 * 2 * (512 + 128) * 4  # 21 layers, fp32
    assert held["c4"] == 21 * 1024 // 4 * 512 * 2
    assert held["c128"] == 20 * 1024 // 128 * 512 * 2


def test_every_model_of_the_catalog_names_its_source():
    assert len(CATALOG) == 57
    assert CATALOG.keys() == ENTRIES.keys()
    assert all(entry["source"] for entry in ENTRIES.values())
