"""The cost of steps, against closed forms and against itself."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hicache.clock import NEVER
from hicache.executor.completions import StepEnds
from hicache.memory import model_kinds
from hicache.models import Figure, HardwareConfig, ModelConfig, RateTable
from hicache.models.cost import LAYER_KERNELS, CostModel, Rates
from tests.models.test_shapes import MODELS, load, model

NO_CONTEXT = np.empty(0, dtype=np.int64)
# mean prompt and answer of 24 groups of the 12,031 requests of Mooncake's conversation trace, by
# prompt length (FAST25-release, Apache-2.0)
CONVERSATION = [
    *[(896, 279), (907, 325), (992, 243), (1233, 297), (1551, 381), (2007, 340), (2694, 372)],
    *[(3547, 369), (4303, 332), (4926, 316), (5633, 340), (6467, 344), (7426, 339), (8518, 338)],
    *[(9701, 324), (11098, 354), (12659, 367), (14445, 347), (16326, 345), (18658, 347)],
    *[(22056, 370), (26889, 344), (35267, 405), (70791, 404)],
]
CONVERSATION_RATE = 12_031 / 3_537  # requests a second
# whose files say that their default devices are too few for it
TOO_LARGE = (
    *("llama3_70b", "deepseek_v3", "qwen3_32b", "qwen3_235b_a22b"),
    *("glm5_3", "kimi_k3", "minimax_m3"),
)


def h200() -> HardwareConfig:
    machine = load(HardwareConfig, "hardware", "h200")
    assert isinstance(machine, HardwareConfig)
    return machine


H200 = h200()
COSTS = {name: CostModel(model(name), H200, tp=model(name).default_tp) for name in MODELS}


def plain(*, tile_tokens: int = 1, **rates: float) -> HardwareConfig:
    """A machine whose every operation but the named ones is next to free."""
    flat = {name: rates.get(name, 1e30) for name in HardwareConfig.__dataclass_fields__}
    fields: dict[str, Any] = {"name": "plain", "num_devices": 4}
    for name, field in HardwareConfig.__dataclass_fields__.items():
        if field.type is RateTable:
            fields[name] = RateTable(size=[1], rate=[flat[name]])
        elif field.type is Figure:
            fields[name] = Figure(value=flat[name])
    for name in ("step_s", "extend_s", "kernel_s", "all_reduce_s", "activation_bytes"):
        fields[name] = Figure(value=rates.get(name, 0.0))
    return HardwareConfig(**fields, tile_tokens=tile_tokens)


def small(**fields: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "name": "small",
        "pattern": "F",
        "num_layers": 4,
        "num_full_layers": 4,
        "num_query_heads": 8,
        "head_dim": 64,
        "num_kv_heads": 4,
        "hidden_size": 512,
        "dense_params": 10**6,
    }
    return ModelConfig(**(shape | fields))


def contexts(*lens: int) -> NDArray[np.int64]:
    return np.array(lens, dtype=np.int64)


def step_ends(
    cost: CostModel, lens: Sequence[int], num_steps: int, *, now_ns: int = 0, looks: int = 1
) -> list[int]:
    """The ends of decode steps, looked at in so many parts of their time."""
    more = cost.decode_ends_ns(lens, num_steps, now_ns)
    ends = StepEnds(next(more), more)
    first_ns = ends.known[0]
    for part in range(1, looks):
        ends.look(now_ns + (first_ns - now_ns) * num_steps * part // looks)
    ends.look(NEVER)
    return ends.known


def test_an_empty_step_costs_the_constant() -> None:
    cost = CostModel(small(), plain(step_s=0.001), tp=1)
    assert cost.forward_ns([], NO_CONTEXT).total_ns == 1_000_000


def test_matrices_cost_their_flops_when_tokens_are_many() -> None:
    cost = CostModel(small(), plain(gemm_bf16=1e12, weight_bandwidth=1e12), tp=1)
    assert cost.forward_ns([(0, 1000)], NO_CONTEXT).total_ns == 2_000_000


def test_matrices_cost_their_bytes_when_tokens_are_few() -> None:
    cost = CostModel(small(), plain(gemm_bf16=1e12, weight_bandwidth=1e12), tp=1)
    assert cost.forward_ns([], contexts(1)).total_ns == 2_000


def test_matrices_are_multiplied_in_whole_tiles_of_each_sequence() -> None:
    cost = CostModel(small(), plain(gemm_bf16=1e12, tile_tokens=16), tp=1)
    # [15, 17) lies in two tiles, [32, 33) in one, and so does a token that is decoded
    assert cost.forward_ns([(15, 17), (32, 33)], contexts(7)).total_ns == 4 * 16 * 2_000


def test_every_sequence_that_is_extended_costs_the_same_besides() -> None:
    cost = CostModel(small(), plain(step_s=0.001, extend_s=0.002), tp=1)
    assert cost.forward_ns([(0, 8), (4, 5)], contexts(7)).total_ns == 5_000_000


def test_full_attention_costs_every_pair_of_query_and_key() -> None:
    cost = CostModel(small(), plain(attention_d64=1e12), tp=1)
    pairs = 100 * 101 // 2 - 40 * 41 // 2
    flops = 4 * pairs * 8 * (64 + 64) * 2
    assert cost.forward_ns([(40, 100)], NO_CONTEXT).total_ns == round(flops * 1e-3)


def test_sliding_attention_costs_the_pairs_inside_the_window() -> None:
    shape = small(pattern="S", num_full_layers=0, num_swa_layers=4, window_len=30)
    cost = CostModel(shape, plain(attention_d64=1e12), tp=1)
    pairs = sum(min(position, 30) for position in range(21, 101))
    flops = 4 * pairs * 8 * (64 + 64) * 2
    assert cost.forward_ns([(20, 100)], NO_CONTEXT).total_ns == round(flops * 1e-3)


def test_attention_in_chunks_costs_the_pairs_since_the_last_multiple() -> None:
    fields = {"pattern": "S", "num_full_layers": 0, "num_swa_layers": 4, "window_len": 30}
    shape = small(**fields, window_restarts=True)
    cost = CostModel(shape, plain(attention_d64=1e12), tp=1)
    pairs = sum(position % 30 + 1 for position in range(20, 100))
    flops = 4 * pairs * 8 * (64 + 64) * 2
    assert cost.forward_ns([(20, 100)], NO_CONTEXT).total_ns == round(flops * 1e-3)
    reading, key_bytes = CostModel(shape, plain(decode_bandwidth=1e9), tp=1), 4 * 4 * 2 * 64 * 2
    for length, num_keys in ((30, 30), (31, 1), (100, 10)):
        assert reading.forward_ns([], contexts(length)).total_ns == num_keys * key_bytes
        extend = reading.forward_ns([(length - 1, length)], NO_CONTEXT)
        assert extend.total_ns == num_keys * key_bytes


def test_decoding_reads_every_context_and_at_most_a_window() -> None:
    shape = small(pattern="F S", num_full_layers=2, num_swa_layers=2, window_len=50)
    cost = CostModel(shape, plain(decode_bandwidth=1e9), tp=1)
    keys = 2 * (30 + 400) + 2 * (30 + 50)
    assert cost.forward_ns([], contexts(30, 400)).total_ns == keys * 4 * 2 * 64 * 2


def test_recurrent_layers_cost_every_token_and_no_context() -> None:
    shape = small(
        pattern="D",
        num_full_layers=0,
        num_mamba_layers=4,
        recurrent_heads=4,
        recurrent_head_dim=32,
        recurrent_state_dim=16,
    )
    cost = CostModel(shape, plain(delta_rate=1e9), tp=1)
    steps = [cost.forward_ns([(start, start + 100)], NO_CONTEXT) for start in (0, 5000)]
    assert [step.total_ns for step in steps] == [4 * 100 * 4 * 32 * 16] * 2


def test_saving_a_state_costs_reading_and_writing_it() -> None:
    shape = small(
        pattern="M",
        num_full_layers=0,
        num_mamba_layers=4,
        recurrent_heads=4,
        recurrent_head_dim=32,
        recurrent_state_dim=16,
    )
    cost = CostModel(shape, plain(state_bandwidth=1e9), tp=2)
    saved = cost.forward_ns([(0, 10)], NO_CONTEXT, saved_states=3).total_ns
    assert saved == 3 * shape.mamba_slot_bytes


def test_experts_that_no_token_chose_are_not_read() -> None:
    shape = small(
        dense_params=0,
        num_moe_layers=4,
        num_experts=100,
        experts_per_token=2,
        expert_params=1000,
        expert_width=512,
    )
    cost = CostModel(shape, plain(weight_bandwidth=1e9), tp=1)
    assert cost.forward_ns([], contexts(9)).total_ns < 9 * 4 * 2 * 1000 * 2
    assert cost.forward_ns([], contexts(9, 9)).total_ns > 4 * 2 * 1000 * 2


def test_devices_divide_the_work_and_add_all_reduces() -> None:
    machine = plain(gemm_bf16=1e12, all_reduce_s=1e-6)
    alone = CostModel(small(), machine, tp=1).forward_ns([(0, 1000)], NO_CONTEXT).total_ns
    shared = CostModel(small(), machine, tp=4).forward_ns([(0, 1000)], NO_CONTEXT).total_ns
    assert shared == alone / 4 + 4 * 2 * 1000


@pytest.mark.parametrize("copying_s", [0.0, 1e-4])
def test_a_step_is_slowed_only_as_long_as_copies_take(copying_s: float) -> None:
    cost = COSTS["llama3_8b"]
    alone = cost.forward_ns([(0, 512)], contexts(100))
    beside = cost.forward_ns([(0, 512)], contexts(100), slowdown=1.25, copying_s=copying_s)
    # beside copies the step computes 1 / 1.25 of what it computes alone
    assert beside.total_ns - alone.total_ns == pytest.approx(copying_s * 0.2 * 1e9, abs=1)


def test_a_slowdown_multiplies_computing() -> None:
    cost = COSTS["llama3_8b"]
    once = cost.forward_ns([(0, 512)], contexts(100))
    twice = cost.forward_ns([(0, 512)], contexts(100), slowdown=2.0)
    assert twice.compute_ns == pytest.approx(2 * once.compute_ns, abs=1)


def recurrence_ns(compute_s: list[float], layer_bytes: list[float], rate: float) -> float:
    """finish_i = max(finish_{i-1}, loaded_i) + compute_i, literally."""
    finish_s = loaded_s = 0.0
    for computing_s, num_bytes in zip(compute_s, layer_bytes, strict=True):
        loaded_s += num_bytes / rate
        finish_s = max(finish_s, loaded_s) + computing_s
    return finish_s * 1e9


@pytest.mark.parametrize("rate", [1e8, 2e8, 4e8, 1e9, 1e10])
def test_a_layer_waits_for_its_own_load_and_those_before(rate: float) -> None:
    shape = small(
        pattern="F D F S",
        num_full_layers=2,
        num_swa_layers=1,
        num_mamba_layers=1,
        window_len=64,
        recurrent_heads=4,
        recurrent_head_dim=32,
        recurrent_state_dim=16,
    )
    machine = plain(gemm_bf16=1e11, attention_d64=1e10, attention_window=1e9, delta_rate=1e9)
    cost = CostModel(shape, machine, tp=1)
    layer_bytes = cost.layer_bytes(4000, 64, 1)
    full_s = 1000 * 1001 // 2 * 8 * 256 / 1e10
    swa_s = (64 * 65 // 2 + 936 * 64) * 8 * 256 / 1e9
    scan_s = 1000 * 4 * 32 * 16 / 1e9
    even_s = 2 * 1000 * 10**6 / 1e11 / 4
    compute_s = [even_s + full_s, even_s + scan_s, even_s + full_s, even_s + swa_s]
    step = cost.forward_ns([(0, 1000)], NO_CONTEXT, load_layer_bytes=layer_bytes, load_rate=rate)
    assert step.total_ns == pytest.approx(
        recurrence_ns(compute_s, layer_bytes.tolist(), rate), abs=2
    )
    assert step.total_ns == step.compute_ns + step.load_stall_ns


def test_a_load_of_nothing_stalls_nothing() -> None:
    cost = COSTS["gemma3_27b"]
    loaded = cost.forward_ns(
        [(0, 512)], NO_CONTEXT, load_layer_bytes=cost.layer_bytes(0, 0, 0), load_rate=1e9
    )
    assert loaded == cost.forward_ns([(0, 512)], NO_CONTEXT)


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_layers_add_up_to_what_is_copied_to_all_devices(name: str) -> None:
    cost = COSTS[name]
    page = 128  # whole entries of compressed KV
    full, swa, state = model_kinds(model(name), page, cost.tp).page_bytes
    copied = cost.layer_bytes(7 * page, 5 * page, 2).sum()
    assert copied == 7 * full + 5 * swa + 2 * state


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(st.integers(1, 60_000) | st.integers(1000, 1030), min_size=1, max_size=40),
    num_steps=st.integers(1, 60),
    looks=st.integers(1, 5),
)
def test_steps_priced_together_equal_steps_priced_alone(
    name: str, lens: list[int], num_steps: int, looks: int
) -> None:
    cost = COSTS[name]
    together = step_ends(cost, lens, num_steps, now_ns=5, looks=looks)
    alone = [
        cost.forward_ns([], [each + step for each in lens]).total_ns for step in range(num_steps)
    ]
    assert together == list(accumulate(alone, initial=5))[1:]


def test_steps_priced_together_cross_a_point_of_the_bandwidth_table() -> None:
    machine = H200
    low = machine.decode_bandwidth.size[0]
    cost = COSTS["llama3_8b"]
    near = int(low / 1024) - 20  # 4 KiB a token and layer over 4 devices
    together = step_ends(cost, [near], 40, looks=3)
    alone = [cost.forward_ns([], contexts(near + step)).total_ns for step in range(40)]
    assert together == list(accumulate(alone))


def test_a_step_beyond_a_point_of_the_bandwidth_table_is_not_priced_as_one_before_it() -> None:
    points = [100.5 * 1024, 101.5 * 1024]  # 1 KiB a token and layer
    table = RateTable(size=points, rate=[1e9, 1e12])
    cost = CostModel(small(), replace(plain(), decode_bandwidth=table), tp=1)
    together = step_ends(cost, [95], 12)
    alone = [cost.forward_ns([], [95 + step]).total_ns for step in range(12)]
    assert together == list(accumulate(alone))


@pytest.mark.parametrize("name", MODELS)
def test_a_longer_cached_prefix_never_costs_more(name: str) -> None:
    cost = COSTS[name]
    seconds = [cost.prefill_s(cached, 8000) for cached in range(0, 8000, 400)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_prefill_is_the_sum_of_its_chunks() -> None:
    cost = COSTS["llama3_8b"]
    chunks = [(100, 1100), (1100, 2100), (2100, 2500)]
    wanted = sum(cost.forward_ns([chunk], NO_CONTEXT).total_ns for chunk in chunks)
    assert cost.prefill_s(100, 2500, chunk_tokens=1000) == pytest.approx(wanted * 1e-9, rel=1e-12)


def test_a_prefill_of_which_nobody_says_otherwise_is_cut_after_8192_tokens() -> None:
    cost = COSTS["llama3_8b"]
    chunks = [(100, 8292), (8292, 10_000)]
    wanted = sum(cost.forward_ns([chunk], NO_CONTEXT).total_ns for chunk in chunks)
    assert cost.prefill_s(100, 10_000) == wanted * 1e-9


def test_an_answer_of_one_token_asks_for_its_prefill_alone() -> None:
    cost = COSTS["llama3_8b"]
    assert cost.offered_s(0, 1000, 1, 32) == cost.prefill_s(0, 1000)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TOO_LARGE])
def test_the_default_devices_carry_the_conversation_trace_cold(name: str) -> None:
    cost = COSTS[name]
    seconds = [cost.offered_s(0, prompt, answer, 32) for prompt, answer in CONVERSATION]
    assert CONVERSATION_RATE * sum(seconds) / len(seconds) <= 0.9


@pytest.mark.parametrize("name", MODELS)
def test_prefill_on_one_device_is_no_faster_than_its_peak(name: str) -> None:
    """989 TFLOPS in bf16 and twice that in fp8 is the data sheet's dense peak of an H200."""
    shape, cost = model(name), COSTS[name]
    active = shape.dense_params + (
        shape.num_moe_layers * shape.experts_per_token * shape.expert_params
    )
    peak = 989e12 * (2 if shape.dense_param_bytes == 1 else 1)
    assert cost.prefill_s(0, 8192) * cost.tp * peak > 2 * 8192 * active


def test_what_weights_leave_is_for_the_cache() -> None:
    cost = COSTS["llama3_8b"]
    usable = H200.device_memory_bytes.value - H200.activation_bytes.value
    assert cost.free_device_bytes == 4 * usable - cost.model.weight_bytes


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_what_fits_leaves_something_for_the_cache(spare: int) -> None:
    weights = small().weight_bytes
    machine = plain(device_memory_bytes=weights + spare + 7.0, activation_bytes=7.0)
    if spare <= 0:
        with pytest.raises(ValueError, match=r"raise parallel\.tp"):
            CostModel(small(), machine, tp=1)
        return
    assert CostModel(small(), machine, tp=1).free_device_bytes == spare


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"qwen3_next_80b \(159\.3 GB\) do not fit on 1 device"):
        CostModel(model("qwen3_next_80b"), H200, tp=1)


@pytest.mark.parametrize("tp", [0, 33])
def test_no_devices_and_more_than_the_machine_has_are_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and the 32 devices of h200, got {tp}"):
        CostModel(model("llama3_8b"), H200, tp=tp)


@pytest.mark.parametrize("size", [0.5, 1.0, 2.0, 3.0, 7.9, 8.0, 100.0])
def test_a_rate_is_linear_between_points_and_constant_outside(size: float) -> None:
    table = RateTable(size=[1, 2, 8], rate=[10, 30, 60])
    wanted = 10 + 20 * (size - 1) if size < 2 else 30 + 5 * (size - 2)
    assert Rates(table, "some").at(size) == min(60.0, max(10.0, wanted))


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hardware\.some must have at least one size"):
        Rates(RateTable(), "some")


def test_the_bytes_of_layers_add_up_over_tokens_windows_and_states() -> None:
    cost = CostModel(model("qwen3_next_80b"), load(HardwareConfig, "hardware", "h200"), tp=8)
    tokens, states = cost.layer_bytes(64, 0, 0), cost.layer_bytes(0, 0, 3)
    assert (cost.layer_bytes(64, 0, 3) == tokens + states).all()
    assert states.sum() == 3 * cost.layer_bytes(0, 0, 1).sum() > 0


def test_every_layer_costs_its_short_kernels() -> None:
    cost = CostModel(small(), plain(kernel_s=1e-6), tp=1)
    assert cost.forward_ns([], contexts(1)).total_ns == 4 * LAYER_KERNELS * 1_000


def test_short_kernels_read_and_write_what_matrices_take_and_give() -> None:
    machine = plain(short_bandwidth=1e9)
    elements = 4 * 2 * 4 * 512 + 10**6 // 512  # hidden states, and beside every matrix
    alone = CostModel(small(), machine, tp=1).forward_ns([(0, 1000)], NO_CONTEXT).total_ns
    assert alone == pytest.approx(1000 * 2 * elements, rel=1e-3)
    shared = CostModel(small(), machine, tp=4).forward_ns([(0, 1000)], NO_CONTEXT).total_ns
    assert shared == pytest.approx(1000 * 2 * (4 * 2 * 4 * 512 + 10**6 / 512 / 4), rel=1e-3)
