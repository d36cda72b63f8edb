"""Limits on the numbers of models and machines that users write."""

from dataclasses import replace

import pytest

from hicache.models.plausible import check_shape
from hicache.runs.schema import config_of
from tests.models.test_shapes import MODELS, model


@pytest.mark.parametrize("name", MODELS)
def test_the_models_of_this_project_are_within_the_limits(name):
    check_shape(model(name))


@pytest.mark.parametrize(
    ("name", "field", "value", "told"),
    [
        ("llama3_8b", "dense_params", 65, "dense_params must be at least .* got 65"),
        ("llama3_8b", "dense_params", 10**12, "dense_params must be .* got 1,000,000,000,000"),
        ("llama3_8b", "hidden_size", 0, "hidden_size must be at least 1 .* got 0"),
        ("llama3_8b", "num_kv_heads", 7, "num_query_heads must be a multiple of 7, got 32"),
        ("llama3_8b", "num_kv_heads", 64, "num_kv_heads must be at least 1 .* got 64"),
        ("llama3_8b", "head_params", 525336575, "a multiple of 4,096, got 525,336,575"),
        ("llama3_8b", "head_params", 0, "head_params must be at least 8,192, got 0"),
        ("llama3_8b", "kv_dtype_bytes", 16, "kv_dtype_bytes must be .* got 16"),
        ("llama3_8b", "dense_param_bytes", 20.0, "dense_param_bytes must be .* got 20"),
        ("gpt_oss_120b", "window_len", 10**6, "window_len must be .* got 1,000,000"),
        ("gpt_oss_120b", "expert_params", 5, "expert_params must be a multiple of 8,640, got 5"),
        ("gpt_oss_120b", "expert_params", 24883200 * 9, "expert_params .* got 223,948,800"),
        ("gpt_oss_120b", "num_moe_layers", 37, "num_moe_layers must be .* got 37"),
        ("qwen3_next_80b", "recurrent_heads", 0, "recurrent_heads must be at least 1 .* got 0"),
    ],
)
def test_an_implausible_model_is_refused(name, field, value, told):
    with pytest.raises(ValueError, match=told):
        check_shape(replace(model(name), **{field: value}))


def test_the_command_line_refuses_an_implausible_model():
    with pytest.raises(ValueError, match=r"dense_params must be at least .* got 65"):
        config_of("model.dense_params=65")


@pytest.mark.parametrize(
    ("knob", "told"),
    [
        ("step_s.value=-1", r"step_s must be a finite number of at least 0, got -1\.0"),
        ("step_s.value=nan", "step_s must be a finite number of at least 0, got nan"),
        ("pcie_bandwidth.value=0", r"pcie_bandwidth must be .* at least 1,000,000 .* got 0\.0"),
        ("both_ways_bandwidth.value=83", "both_ways_bandwidth must be .* at least 1,000,000"),
        ("copy_slowdown.value=0", r"copy_slowdown must be .* at least 1, got 0\.0"),
        ("tile_tokens=0", "tile_tokens must be between 1 and 1,048,576, got 0"),
        ("gemm_bf16={size: [1], rate: [inf]}", "gemm_bf16 must be a finite number"),
        ("gemm_bf16={size: [1], rate: [2e30]}", r"gemm_bf16 must be at most 1e\+17, got 2e\+30"),
    ],
)
def test_an_implausible_machine_is_refused(knob, told):
    with pytest.raises(ValueError, match=rf"hardware\.{told}"):
        config_of(f"hardware.{knob}")
