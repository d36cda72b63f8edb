"""Shapes of models: closed forms, published sizes, and refusals."""

from functools import cache
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hicache.models import LayerKind, ModelConfig, RateTable
from hicache.runs.schema import CONF
from tests.models.test_catalog import bytes_of

MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "from_hf")
MIB = 1 << 20


def thaw(node: DictConfig) -> DictConfig:
    """Make a schema of frozen dataclasses writable, so that values can be merged; return it."""
    OmegaConf.set_readonly(node, value=False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            thaw(child)
    return node


@cache
def load(cls: type, group: str, name: str) -> Any:
    schema, nodes = thaw(OmegaConf.structured(cls)), []
    while name != "schema":  # a file may build on another one
        nodes.append(OmegaConf.load(CONF / group / f"{name}.yaml"))
        name, last = nodes[-1].pop("defaults", ("schema", "_self_"))
        assert last == "_self_"
    return OmegaConf.to_object(OmegaConf.merge(schema, *reversed(nodes)))


def model(name: str) -> ModelConfig:
    loaded = load(ModelConfig, "model", name)
    assert isinstance(loaded, ModelConfig)
    return loaded


def hybrid(**fields: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "name": "hybrid",
        "pattern": "F S sM D -",
        "num_layers": 10,
        "num_full_layers": 2,
        "num_swa_layers": 4,
        "num_mamba_layers": 4,
        "window_len": 64,
        "num_query_heads": 8,
        "head_dim": 32,
        "num_kv_heads": 4,
        "recurrent_heads": 4,
        "recurrent_head_dim": 16,
        "recurrent_state_dim": 8,
        "recurrent_groups": 1,
        "recurrent_key_heads": 2,
    }
    return ModelConfig(**(shape | fields))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_has_its_name_a_comment_and_a_memory_share_of_each_layer_kind(name):
    shape = model(name)
    assert shape.name == name
    first = (CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    for kind in (LayerKind.swa, LayerKind.mamba):
        for tier in ("device", "host"):
            share = getattr(shape, f"{kind.value}_{tier}_share")
            assert (share > 0) == (kind in shape.kinds)


# parameters in billions of the model cards; bytes of a token, MiB of a window and of a state that
# others computed. test_hugging_face.py compares most other models with their config.json
@pytest.mark.parametrize(
    ("name", "billions", "token_bytes", "window_mib", "state_mib"),
    [
        ("gemma3_27b", 27.0, 81_920, 416, 0),
        ("qwen3_next_80b", 80.0, 24_576, 0, 73.7),
        ("kimi_linear_48b", 49.0, 8_064, 0, 41.4),
        ("hymba_1b5", 1.52, None, None, None),
        ("phi4_mini_flash", 3.85, None, None, None),
    ],
)
def test_parameters_and_bytes_are_those_published(
    name, billions, token_bytes, window_mib, state_mib
):
    shape = model(name)
    assert shape.num_params == pytest.approx(billions * 1e9, rel=0.01)
    if token_bytes is not None:
        assert shape.full_token_bytes == token_bytes
        assert shape.swa_token_bytes * shape.window_len / MIB == window_mib
        assert shape.mamba_slot_bytes / MIB == pytest.approx(state_mib, abs=0.05)


def test_the_pattern_is_repeated_over_the_layers():
    full, swa, mamba = LayerKind.full, LayerKind.swa, LayerKind.mamba
    assert hybrid().layer_kinds == ((full,), (swa,), (swa, mamba), (mamba,), ()) * 2


def test_without_a_pattern_layers_are_ordered_by_kind():
    shape = ModelConfig(num_full_layers=1, num_swa_layers=2, num_mamba_layers=1, window_len=8)
    assert shape.layer_words == ("F", "S", "S", "M")


def test_pages_and_slots_have_the_bytes_of_their_layers():
    shape, inner, state = hybrid(), 4 * 16, 8
    mamba = (inner + 2 * 1 * state) * 3 * 2 + inner * state * 4  # taps in bf16, a matrix in fp32
    delta = (inner + 2 * 2 * state) * 3 * 2 + inner * state * 4
    assert shape.mamba_slot_bytes == 2 * mamba + 2 * delta
    # of four layers with a window, two read the KV of another
    assert shape.swa_token_bytes == 2 * (2 * 4 * 32 * 2)
    assert hybrid(latent_dim=40).full_token_bytes == 2 * 40 * 2
    assert hybrid(kv_dtype_bytes=1).full_token_bytes * 2 == shape.full_token_bytes
    assert [shape.page_bytes(kind, 16) for kind in LayerKind] == [
        16 * shape.full_token_bytes,
        16 * shape.swa_token_bytes,
        shape.mamba_slot_bytes,
    ]


@pytest.mark.parametrize(
    ("tp", "latent_dim", "copies"), [(1, 0, 1), (4, 0, 1), (8, 0, 2), (16, 0, 4), (8, 40, 8)]
)
def test_more_devices_than_kv_heads_hold_copies_of_kv(tp, latent_dim, copies):
    assert hybrid(latent_dim=latent_dim).kv_copies(LayerKind.full, tp) == copies


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_len": 0}, "window_len must be positive"),
        ({"num_full_layers": 3}, "num_full_layers is 3, but pattern over 10 layers has 2"),
        ({"pattern": "F X"}, "pattern may contain"),
        ({"swa_host_share": 0.6, "mamba_host_share": 0.4}, "the host shares"),
        ({"default_tp": 3}, "default_tp must be a power of two, got 3"),
        ({"num_moe_layers": 1, "num_experts": 4}, "experts_per_token must lie between"),
        ({"pattern": "F", "num_swa_layers": 0, "num_layers": 2}, "window_len must be positive"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        hybrid(**fields)


@pytest.mark.parametrize(
    ("size", "rate", "status", "message"),
    [
        ([1, 2], [1], "measured", "one rate for each size"),
        ([2, 2], [1, 1], "measured", "must increase"),
        ([1], [0], "measured", "must be positive"),
        ([1], [1], "guessed", "measured or modelled, got 'guessed'"),
    ],
)
def test_an_invalid_rate_table_is_refused(size, rate, status, message):
    with pytest.raises(ValueError, match=message):
        RateTable(size=size, rate=rate, status=status)


def test_the_table_of_models_in_the_docs_agrees_with_their_files():
    page = (CONF.parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines()]
    cells = {row[0]: row[1:] for row in rows if row and row[0] in MODELS}
    for name in set(MODELS) - {"tiny_hybrid"}:
        shape = model(name)
        held = bytes_of(shape, shape.max_len - 1)  # at a multiple, a chunk is empty
        in_window = ("swa", *(part.name for part in shape.parts if part.rides_on == "swa"))
        window = sum(held.get(each, 0) for each in in_window) / MIB
        sizes = [f"{size:,.1f}" if size else "" for size in (window, shape.mamba_slot_bytes / MIB)]
        assert cells[name][1:] == [f"{shape.full_token_bytes:,}", *sizes, str(shape.default_tp)]
        kinds = [kind.value for kind in shape.kinds] + [part.name for part in shape.parts]
        assert cells[name][0] == ", ".join(kinds)
