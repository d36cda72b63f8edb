"""Shapes derived from a config.json: equal to what the models' cards say, and refusals."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hicache.engine.deployment import deploy
from hicache.models.cost import CostModel
from hicache.models.hugging_face import derive_model, read_model
from hicache.models.shapes import ModelConfig, describe
from hicache.runs.schema import config_of
from tests.models.test_catalog import ENTRIES, bytes_of
from tests.models.test_cost import h200
from tests.models.test_shapes import model
from tests.models.texts import TEXTS

MIB = 1 << 20
QWEN, QWEN_EXPERTS, GPT_OSS = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"
SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
NEMOTRON = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
LLAMA: dict[str, Any] = {  # the sizes of a model whose layers all have 8 KV heads of 128 elements
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
LLAMA_BYTES = 2 * 32 * 8 * 128 * 2  # of a token
OTHER_HEADS = {"num_attention_heads": 24, "num_attention_groups": 4, "head_dim": 64}
STEP: dict[str, Any] = {  # Step-3.5's fields
    "model_type": "step3p5",
    "layer_types": ["full_attention", "sliding_attention"] * 19,  # two more that draft
    "num_key_value_heads": ...,
    "num_attention_groups": 8,
    "attention_other_setting": OTHER_HEADS,
    "sliding_window": 512,
    "moe_num_experts": 16,
    "moe_top_k": 2,
    "moe_layers_enum": "3,4,5",
    "moe_intermediate_size": 64,
    "share_expert_dim": 64,
}


def derived(name: str, **changes: Any) -> ModelConfig:
    """Return the shape of a published config.json with `changes`; a value `...` removes a field."""
    known = LLAMA if name == "llama" else TEXTS.get(name) or ENTRIES[name]["config"]
    text: dict[str, Any] = json.loads(json.dumps(known))
    inner = text.get("text_config", text)
    for key, value in changes.items():
        inner[key] = value
        if value is ...:
            del inner[key]
    return derive_model(text, {"name": name})


# parameters in billions and layers by kind as cards and reports give them; bytes as others computed
# them from the same texts. The cards of M2.5 (230 B) and V3.2 (685 B with its layer that predicts a
# further token) are coarser or count more; 228.7 and 671.9 are what their files add up to. V3.2
# and GLM-5 keep index keys beside their latent: 128 elements a token and layer, counted here in
# bf16 as the latent is (SGLang keeps them in 132 bytes: 78,324 and 100,152)
CARDS = [
    ("meta-llama/Meta-Llama-3.1-8B", "8.03", (32, 0, 0), 131_072, 0, 0),
    ("meta-llama/Meta-Llama-3.1-70B", "70.6", (80, 0, 0), 327_680, 0, 0),
    ("mistralai/Mixtral-8x7B-v0.1", "46.7", (32, 0, 0), 131_072, 0, 0),
    (QWEN, "8.2", (36, 0, 0), 147_456, 0, 0),
    ("Qwen/Qwen3-32B", "32.8", (64, 0, 0), 262_144, 0, 0),
    (QWEN_EXPERTS, "30.5", (48, 0, 0), 98_304, 0, 0),
    ("Qwen/Qwen3-235B-A22B", "235", (94, 0, 0), 192_512, 0, 0),
    ("Qwen/Qwen3.5-35B-A3B", "35", (10, 0, 30), 20_480, 0, 61.4),
    ("Qwen/Qwen3.5-27B", "27", (16, 0, 48), 65_536, 0, 146.8),
    (GPT_OSS, "20.9", (12, 12, 0), 24_576, 3, 0),
    ("openai/gpt-oss-120b", "116.8", (18, 18, 0), 36_864, 4.5, 0),
    ("google/gemma-4-26B-A4B", "25.2", (5, 25, 0), 20_480, 200, 0),
    ("deepseek-ai/DeepSeek-V3", "671", (61, 0, 0), 70_272, 0, 0),
    ("deepseek-ai/DeepSeek-V3.2", "671.9", (61, 0, 0), 61 * (576 + 128) * 2, 0, 0),
    ("zai-org/GLM-5", "744", (78, 0, 0), 78 * (576 + 128) * 2, 0, 0),
    ("MiniMaxAI/MiniMax-M2.5", "228.7", (62, 0, 0), 253_952, 0, 0),
    (SCOUT, "107.8", (12, 36, 0), 49_152, 1152, 0),
    # values have 128 elements, keys 192
    ("XiaomiMiMo/MiMo-V2-Flash", "309", (9, 39, 0), 23_040, 24.375, 0),
    (NEMOTRON, "31.6", (6, 0, 23), 6_144, 0, 46.8),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "120.7", (8, 0, 40), 8_192, 0, 162.3),
    ("nvidia/Nemotron-H-56B-Base-8K", "56.3", (10, 0, 54), 40_960, 0, 870.3),
]


@pytest.mark.parametrize(
    ("name", "billions", "layers", "token_bytes", "window_mib", "state_mib"), CARDS
)
def test_parameters_layers_and_bytes_are_those_of_the_card(
    name, billions, layers, token_bytes, window_mib, state_mib
):
    shape = derived(name)
    assert f"{shape.num_params / 1e9:.{len(billions.partition('.')[2])}f}" == billions
    assert (shape.num_full_layers, shape.num_swa_layers, shape.num_mamba_layers) == layers
    assert shape.full_token_bytes == token_bytes
    assert shape.swa_token_bytes * shape.window_len / MIB == window_mib
    assert shape.mamba_slot_bytes / MIB == pytest.approx(state_mib, abs=0.05)


def test_the_table_of_model_cards_has_every_config_text():
    assert {card[0] for card in CARDS} == TEXTS.keys()


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
def test_parameter_counts_are_those_of_the_classes_of_transformers(name, billions):
    assert round(derived(name).num_params / 1e9, 1) == billions


# model files of this project and the texts that they were written from
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_8b", "meta-llama/Meta-Llama-3.1-8B"),
        ("llama3_70b", "meta-llama/Meta-Llama-3.1-70B"),
        ("llama4_scout", SCOUT),
        ("qwen3_8b", QWEN),
        ("qwen3_32b", "Qwen/Qwen3-32B"),
        ("qwen3_235b_a22b", "Qwen/Qwen3-235B-A22B"),
        ("qwen3_6_35b_a3b", "Qwen/Qwen3.5-35B-A3B"),
        ("qwen3_5_27b", "Qwen/Qwen3.5-27B"),
        ("gpt_oss_20b", GPT_OSS),
        ("gpt_oss_120b", "openai/gpt-oss-120b"),
        ("deepseek_v3", "deepseek-ai/DeepSeek-V3"),
        ("nemotron3_nano", NEMOTRON),
        ("nemotron3_super", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8"),
    ],
)
def test_a_model_file_equals_the_shape_of_its_config_json(name, text):
    file = model(name)
    chosen = {"name": name, "source": file.source, "default_tp": file.default_tp}
    if name == "llama3_70b":
        chosen["dense_param_bytes"] = 1.0  # the file quantizes its weights
    assert replace(derived(text), **chosen) == file


def full_and_window(shape: ModelConfig) -> tuple[int, int]:
    return shape.num_full_layers, shape.num_swa_layers


def test_llama_4_caches_only_the_attention_chunk_of_the_last_token():
    shape = derived(SCOUT)
    assert shape.window_restarts
    held = [bytes_of(shape, num_tokens)["swa"] for num_tokens in (8191, 8192, 8193, 131_072)]
    assert held == [8191 * 147_456, 0, 147_456, 0]
    other = derived(SCOUT, no_rope_layers=[0, 1] * 24, interleave_moe_layer_step=2)
    assert (other.pattern, other.num_moe_layers) == ("F S", 24)
    assert derived(SCOUT, moe_layers=[3, 7]).num_moe_layers == 2


def test_layers_choose_their_tokens_reuse_a_choice_or_attend_to_all():
    glm, minimax = derived("glm-5.3"), derived("minimax-m3")
    assert glm.layer_words[2:8] == ("FtI", "Ft", "Ft", "Ft", "FtI", "Ft")
    assert minimax.layer_words[2:5] == ("F", "FtI", "FtI")
    assert (glm.top_tokens, minimax.top_tokens) == (2048, 16 * 128)
    assert [part.query_heads for part in (*glm.parts, *minimax.parts)] == [32, 4]


def test_compressed_layers_follow_the_ratios_or_types_of_config_json():
    flash = derived("deepseek-v4-flash")
    assert flash.layer_words[:5] == ("S", "S", "SC", "SH", "SC")
    named = {0: "sliding_attention", 4: "compressed_sparse_attention"}
    named[128] = "heavily_compressed_attention"
    ratios = ENTRIES["deepseek-v4-flash"]["config"]["compress_ratios"][:43]
    types = [named[ratio] for ratio in ratios]
    assert derived("deepseek-v4-flash", compress_ratios=..., layer_types=types) == flash
    assert flash.parts[0].top == 512


MIMO_HEADS = {"swa_num_key_value_heads": ..., "swa_num_attention_heads": 32}
STEP_SHAPE = {"num_full_layers": 18, "num_swa_layers": 18, "num_moe_layers": 3, "num_experts": 16}


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        # layers that are not listed as full have states
        ("kimi-k3", {}, {"num_full_layers": 24, "num_mamba_layers": 69}),
        ("kimi-k3", {}, {"recurrent_heads": 96, "recurrent_key_heads": 96}),
        # layers that read the KV of others keep none
        ("gemma-4-e2b", {}, {"layer_words": tuple("SSSSF" * 3 + "ssssf" * 4)}),
        ("gemma-4-e2b", {}, {"full_token_bytes": 3 * 2 * 512 * 2}),
        # full layers have other KV heads if keys are values
        ("gemma-4-31b", {}, {"full_token_bytes": 10 * 2 * 4 * 512 * 2}),
        ("gemma-4-31b", {"attention_k_eq_v": False}, {"full_token_bytes": 10 * 2 * 16 * 512 * 2}),
        # windows may have heads of their own
        ("qwen3-8b", STEP, STEP_SHAPE | {"swa_num_query_heads": 24, "swa_num_kv_heads": 4}),
        ("qwen3-8b", STEP, {"swa_token_bytes": 18 * 2 * 4 * 64 * 2}),
        ("mimo-v2.5", MIMO_HEADS, {"swa_num_query_heads": 32}),
        ("mimo-v2.5", MIMO_HEADS, {"swa_token_bytes": 39 * 4 * (192 + 128) * 2}),
    ],
)
def test_layers_and_heads_follow_from_the_fields_of_each_family(name, changes, wanted):
    shape = derived(name, **changes)
    assert {key: getattr(shape, key) for key in wanted} == wanted


@pytest.mark.parametrize(("name", "changes"), [("gemma-4-31b", {}), ("qwen3-8b", STEP)])
def test_windows_of_the_whole_context_with_heads_of_their_own_are_refused(name, changes):
    changes = changes | {"sliding_window": 4096, "max_position_embeddings": 4096}
    with pytest.raises(ValueError, match="sliding_window must be less than max_position_embedd"):
        derived(name, **changes)
    count = len(derived(name, **changes | {"sliding_window": 512}).layer_words)
    all_full = ["full_attention"] * count
    assert derived(name, **changes | {"layer_types": all_full}).num_full_layers == count


TURNED_ON = {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "exaone4"},
        {"model_type": "mixtral", "sliding_window": 32768},
        {"model_type": "phi3", "sliding_window": 262144},
        {"model_type": "mistral", "sliding_window": 32769},
        {"model_type": "qwen2", "sliding_window": 4096},  # off by default
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32, "sliding_window": 4096},
        TURNED_ON | {"max_window_layers": 32},
    ],
    ids=str,
)
def test_a_window_of_no_layer_or_of_the_whole_context_is_full_attention(changes):
    shape = derived("llama", **changes)
    assert full_and_window(shape) == (32, 0)
    assert shape.full_token_bytes == LLAMA_BYTES


def test_layers_have_a_window_from_max_window_layers_on():
    shape = derived("llama", **TURNED_ON, max_window_layers=28)
    assert full_and_window(shape) == (28, 4)
    assert shape.layer_words[27:29] == ("F", "S")


def quantized(**values: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", **values}}


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({"kv_cache_quant_algo": "FP8"}, 0.5),
        ({"kv_cache_quant_algo": "fp8"}, 0.5),
        ({"kv_cache_quant_algo": "INT8"}, 0.5),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 0.5),
        ({"kv_cache_scheme": "FP8"}, 0.5),
        ({"kv_cache_dtype": "fp8_e4m3"}, 0.5),
        *(({"kv_cache_quant_algo": word}, 1) for word in ("auto", "BF16", "", None)),
    ],
    ids=str,
)
def test_an_element_of_kv_takes_the_bytes_of_its_format(values, share):
    assert derived("llama", **quantized(**values)).full_token_bytes == LLAMA_BYTES * share


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_quant_algo", "NVFP4"),
        ("kv_cache_quant_algo", "INT4"),
        ("kv_cache_scheme", {"num_bits": 4}),
        ("kv_cache_quant_config", {"*k_proj": {}}),
    ],
)
def test_an_unknown_format_of_kv_is_refused_unless_its_bytes_are_given(name, value):
    text = LLAMA | quantized(**{name: value})
    with pytest.raises(
        ValueError, match=rf"quantization_config\.{name} may be FP8.*kv_dtype_bytes"
    ):
        derive_model(text, {})
    assert derive_model(text, {"kv_dtype_bytes": 1}).full_token_bytes == LLAMA_BYTES / 2


@pytest.mark.parametrize("outer", ["minimax_m3_vl", "llava", "qwen3_vl"])
def test_the_outer_model_type_is_used_if_the_text_config_has_none(outer):
    inner = {key: value for key, value in LLAMA.items() if key != "model_type"}
    shape = derive_model({"model_type": outer, "text_config": inner}, {})
    assert shape.full_token_bytes == LLAMA_BYTES


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (QWEN, {"num_key_value_heads": 7}, "a multiple of that of KV heads, got 32 and 7"),
        (QWEN, {"hidden_size": ...}, "hidden_size is missing"),
        (QWEN, {"hidden_size": 4096.5}, "hidden_size must be an integer .* got 4096.5"),
        (QWEN, {"vocab_size": -1}, "vocab_size must be an integer between 1 .* got -1"),
        (QWEN, {"num_attention_heads": 5000}, "at most hidden_size=4096, got 5000"),
        (QWEN, {"num_hidden_layers": 10**6}, "at most 1000, got 1000000"),
        (QWEN, {"intermediate_size": 10**7}, "dense_params must be .* got 4,42"),
        (QWEN, {"max_position_embeddings": "40k"}, "got '40k'"),
        (QWEN, {"model_type": "qwen9"}, "model_type must be one of .* got 'qwen9'"),
        (QWEN, {"torch_dtype": "float8_e4m3fn"}, "must be one of .* got 'float8_e4m3fn'"),
        (QWEN, {"quantization_config": {"quant_method": "bits"}}, "quantization method bits"),
        (QWEN, {"quantization_config": {"bits": 8}}, "method .no quant_method.: set"),
        (QWEN, {"quantization_config": {}}, "method .no quant_method.: set"),
        (QWEN, {"quantization_config": 7}, "quantization_config must be an object, got 7"),
        (QWEN, {"model_type": []}, r"model_type must be one of .*, got \[\]"),
        (QWEN, {"model_type": ...}, "model_type must be one of .*, got None"),
        (GPT_OSS, {"num_hidden_layers": 23}, "num_hidden_layers=23, got 24"),
        (GPT_OSS, {"sliding_window": ...}, "sliding_window is missing"),
        (GPT_OSS, {"num_experts_per_tok": 64}, r"num_experts \(32\), got 64"),
        (GPT_OSS, {"layer_types": ["looped_attention"] * 24}, "got 'looped_attention'"),
        (GPT_OSS, {"layer_types": ["sliding_attention"] * 24}, "full layers .* got 0"),
        (GPT_OSS, {"layer_types": [["full_attention"]] * 24}, r"got \['full_attention'\]"),
        ("Qwen/Qwen3.5-27B", {"linear_num_key_heads": 7}, "a multiple of .*=7, got 48"),
        ("Qwen/Qwen3.5-27B", {"mamba_ssm_dtype": "fp4"}, "mamba_ssm_dtype must be .* got 'fp4'"),
        ("google/gemma-4-26B-A4B", {"num_kv_shared_layers": 30}, "less than the 30 layers"),
        (NEMOTRON, {"hybrid_override_pattern": "M*-" * 10}, "num_hidden_layers=52, got 30"),
        (NEMOTRON, {"hybrid_override_pattern": ...}, "or layers_block_type is missing"),
        ("zai-org/GLM-5", {"index_topk_freq": 0}, "index_topk_freq"),
        ("zai-org/GLM-5", {"index_topk_pattern": "FS"}, "index_topk_pattern"),
        ("zai-org/GLM-5", {"indexer_types": ["half"] * 78}, "indexer_types"),
        ("llama", {"model_type": "llama9"}, r"known types, got 'llama9' \(near: llama.{,150}$"),
        ("llama", {"model_type": "mistral", "sliding_window": 4096}, "windows alone are not supp"),
        ("qwen3-8b", TURNED_ON | {"model_type": "exaone4"}, "layer_types is missing"),
        ("qwen3-8b", STEP | {"attention_other_setting": {"attention_type": "full_attention"}},
         "attention_other_setting: attention_type must be sliding_attention"),
        ("qwen3-8b", {"model_type": "hymba"}, "Hymba-1.5B; describe any other model in a file"),
        ("qwen3-8b", {"model_type": "phi4flash"}, "model=phi4_mini_flash"),
        ("deepseek-v4-flash", {"compress_ratios": [4] * 42}, "must be a list of 43 or more"),
        ("deepseek-v4-flash", {"compress_ratios": [3] * 43}, "of 0, 4, 128, got"),
        ("kimi-k3", {"linear_attn_config": {"head_dim": 128}}, "full_attn_layers must be a list"),
        ("kimi-k3", {"linear_attn_config": 3}, "linear_attn_config must be an object"),
        ("glm-5.3", {"index_topk": 0}, "index_topk must be an integer between 1"),
    ],
)  # fmt: skip
def test_an_invalid_config_json_is_refused(name, changes, told):
    with pytest.raises(ValueError, match=told):
        derived(name, **changes)


def test_settings_of_the_user_replace_values_of_config_json():
    text = TEXTS["deepseek-ai/DeepSeek-V3"]
    plain = derive_model(text, {})
    small = derive_model(text, {"kv_dtype_bytes": 1, "dense_param_bytes": 2.0, "default_tp": 8})
    assert small.full_token_bytes * 2 == plain.full_token_bytes
    assert (plain.dense_param_bytes, small.dense_param_bytes) == (1.0, 2.0)
    assert small.default_tp == 8
    given = {"dense_param_bytes": 1.0, "expert_param_bytes": 1.0}
    text = {**TEXTS[QWEN], "quantization_config": {"bits": 8}}
    assert derive_model(text, given).dense_param_bytes == 1.0


# GLM-5.2 and 5.3 have index keys on 21 of 78 layers: 78 latents of 576 elements and 21 keys of 128
SHARED = "FFFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSS"


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": SHARED},
        {"indexer_types": [{"F": "full", "S": "shared"}[letter] for letter in SHARED]},
        {"indexer_types": None, "index_topk_pattern": SHARED, "index_topk_freq": 1},
    ],
)
def test_layers_that_share_an_indexer_keep_no_index_keys(changes):
    shape, all_of_them = derived("zai-org/GLM-5", **changes), derived("zai-org/GLM-5")
    assert shape.full_token_bytes == 95_232
    assert "".join("FS"["I" not in word] for word in shape.layer_words) == SHARED
    index = 32 * (2048 * 128 + 6144) + 6144 * 128
    assert all_of_them.dense_params - shape.dense_params == (78 - 21) * index
    of_a_token = CostModel(shape, h200(), tp=32).layer_bytes(1, 0, 0)
    assert of_a_token.sum() == 32 * 95_232
    assert of_a_token[:4].tolist() == [32 * 2 * (576 + 128)] * 3 + [32 * 2 * 576]


def test_a_null_field_means_the_same_as_a_missing_one():
    assert derived(QWEN, quantization_config=None, sliding_window=None) == derived(QWEN)


@pytest.mark.parametrize(
    ("mamba", "attention"), [("mamba", "attention"), ("linear_attention", "full_attention")]
)
def test_layers_may_be_listed_block_by_block(mamba, attention):
    words = {"M": mamba, "*": attention, "E": "moe"}
    blocks = [words[letter] for letter in str(TEXTS[NEMOTRON]["hybrid_override_pattern"])]
    changes = {"hybrid_override_pattern": ..., "num_hidden_layers": ...}
    assert derived(NEMOTRON, **changes, layers_block_type=blocks) == derived(NEMOTRON)


def test_layers_listed_as_dense_have_no_experts():
    plain, dense = (derived(QWEN_EXPERTS, mlp_only_layers=layers) for layers in ([], [0, 3]))
    assert (plain.num_moe_layers, dense.num_moe_layers) == (48, 46)
    router = 2048 * 128
    mlp = 3 * 2048 * TEXTS[QWEN_EXPERTS]["intermediate_size"]
    assert dense.dense_params - plain.dense_params == 2 * (mlp - router)


def test_a_derived_memory_share_of_states_is_never_rounded_to_zero():
    # the sizes of LFM2-8B-A1B, whose states are tiny beside its KV
    layers = ["conv", "conv", *["full_attention", "conv", "conv", "conv"] * 5]
    layers += ["full_attention", "conv"]
    text = {
        "model_type": "lfm2_moe", "hidden_size": 2048, "num_hidden_layers": len(layers),
        "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3,
        "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
        "num_experts_per_tok": 4, "num_dense_layers": 2, "vocab_size": 65536,
        "max_position_embeddings": 128000, "torch_dtype": "bfloat16", "layer_types": layers,
    }  # fmt: skip
    shape = derive_model(text, {"name": "lfm"})
    assert 0 < shape.mamba_host_share < 0.005
    assert 0 < shape.mamba_device_share < 0.02


def test_describe_gives_layers_bytes_and_parameters():
    assert describe(derived("Qwen/Qwen3.5-35B-A3B")) == (
        "Qwen/Qwen3.5-35B-A3B: layers 10 full, 30 recurrent; 20,480 bytes a token, 61.4 MiB a "
        "state; 34.66 B parameters in 69.3 GB"
    )
    line = describe(derived(GPT_OSS))
    assert "12 full, 12 sliding-window (128 tokens); 24,576 bytes a token, 3.0 MiB a window" in line


# -- files -------------------------------------------------------------------------------------


def folder_of(root: Path, name: str, quantization: object = None) -> Path:
    """Write a folder `Model` with a published config.json and any quantization; return its path."""
    folder = root / "Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TEXTS[name]))
    if quantization is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    return folder


def test_model_from_hf_accepts_a_folder(tmp_path):
    folder = folder_of(tmp_path, QWEN)
    found = config_of(f"model.from_hf={folder}", "model.kv_dtype_bytes=1").model
    assert found.name == "Model"
    assert found.full_token_bytes == 147_456 // 2
    wanted = replace(read_model(folder, {"kv_dtype_bytes": 1}), from_hf=str(folder))
    assert all(getattr(found, item.name) == getattr(wanted, item.name) for item in fields(found))


@pytest.mark.parametrize(
    ("hardware", "devices", "tokens"), [("h200", 8, 1_500_000), ("b200", 4, 1_000_000)]
)
def test_a_derived_model_gets_devices_and_pools_of_its_machine(tmp_path, hardware, devices, tokens):
    folder = folder_of(tmp_path, "Qwen/Qwen3-235B-A22B")
    config = config_of(f"model.from_hf={folder}", f"hardware={hardware}")
    deployment = deploy(config)
    free_bytes = deployment.cost.free_device_bytes
    assert config.tp == devices
    assert (deployment.device.total_bytes, deployment.host.total_bytes) == (
        free_bytes,
        2 * free_bytes,
    )
    assert (deployment.device.counts[0] or 0) * config.cache.page_size > tokens
    chosen = config_of(f"model.from_hf={folder}", "cache.device_gib=7", "model.default_tp=16")
    assert (chosen.tp, deploy(chosen).device.total_bytes) == (16, 7 << 30)


def test_a_model_too_large_for_its_machine_is_refused(tmp_path):
    folder = folder_of(tmp_path, "deepseek-ai/DeepSeek-V3")
    with pytest.raises(ValueError, match=r"do not fit on 8 device\(s\) of h100.*\(at most 8\)"):
        deploy(config_of(f"model.from_hf={folder}", "hardware=h100"))


@pytest.mark.parametrize(("weights", "param_bytes"), [("FP8", 1.0), (None, 2.0)])
def test_a_quantization_in_a_second_file_is_read(tmp_path, weights, param_bytes):
    beside = {"quantization": {"quant_algo": weights, "kv_cache_quant_algo": "FP8"}}
    shape = read_model(folder_of(tmp_path, QWEN, beside), {})
    assert (shape.dense_param_bytes, shape.kv_dtype_bytes) == (param_bytes, 1)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "must (contain a JSON|be an) object"),
        ('{"quantization": 7, "model_type": 7}', "must be an object|model_type must be one of"),
        ("[" * 100_000, r"config\.json is not JSON \(maximum recursion depth"),
    ],
)
def test_a_file_that_is_no_valid_config_is_refused(tmp_path, name, text, told):
    folder = folder_of(tmp_path, QWEN)
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=told):
        read_model(folder, {})


def test_a_missing_config_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_model(tmp_path / "config.json", {})


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model=llama3_8b", "model.from_hf=config.json"], "and model=llama3_8b name two models"),
        (["model=from_hf"], r"set model\.from_hf"),
    ],
)
def test_a_run_must_name_exactly_one_model(overrides, told):
    with pytest.raises(ValueError, match=told):
        config_of(*overrides)
