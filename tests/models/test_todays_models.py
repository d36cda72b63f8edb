"""Shapes of the models of late 2026, from the files that they are published with, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from hicache.models import LayerKind, ModelConfig
from hicache.models.hugging_face import derive_model

ENTRIES = json.loads(Path(__file__).with_name("model_configs.json").read_text(encoding="utf-8"))

OTHER = {"num_attention_heads": 24, "num_attention_groups": 4, "head_dim": 64}
STEP: dict[str, Any] = {  # Step-3.5's fields
    "model_type": "step3p5",
    "layer_types": ["full_attention", "sliding_attention"] * 19,  # two more that draft
    "num_key_value_heads": ...,
    "num_attention_groups": 8,
    "attention_other_setting": OTHER,
    "sliding_window": 512,
    "moe_num_experts": 16,
    "moe_top_k": 2,
    "moe_layers_enum": "3,4,5",
    "moe_intermediate_size": 64,
    "share_expert_dim": 64,
}


def derived(name: str, **changes: Any) -> ModelConfig:
    """The shape of a published file, with some entries changed; `...` takes one out."""
    config = {**ENTRIES[name]["config"], **changes}
    told = {key: value for key, value in config.items() if value is not ...}
    return derive_model(told, {"name": name})


# what the files add up to; the classes of transformers 5.23 for DeepSeek-V4, GLM, Gemma and Qwen3.5
# have as many on the meta device, within 0.1 %
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v4-flash", 284.3),
        ("deepseek-v4-pro", 1572.9),
        ("kimi-k3", 2779.5),
        ("minimax-m3", 425.9),
        ("glm-5.3", 743.4),
        ("gemma-4-e2b", 4.6),
        ("gemma-4-e4b", 7.5),
        ("qwen3.5-9b", 9.0),
        ("mimo-v2.5-pro", 1021.2),
        ("cohere-command-a-plus-05-2026", 218.3),
    ],
)
def test_the_parameters_are_those_of_the_classes(name: str, billions: float) -> None:
    assert round(derived(name).num_params / 1e9, 1) == billions


def test_layers_choose_tokens_or_reuse_a_choice_or_see_all() -> None:
    glm, minimax = derived("glm-5.3"), derived("minimax-m3")
    assert glm.layer_words[2:8] == ("FtI", "Ft", "Ft", "Ft", "FtI", "Ft")
    assert minimax.layer_words[2:5] == ("F", "FtI", "FtI")
    assert (glm.top_tokens, minimax.top_tokens) == (2048, 16 * 128)
    assert [part.query_heads for part in (*glm.parts, *minimax.parts)] == [32, 4]


def test_compressed_layers_have_the_ratio_that_the_file_says() -> None:
    flash = derived("deepseek-v4-flash")
    assert flash.layer_words[:5] == ("S", "S", "SC", "SH", "SC")
    named = {0: "sliding_attention", 4: "compressed_sparse_attention"}
    named[128] = "heavily_compressed_attention"
    ratios = ENTRIES["deepseek-v4-flash"]["config"]["compress_ratios"][:43]
    types = [named[ratio] for ratio in ratios]
    assert derived("deepseek-v4-flash", compress_ratios=..., layer_types=types) == flash
    assert flash.parts[0].top == 512


def test_the_state_layers_of_kimi_are_those_that_are_not_listed_as_full() -> None:
    shape = derived("kimi-k3")
    assert (shape.num_full_layers, shape.num_mamba_layers) == (24, 69)
    assert shape.layer_words[3] == shape.layer_words[-1] == "F"
    assert shape.recurrent_heads == shape.recurrent_key_heads == 96


def test_layers_that_read_the_kv_of_others_keep_none() -> None:
    shape = derived("gemma-4-e2b")
    assert "".join(shape.layer_words) == "SSSSF" * 3 + "ssssf" * 4
    assert shape.full_token_bytes == 3 * 2 * 512 * 2


def test_windows_of_a_step_model_have_heads_of_their_own() -> None:
    shape = derived("qwen3-8b", **STEP)
    assert (shape.num_full_layers, shape.num_swa_layers) == (18, 18)
    assert (shape.swa_num_query_heads, shape.swa_num_kv_heads) == (24, 4)
    assert shape.page_bytes(LayerKind.swa, 1) == 18 * 2 * 4 * 64 * 2
    assert (shape.num_moe_layers, shape.num_experts) == (3, 16)


def test_full_layers_of_gemma_4_have_other_kv_heads_only_if_keys_are_values() -> None:
    shape = derived("gemma-4-31b")
    assert shape.page_bytes(LayerKind.full, 1) == 10 * 2 * 4 * 512 * 2
    shape = derived("gemma-4-31b", attention_k_eq_v=False)
    assert shape.page_bytes(LayerKind.full, 1) == 10 * 2 * 16 * 512 * 2


def test_any_number_of_heads_in_windows_alone_is_read() -> None:
    shape = derived("mimo-v2.5", swa_num_key_value_heads=..., swa_num_attention_heads=32)
    assert shape.swa_num_query_heads == 32
    assert shape.page_bytes(LayerKind.swa, 1) == shape.num_swa_layers * 4 * (192 + 128) * 2


@pytest.mark.parametrize(("name", "changes"), [("gemma-4-31b", {}), ("qwen3-8b", STEP)])
def test_windows_of_the_whole_context_with_heads_of_their_own_are_refused(
    name: str, changes: dict[str, Any]
) -> None:
    changes = changes | {"sliding_window": 4096, "max_position_embeddings": 4096}
    with pytest.raises(ValueError, match="sliding_window must be less than max_position_embedd"):
        derived(name, **changes)
    count = len(derived(name, **changes | {"sliding_window": 512}).layer_words)
    all_full = ["full_attention"] * count
    assert derived(name, **changes | {"layer_types": all_full}).num_full_layers == count


def test_a_model_without_words_for_its_windows_is_refused() -> None:
    with pytest.raises(ValueError, match="layer_types is missing"):
        derived("qwen3-8b", model_type="exaone4", sliding_window=4096, use_sliding_window=True)
    assert derived("qwen3-8b", model_type="exaone4").num_full_layers == 36


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "qwen3-8b",
            STEP | {"attention_other_setting": OTHER | {"attention_type": "full_attention"}},
            "attention_other_setting: attention_type must be sliding_attention",
        ),
        ("deepseek-v4-flash", {"compress_ratios": [4] * 42}, "must be a list of 43 or more"),
        ("deepseek-v4-flash", {"compress_ratios": [3] * 43}, "of 0, 4, 128, got"),
        ("kimi-k3", {"linear_attn_config": {"head_dim": 128}}, "full_attn_layers must be a list"),
        ("kimi-k3", {"linear_attn_config": 3}, "linear_attn_config must be an object"),
        ("glm-5.3", {"index_topk": 0}, "index_topk must be an integer between 1"),
        ("qwen3-8b", {"model_type": "hymba"}, "Hymba-1.5B; describe any other model in a file"),
        ("qwen3-8b", {"model_type": "phi4flash"}, "model=phi4_mini_flash"),
    ],
)
def test_what_cannot_be_is_refused(name: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        derived(name, **changes)


def test_a_derived_share_never_rounds_to_nothing() -> None:
    # the sizes of LFM2-8B-A1B, whose states are tiny beside its KV
    layers = [
        "conv",
        "conv",
        *["full_attention", "conv", "conv", "conv"] * 5,
        "full_attention",
        "conv",
    ]
    told = {
        "model_type": "lfm2_moe", "hidden_size": 2048, "num_hidden_layers": len(layers),
        "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3,
        "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
        "num_experts_per_tok": 4, "num_dense_layers": 2, "vocab_size": 65536,
        "max_position_embeddings": 128000, "torch_dtype": "bfloat16", "layer_types": layers,
    }  # fmt: skip
    model = derive_model(told, {"name": "lfm"})
    assert 0 < model.mamba_host_share < 0.005
    assert 0 < model.mamba_device_share < 0.02
