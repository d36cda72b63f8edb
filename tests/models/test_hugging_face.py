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
from tests.models.test_catalog import bytes_of
from tests.models.test_cost import h200
from tests.models.test_shapes import model
from tests.models.texts import TEXTS

MIB = 1 << 20


def derived(name: str, **changes: Any) -> ModelConfig:
    """The shape of a public text, with some of its entries changed; `...` takes one out."""
    text: dict[str, Any] = json.loads(json.dumps(TEXTS[name]))
    inner = text.get("text_config", text)
    for key, value in changes.items():
        if value is ...:
            inner.pop(key, None)
            text.pop(key, None)
        else:
            inner[key] = value
    return derive_model(text, {"name": name})


# what the cards and reports of these models say, in billions as they round it. Their numbers for
# M2.5 (230 B) and V3.2 (685 B with its layer that predicts a further token) are coarser or count
# more; 228.7 and 671.9 are what their files add up to
@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [
        ("meta-llama/Meta-Llama-3.1-8B", 8.03, 2),
        ("meta-llama/Meta-Llama-3.1-70B", 70.6, 1),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7, 1),
        ("Qwen/Qwen3-8B", 8.2, 1),
        ("Qwen/Qwen3-32B", 32.8, 1),
        ("Qwen/Qwen3-30B-A3B", 30.5, 1),
        ("Qwen/Qwen3-235B-A22B", 235, 0),
        ("Qwen/Qwen3.5-35B-A3B", 35, 0),
        ("Qwen/Qwen3.5-27B", 27, 0),
        ("openai/gpt-oss-20b", 20.9, 1),
        ("openai/gpt-oss-120b", 116.8, 1),
        ("google/gemma-4-26B-A4B", 25.2, 1),
        ("deepseek-ai/DeepSeek-V3", 671, 0),
        ("deepseek-ai/DeepSeek-V3.2", 671.9, 1),
        ("zai-org/GLM-5", 744, 0),
        ("MiniMaxAI/MiniMax-M2.5", 228.7, 1),
        ("XiaomiMiMo/MiMo-V2-Flash", 309, 0),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, 1),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 120.7, 1),
        ("nvidia/Nemotron-H-56B-Base-8K", 56.3, 1),
    ],
)
def test_the_parameters_are_those_of_the_card(name: str, billions: float, digits: int) -> None:
    assert round(derived(name).num_params / 1e9, digits) == billions


# layers by kind as cards and reports give them; bytes as others computed them from the same texts.
# V3.2 and GLM-5 keep index keys beside their latent: 128 elements a token and layer, counted here
# in bf16 as the latent is (SGLang keeps them in 132 bytes: 78,324 and 100,152)
@pytest.mark.parametrize(
    ("name", "layers", "token_bytes", "window_mib", "state_mib"),
    [
        ("meta-llama/Meta-Llama-3.1-8B", (32, 0, 0), 131_072, 0, 0),
        ("meta-llama/Meta-Llama-3.1-70B", (80, 0, 0), 327_680, 0, 0),
        ("mistralai/Mixtral-8x7B-v0.1", (32, 0, 0), 131_072, 0, 0),
        ("Qwen/Qwen3-8B", (36, 0, 0), 147_456, 0, 0),
        ("Qwen/Qwen3-32B", (64, 0, 0), 262_144, 0, 0),
        ("Qwen/Qwen3-30B-A3B", (48, 0, 0), 98_304, 0, 0),
        ("Qwen/Qwen3-235B-A22B", (94, 0, 0), 192_512, 0, 0),
        ("Qwen/Qwen3.5-35B-A3B", (10, 0, 30), 20_480, 0, 61.4),
        ("Qwen/Qwen3.5-27B", (16, 0, 48), 65_536, 0, 146.8),
        ("openai/gpt-oss-20b", (12, 12, 0), 24_576, 3, 0),
        ("openai/gpt-oss-120b", (18, 18, 0), 36_864, 4.5, 0),
        ("google/gemma-4-26B-A4B", (5, 25, 0), 20_480, 200, 0),
        ("deepseek-ai/DeepSeek-V3", (61, 0, 0), 70_272, 0, 0),
        ("deepseek-ai/DeepSeek-V3.2", (61, 0, 0), 61 * (576 + 128) * 2, 0, 0),
        ("zai-org/GLM-5", (78, 0, 0), 78 * (576 + 128) * 2, 0, 0),
        ("MiniMaxAI/MiniMax-M2.5", (62, 0, 0), 253_952, 0, 0),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", (12, 36, 0), 49_152, 1152, 0),
        # values have 128 elements, keys 192
        ("XiaomiMiMo/MiMo-V2-Flash", (9, 39, 0), 23_040, 24.375, 0),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", (6, 0, 23), 6_144, 0, 46.8),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", (8, 0, 40), 8_192, 0, 162.3),
        ("nvidia/Nemotron-H-56B-Base-8K", (10, 0, 54), 40_960, 0, 870.3),
    ],
)
def test_layers_and_bytes_are_those_of_the_file(
    name: str, layers: tuple[int, int, int], token_bytes: int, window_mib: float, state_mib: float
) -> None:
    shape = derived(name)
    assert (shape.num_full_layers, shape.num_swa_layers, shape.num_mamba_layers) == layers
    assert shape.full_token_bytes == token_bytes
    assert shape.swa_token_bytes * shape.window_len / MIB == window_mib
    assert shape.mamba_slot_bytes / MIB == pytest.approx(state_mib, abs=0.05)


def test_llama_4_keeps_the_chunk_of_its_last_token_alone() -> None:
    text = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
    shape = derived(text)
    assert shape.window_restarts
    assert round(shape.num_params / 1e9, 1) == 107.8
    held = [bytes_of(shape, num_tokens)["swa"] for num_tokens in (8191, 8192, 8193, 131_072)]
    assert held == [8191 * 147_456, 0, 147_456, 0]
    other = derived(text, no_rope_layers=[0, 1] * 24, interleave_moe_layer_step=2)
    assert (other.pattern, other.num_moe_layers) == ("F S", 24)
    assert derived(text, moe_layers=[3, 7]).num_moe_layers == 2


def test_every_text_is_held_against_its_card() -> None:
    assert len(TEXTS) == 21


# files that were written by hand or from a derived shape; they choose the devices themselves
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_8b", "meta-llama/Meta-Llama-3.1-8B"),
        ("llama3_70b", "meta-llama/Meta-Llama-3.1-70B"),
        ("llama4_scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
        ("qwen3_8b", "Qwen/Qwen3-8B"),
        ("qwen3_32b", "Qwen/Qwen3-32B"),
        ("qwen3_235b_a22b", "Qwen/Qwen3-235B-A22B"),
        ("qwen3_6_35b_a3b", "Qwen/Qwen3.5-35B-A3B"),
        ("qwen3_5_27b", "Qwen/Qwen3.5-27B"),
        ("gpt_oss_20b", "openai/gpt-oss-20b"),
        ("gpt_oss_120b", "openai/gpt-oss-120b"),
        ("deepseek_v3", "deepseek-ai/DeepSeek-V3"),
        ("nemotron3_nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("nemotron3_super", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8"),
    ],
)
def test_a_model_file_says_what_its_config_json_does(name: str, text: str) -> None:
    said = model(name)
    beside = {"name": name, "source": said.source, "default_tp": said.default_tp}
    if name == "llama3_70b":
        beside["dense_param_bytes"] = 1.0  # quantised on the way
    assert replace(derived(text), **beside) == said  # type: ignore[arg-type]


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen/Qwen3-8B", {"num_key_value_heads": 7}, "a multiple of that of KV heads, got 32 and 7"),
    ("Qwen/Qwen3-8B", {"hidden_size": ...}, "hidden_size is missing"),
    ("Qwen/Qwen3-8B", {"hidden_size": 4096.5}, "hidden_size must be an integer .* got 4096.5"),
    ("Qwen/Qwen3-8B", {"vocab_size": -1}, "vocab_size must be an integer between 1 .* got -1"),
    ("Qwen/Qwen3-8B", {"num_attention_heads": 5000}, "at most hidden_size=4096, got 5000"),
    ("Qwen/Qwen3-8B", {"num_hidden_layers": 10**6}, "at most 1000, got 1000000"),
    ("Qwen/Qwen3-8B", {"intermediate_size": 10**7}, "dense_params must be .* got 4,42"),
    ("Qwen/Qwen3-8B", {"max_position_embeddings": "40k"}, "got '40k'"),
    ("Qwen/Qwen3-8B", {"model_type": "qwen9"}, "model_type must be one of .* got 'qwen9'"),
    ("openai/gpt-oss-20b", {"num_hidden_layers": 23}, "num_hidden_layers=23, got 24"),
    ("openai/gpt-oss-20b", {"sliding_window": ...}, "sliding_window is missing"),
    ("openai/gpt-oss-20b", {"num_experts_per_tok": 64}, r"num_experts \(32\), got 64"),
    ("openai/gpt-oss-20b", {"layer_types": ["looped_attention"] * 24}, "got 'looped_attention'"),
    ("openai/gpt-oss-20b", {"layer_types": ["sliding_attention"] * 24}, "full layers .* got 0"),
    ("Qwen/Qwen3.5-27B", {"linear_num_key_heads": 7}, "a multiple of .*=7, got 48"),
    ("google/gemma-4-26B-A4B", {"num_kv_shared_layers": 30}, "less than the 30 layers"),
    (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        {"hybrid_override_pattern": "M*-" * 10},
        "num_hidden_layers=52, got 30",
    ),
    (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        {"hybrid_override_pattern": ...},
        "hybrid_override_pattern or layers_block_type is missing",
    ),
    ("Qwen/Qwen3-8B", {"torch_dtype": "float8_e4m3fn"}, "must be one of .* got 'float8_e4m3fn'"),
    ("openai/gpt-oss-20b", {"layer_types": [["full_attention"]] * 24}, r"got \['full_attention'\]"),
    ("Qwen/Qwen3.5-27B", {"mamba_ssm_dtype": "fp4"}, "mamba_ssm_dtype must be .* got 'fp4'"),
    (
        "Qwen/Qwen3-8B",
        {"quantization_config": {"quant_method": "bits"}},
        "quantization method bits",
    ),
    ("Qwen/Qwen3-8B", {"quantization_config": {"bits": 8}}, "method .no quant_method.: set"),
    ("Qwen/Qwen3-8B", {"quantization_config": {}}, "method .no quant_method.: set"),
    ("Qwen/Qwen3-8B", {"quantization_config": 7}, "quantization_config must be an object, got 7"),
    ("Qwen/Qwen3-8B", {"model_type": []}, r"model_type must be one of .*, got \[\]"),
    ("Qwen/Qwen3-8B", {"model_type": ...}, "model_type must be one of .*, got None"),
]


@pytest.mark.parametrize(("name", "changes", "told"), BROKEN)
def test_a_broken_file_is_refused_with_the_number(
    name: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        derived(name, **changes)


def test_what_is_given_stands() -> None:
    text = TEXTS["deepseek-ai/DeepSeek-V3"]
    plain = derive_model(text, {})
    small = derive_model(text, {"kv_dtype_bytes": 1, "dense_param_bytes": 2.0, "default_tp": 8})
    assert small.full_token_bytes * 2 == plain.full_token_bytes
    assert (plain.dense_param_bytes, small.dense_param_bytes) == (1.0, 2.0)
    assert small.default_tp == 8


# GLM-5.2 and 5.3 have index keys on 21 of 78 layers: 78 latents of 576 elements and 21 keys of 128
GLM_5_2 = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
SHARED = "FFFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSSFSSS"


@pytest.mark.parametrize(
    "said",
    [
        GLM_5_2,
        {"index_topk_pattern": SHARED},
        {"indexer_types": [{"F": "full", "S": "shared"}[letter] for letter in SHARED]},
        {"indexer_types": None, "index_topk_pattern": SHARED, "index_topk_freq": 1},
    ],
)
def test_layers_that_share_an_indexer_keep_no_index_keys(said: dict[str, Any]) -> None:
    shape, all_of_them = derived("zai-org/GLM-5", **said), derived("zai-org/GLM-5")
    assert shape.full_token_bytes == 95_232
    assert all_of_them.full_token_bytes == 109_824
    assert "".join("FS"["I" not in word] for word in shape.layer_words) == SHARED
    index = 32 * (2048 * 128 + 6144) + 6144 * 128
    assert all_of_them.dense_params - shape.dense_params == (78 - 21) * index
    costs = [CostModel(each, h200(), tp=32) for each in (shape, all_of_them)]
    of_a_token = [cost.layer_bytes(1, 0, 0) for cost in costs]
    assert [each.sum() for each in of_a_token] == [32 * 95_232, 32 * 109_824]
    assert of_a_token[0][:4].tolist() == [32 * 2 * (576 + 128)] * 3 + [32 * 2 * 576]


@pytest.mark.parametrize(
    "said",
    [{"index_topk_freq": 0}, {"index_topk_pattern": "FS"}, {"indexer_types": ["half"] * 78}],
)
def test_a_schedule_of_indexers_that_cannot_be_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(said))):
        derived("zai-org/GLM-5", **said)


def test_null_says_as_little_as_nothing() -> None:
    named = "Qwen/Qwen3-8B"
    assert derived(named, quantization_config=None, sliding_window=None) == derived(named)


@pytest.mark.parametrize(
    ("mamba", "attention"), [("mamba", "attention"), ("linear_attention", "full_attention")]
)
def test_layers_may_be_listed_block_by_block(mamba: str, attention: str) -> None:
    name = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    words = {"M": mamba, "*": attention, "E": "moe"}
    blocks = [words[letter] for letter in str(TEXTS[name]["hybrid_override_pattern"])]
    listed = derived(
        name, hybrid_override_pattern=..., num_hidden_layers=..., layers_block_type=blocks
    )
    assert listed == derived(name)


def test_a_file_is_derived_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "Qwen3-8B" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TEXTS["Qwen/Qwen3-8B"]))
    found = config_of(f"model.from_hf={path.parent}", "model.kv_dtype_bytes=1").model
    assert found.name == "Qwen3-8B"
    assert found.full_token_bytes == 147_456 // 2
    wanted = replace(read_model(path, {"kv_dtype_bytes": 1}), from_hf=str(path.parent))
    assert all(getattr(found, item.name) == getattr(wanted, item.name) for item in fields(found))


@pytest.mark.parametrize(
    ("hardware", "devices", "tokens"), [("h200", 8, 1_500_000), ("b200", 4, 1_000_000)]
)
def test_devices_and_pools_of_a_derived_model_are_those_of_its_machine(
    tmp_path: Path, hardware: str, devices: int, tokens: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXTS["Qwen/Qwen3-235B-A22B"]))
    config = config_of(f"model.from_hf={tmp_path}", f"hardware={hardware}")
    deployment = deploy(config)
    free_bytes = deployment.cost.free_device_bytes
    assert config.tp == devices
    assert [deployment.device.total_bytes, deployment.host.total_bytes] == [
        free_bytes,
        2 * free_bytes,
    ]
    assert (deployment.device.counts[0] or 0) * config.cache.page_size > tokens
    chosen = config_of(f"model.from_hf={tmp_path}", "cache.device_gib=7", "model.default_tp=16")
    assert (chosen.tp, deploy(chosen).device.total_bytes) == (16, 7 << 30)


def test_a_model_too_large_for_a_machine_is_told_what_the_machine_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXTS["deepseek-ai/DeepSeek-V3"]))
    with pytest.raises(ValueError, match=r"do not fit on 8 device\(s\) of h100.*\(at most 8\)"):
        deploy(config_of(f"model.from_hf={tmp_path}", "hardware=h100"))


def test_a_quantisation_told_beside_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXTS["Qwen/Qwen3-8B"]))
    told = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    shape = read_model(tmp_path, {})
    assert (shape.dense_param_bytes, shape.kv_dtype_bytes) == (1.0, 1)


def test_a_quantisation_of_the_kv_alone_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXTS["Qwen/Qwen3-8B"]))
    told = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    shape = read_model(tmp_path, {})
    assert (shape.dense_param_bytes, shape.kv_dtype_bytes) == (2.0, 1)


def test_layers_that_are_said_to_be_dense_have_no_experts() -> None:
    plain, dense = (derived("Qwen/Qwen3-30B-A3B", mlp_only_layers=said) for said in ([], [0, 3]))
    assert (plain.num_moe_layers, dense.num_moe_layers) == (48, 46)
    beside = 2048 * 128  # what chooses the experts of a layer
    mlp = 3 * 2048 * TEXTS["Qwen/Qwen3-30B-A3B"]["intermediate_size"]
    assert dense.dense_params - plain.dense_params == 2 * (mlp - beside)


def test_bytes_that_are_given_stand_in_for_a_method_that_is_not_told() -> None:
    given = {"dense_param_bytes": 1.0, "expert_param_bytes": 1.0}
    text = {**TEXTS["Qwen/Qwen3-8B"], "quantization_config": {"bits": 8}}
    assert derive_model(text, given).dense_param_bytes == 1.0


def test_a_file_that_is_nested_too_deeply_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON \(maximum recursion depth"):
        read_model(tmp_path, {})


@pytest.mark.parametrize("told", ["{", "[]", '{"quantization": 7}', "[" * 100_000])
def test_a_broken_quantisation_beside_the_file_is_refused(tmp_path: Path, told: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXTS["Qwen/Qwen3-8B"]))
    (tmp_path / "hf_quant_config.json").write_text(told)
    with pytest.raises(ValueError, match=r"is not JSON|must (contain a JSON|be an) object"):
        read_model(tmp_path, {})


def test_a_whole_model_beside_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match="and model=llama3_8b name two models"):
        config_of("model=llama3_8b", "model.from_hf=config.json")


def test_a_derived_model_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set model\.from_hf"):
        config_of("model=from_hf")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "must contain a JSON object, got list"),
        (None, "does not exist"),
    ],
)
def test_what_is_no_config_json_is_refused(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_model(path, {})


def test_a_derived_shape_is_told_in_one_line() -> None:
    assert describe(derived("Qwen/Qwen3.5-35B-A3B")) == (
        "Qwen/Qwen3.5-35B-A3B: layers 10 full, 30 recurrent; 20,480 bytes a token, 61.4 MiB a "
        "state; 34.66 B parameters in 69.3 GB"
    )
    told = describe(derived("openai/gpt-oss-20b"))
    assert "12 full, 12 sliding-window (128 tokens); 24,576 bytes a token, 3.0 MiB a window" in told
