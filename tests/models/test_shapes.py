"""Shapes of models: closed forms, published sizes, and refusals."""

from dataclasses import replace
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
    """Let values be merged into the schema of a frozen dataclass."""
    OmegaConf.set_readonly(node, value=False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            thaw(child)
    return node


@cache
def load(cls: type, group: str, name: str) -> Any:
    node = OmegaConf.load(CONF / group / f"{name}.yaml")
    assert isinstance(node, DictConfig)
    assert list(node.pop("defaults")) == ["schema", "_self_"]
    return OmegaConf.to_object(OmegaConf.merge(thaw(OmegaConf.structured(cls)), node))


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
def test_a_model_file_is_named_after_its_model(name: str) -> None:
    assert model(name).name == name


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_begins_with_its_regime(name: str) -> None:
    first = (CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")


# model cards; in billions, as they round it
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3_8b", 8.03),
        ("llama3_70b", 70.6),
        ("gpt_oss_120b", 116.8),
        ("gemma3_27b", 27.0),
        ("qwen3_next_80b", 80.0),
        ("kimi_linear_48b", 49.0),
        ("nemotron3_super", 120.6),
        ("hymba_1b5", 1.52),
        ("phi4_mini_flash", 3.85),
    ],
)
def test_the_parameters_add_up_to_the_published_size(name: str, billions: float) -> None:
    assert model(name).num_params == pytest.approx(billions * 1e9, rel=0.01)


# reference figures computed from the same configs by others: bytes a token, MiB of a window, of a
# state
@pytest.mark.parametrize(
    ("name", "token_bytes", "window_mib", "state_mib"),
    [
        ("llama3_8b", 131_072, 0, 0),
        ("llama3_70b", 327_680, 0, 0),
        ("gpt_oss_120b", 36_864, 4.5, 0),
        ("gemma3_27b", 81_920, 416, 0),
        ("qwen3_next_80b", 24_576, 0, 73.7),
        ("kimi_linear_48b", 8_064, 0, 41.4),
        ("nemotron3_super", 8_192, 0, 162.3),
    ],
)
def test_the_bytes_of_a_token_a_window_and_a_state(
    name: str, token_bytes: int, window_mib: float, state_mib: float
) -> None:
    shape = model(name)
    assert shape.full_token_bytes == token_bytes
    assert shape.swa_token_bytes * shape.window_len / MIB == window_mib
    assert shape.mamba_slot_bytes / MIB == pytest.approx(state_mib, abs=0.05)


@pytest.mark.parametrize("name", ["hymba_1b5", "phi4_mini_flash", "tiny_hybrid"])
def test_three_models_have_all_components(name: str) -> None:
    assert model(name).kinds == tuple(LayerKind)


@pytest.mark.parametrize("name", MODELS)
def test_a_component_has_a_share_of_both_tiers_if_and_only_if_it_is_there(name: str) -> None:
    shape = model(name)
    for kind in (LayerKind.swa, LayerKind.mamba):
        for tier in ("device", "host"):
            share = getattr(shape, f"{kind.value}_{tier}_share")
            assert (share > 0) == (kind in shape.kinds)


def test_the_pattern_is_repeated_over_the_layers() -> None:
    full, swa, mamba = LayerKind.full, LayerKind.swa, LayerKind.mamba
    assert hybrid().layer_kinds == ((full,), (swa,), (swa, mamba), (mamba,), ()) * 2


def test_without_a_pattern_layers_stand_by_kind() -> None:
    shape = ModelConfig(num_full_layers=1, num_swa_layers=2, num_mamba_layers=1, window_len=8)
    assert shape.layer_words == ("F", "S", "S", "M")


def test_a_layer_that_reads_the_kv_of_another_keeps_none() -> None:
    assert hybrid().swa_token_bytes == 2 * (2 * 4 * 32 * 2)


def test_a_state_is_taps_in_bf16_and_a_matrix_in_fp32() -> None:
    inner, state = 4 * 16, 8
    mamba = (inner + 2 * 1 * state) * 3 * 2 + inner * state * 4
    delta = (inner + 2 * 2 * state) * 3 * 2 + inner * state * 4
    assert hybrid().mamba_slot_bytes == 2 * mamba + 2 * delta


def test_a_latent_takes_the_place_of_keys_and_values() -> None:
    assert hybrid(latent_dim=40).full_token_bytes == 2 * 40 * 2


def test_an_fp8_cache_takes_half() -> None:
    assert hybrid(kv_dtype_bytes=1).full_token_bytes * 2 == hybrid().full_token_bytes


def test_a_page_of_mamba_is_a_slot() -> None:
    shape = hybrid()
    sizes = [shape.page_bytes(kind, 16) for kind in LayerKind]
    assert sizes == [
        16 * shape.full_token_bytes,
        16 * shape.swa_token_bytes,
        shape.mamba_slot_bytes,
    ]


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (4, 1), (8, 2), (16, 4)])
def test_more_devices_than_kv_heads_hold_copies(tp: int, copies: int) -> None:
    assert hybrid().kv_copies(LayerKind.full, tp) == copies


def test_every_device_holds_the_latent() -> None:
    assert hybrid(latent_dim=40).kv_copies(LayerKind.full, 8) == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_len": 0}, "window_len must be positive"),
        ({"num_full_layers": 3}, "num_full_layers is 3, but pattern over 10 layers has 2"),
        ({"pattern": "F X"}, "pattern may contain"),
        ({"swa_host_share": 0.6, "mamba_host_share": 0.4}, "the host shares"),
        ({"default_tp": 3}, "default_tp must be a power of two, got 3"),
        ({"num_moe_layers": 1, "num_experts": 4}, "experts_per_token must lie between"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid(**fields)


def test_a_window_without_sliding_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="window_len must be positive"):
        replace(ModelConfig(), window_len=8)


@pytest.mark.parametrize(
    ("size", "rate", "status", "message"),
    [
        ([1, 2], [1], "measured", "one rate for each size"),
        ([2, 2], [1, 1], "measured", "must increase"),
        ([1], [0], "measured", "must be positive"),
        ([1], [1], "guessed", "measured or modelled, got 'guessed'"),
    ],
)
def test_a_rate_table_that_makes_no_sense_is_refused(
    size: list[float], rate: list[float], status: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RateTable(size=size, rate=rate, status=status)


def test_the_table_of_models_says_what_their_files_do() -> None:
    page = (CONF.parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines()]
    told = {row[0]: row[1:] for row in rows if row and row[0] in MODELS}
    for name in set(MODELS) - {"tiny_hybrid"}:
        shape = model(name)
        held = bytes_of(shape, shape.max_len - 1)  # at a multiple, a chunk is empty
        in_window = ("swa", *(part.name for part in shape.parts if part.rides_on == "swa"))
        window = sum(held.get(each, 0) for each in in_window) / MIB
        sizes = [f"{size:,.1f}" if size else "" for size in (window, shape.mamba_slot_bytes / MIB)]
        assert told[name][1:] == [f"{shape.full_token_bytes:,}", *sizes, str(shape.default_tp)]
        kinds = [kind.value for kind in shape.kinds] + [part.name for part in shape.parts]
        assert told[name][0] == ", ".join(kinds)
