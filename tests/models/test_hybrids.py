"""Hybrid models of transformers 5.23: layers, cached bytes and parameters of small configs."""

import json
from typing import Any

import pytest

from hicache.experiment import run
from hicache.models.hugging_face import derive_model
from hicache.runs.schema import config_of

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 4,
}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
FALCON = MAMBA_2 | {"num_hidden_layers": 3, "mamba_d_ssm": 256}
BAMBA = MAMBA_2 | {"attn_layer_indices": [1], "mamba_d_head": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
GRANITE = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "layer_types": ["mamba", "attention"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 128,
}
LFM2_MOE = EXPERTS | {
    "layer_types": ["conv", "full_attention"] * 2,
    "num_dense_layers": 1,
    "moe_intermediate_size": 128,
}
BAILING = EXPERTS | {
    "num_hidden_layers": 6,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
}
# by model type: a config, the layers, and bytes per token and per state, as the caches of these
# classes have them after a forward pass (KV in bf16, states in fp32, convolutions in bf16 with one
# column less, which no token reads), and parameters without norms and biases
HYBRIDS: dict[str, tuple[dict[str, Any], str, int, int, int]] = {
    "falcon_h1": (FALCON, "FM", 1536, 54_912, 2_381_824),
    "bamba": (BAMBA, "M F M", 512, 108_672, 2_873_344),
    "granitemoehybrid": (GRANITE, "M F", 1024, 72_064, 6_578_176),
    "jamba": ({"num_hidden_layers": 8}, "M M M M F", 512, 250_880, 23_511_040),
    "lfm2": ({"full_attn_idxs": [1, 3]}, "M F", 1024, 2048, 1_835_008),
    "lfm2_moe": (LFM2_MOE, "M F", 1024, 2048, 3_708_928),
    "olmo_hybrid": ({}, "D D D F", 512, 124_416, 2_830_336),
    "bailing_hybrid": (BAILING, "D D D D D F", 160, 186_880, 4_823_040),
}


def text(kind: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": kind, **SMALL, **HYBRIDS[kind][0], **changes}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_has_the_layers_bytes_and_parameters_of_its_class(kind):
    shape = derive_model(text(kind), {"name": kind})
    found = (shape.pattern, shape.full_token_bytes, shape.mamba_slot_bytes, shape.num_params)
    assert found == HYBRIDS[kind][1:]


def test_heads_of_linear_attention_may_have_a_size_of_their_own():
    sizes = [
        derive_model(text("bailing_hybrid", **more), {"name": "own"}).mamba_slot_bytes
        for more in ({}, {"linear_head_dim": 64})
    ]
    assert sizes[1] > 3 * sizes[0]  # states have head_dim columns and rows


@pytest.mark.parametrize("kind", ["falcon_h1", "jamba", "lfm2"])
def test_a_run_of_a_hybrid_keeps_all_invariants(kind, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(text(kind)))
    pools = ("cache.device.tokens.full=20000", "cache.host.tokens.full=40000")
    states = ("cache.device.states=40", "cache.host.states=80", "hardware=h200")
    load = ("workload=chat", "workload.limit=12", "engine.check_invariants=true")
    result = run(config_of(f"model.from_hf={path}", "model=from_hf", *pools, *states, *load))
    assert sum(record.device_hit_len for record in result.records) > 0


def test_granite_without_experts_has_only_the_shared_mlp():
    with_experts = derive_model(text("granitemoehybrid"), {})
    shape = derive_model(text("granitemoehybrid", num_local_experts=0), {})
    gates = 4 * 256 * 4  # of four layers
    assert shape.dense_params == with_experts.dense_params - gates
    assert shape.num_moe_layers == 0


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("lfm2", {"layer_types": ["conv", "loop"] * 2}, "layer_types may contain .* got 'loop'"),
        ("lfm2", {"full_attn_idxs": None}, "layer_types is missing, which says where attention"),
        ("bamba", {"mamba_n_heads": 0}, "mamba_n_heads must be an integer between 1"),
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period must be an integer between 1"),
        ("lfm2", {"model_type": "lfm3"}, "beside short convolutions is not modelled"),
        ("lfm2", {"model_type": "zamba2"}, "which layers share, are not modelled"),
    ],
)
def test_a_hybrid_that_is_not_modeled_is_refused(kind, changes, told):
    with pytest.raises(ValueError, match=told):
        derive_model(text(kind, **changes), {})
