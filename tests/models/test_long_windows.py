"""Fields that a config.json has and that say less, or more, than their names."""

from typing import Any

import pytest

from hicache.models.hugging_face import derive_model
from hicache.models.shapes import ModelConfig

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def derived(**more: Any) -> ModelConfig:
    return derive_model({"model_type": "llama", **SIZES, **more}, {})


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "mixtral", "sliding_window": 32768},
        {"model_type": "phi3", "sliding_window": 262144},
        {"model_type": "mistral", "sliding_window": 32769},
        {"model_type": "qwen2", "sliding_window": 4096},  # off by default
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32, "sliding_window": 4096},
        {
            "model_type": "qwen2",
            "sliding_window": 4096,
            "use_sliding_window": True,
            "max_window_layers": 32,
        },
    ],
    ids=str,
)
def test_a_window_of_no_layer_or_of_the_whole_context_is_full_attention(
    more: dict[str, Any],
) -> None:
    model = derived(**more)
    assert (model.num_full_layers, model.num_swa_layers) == (32, 0)
    assert model.full_token_bytes == TOKEN_BYTES


def test_the_last_layers_have_the_window_from_max_window_layers_on() -> None:
    said = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}
    model = derived(model_type="qwen2", **said)
    assert (model.num_full_layers, model.num_swa_layers) == (28, 4)
    assert model.layer_words[27:29] == ("F", "S")


def test_a_short_window_of_every_layer_is_still_refused() -> None:
    with pytest.raises(ValueError, match="models with windows alone are not supported"):
        derived(model_type="mistral", sliding_window=4096)


def quantised(**fields: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", **fields}}


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_cache_quant_algo": "FP8"},
        {"kv_cache_quant_algo": "fp8"},
        {"kv_cache_quant_algo": "INT8"},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"kv_cache_scheme": "FP8"},
        {"kv_cache_dtype": "fp8_e4m3"},
    ],
    ids=str,
)
def test_an_element_of_kv_in_8_bits_takes_one_byte(fields: dict[str, Any]) -> None:
    assert derived(**quantised(**fields)).full_token_bytes == TOKEN_BYTES / 2


@pytest.mark.parametrize("word", ["auto", "BF16", "", None])
def test_kv_in_the_models_own_precision_takes_its_bytes(word: str | None) -> None:
    found = derived(**quantised(kv_cache_quant_algo=word))
    assert found.full_token_bytes == TOKEN_BYTES


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kv_cache_quant_algo", "NVFP4"),
        ("kv_cache_quant_algo", "INT4"),
        ("kv_cache_scheme", {"num_bits": 4}),
        ("kv_cache_quant_config", {"*k_proj": {}}),
    ],
)
def test_another_precision_of_kv_is_refused_by_its_field(name: str, said: object) -> None:
    with pytest.raises(
        ValueError, match=rf"quantization_config\.{name} may be FP8.*kv_dtype_bytes"
    ):
        derived(**quantised(**{name: said}))
    text = {"model_type": "llama", **SIZES, **quantised(**{name: said})}
    assert derive_model(text, {"kv_dtype_bytes": 1}).full_token_bytes == TOKEN_BYTES / 2


@pytest.mark.parametrize("outer", ["minimax_m3_vl", "llava", "qwen3_vl"])
def test_the_outer_type_decides_where_the_text_model_has_none(outer: str) -> None:
    model = derive_model({"model_type": outer, "text_config": SIZES}, {})
    assert model.full_token_bytes == TOKEN_BYTES


def test_an_unknown_type_is_named_with_the_types_near_it() -> None:
    with pytest.raises(ValueError, match=r"known types, got 'llama9' \(near: llama") as caught:
        derived(model_type="llama9")
    assert len(str(caught.value)) < 250
