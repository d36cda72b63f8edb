"""Terms of a step's cost, each on a machine where nothing else takes time."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from hicache.models import RateTable
from hicache.models.cost import (
    EXPERT_KERNELS,
    IMBALANCE,
    LAYER_KERNELS,
    CostModel,
)
from tests.models.test_cost import COSTS, NO_CONTEXT, contexts, plain, small


def recurrent(pattern: str, num_layers: int = 4) -> CostModel:
    shape = small(
        pattern=pattern,
        num_full_layers=0,
        num_layers=num_layers,
        num_mamba_layers=num_layers,
        recurrent_heads=4,
        recurrent_head_dim=32,
        recurrent_state_dim=16,
    )
    return CostModel(shape, plain(state_bandwidth=1e9), tp=1)


@pytest.mark.parametrize("pattern", ["M", "D"])
def test_decoding_reads_and_writes_the_state_of_each_sequence(pattern: str) -> None:
    cost = recurrent(pattern)
    state_bytes = cost.model.mamba_slot_bytes
    assert cost.forward_ns([], contexts(10)).total_ns == 2 * state_bytes
    assert cost.forward_ns([], contexts(10, 4000, 7)).total_ns == 3 * 2 * state_bytes


def experts(rate: str, *, tp: int = 1, **fields: float) -> int:
    """Nanoseconds of 1,000 tokens on a machine that is slow at one sort of experts alone."""
    shape = small(
        dense_params=0,
        num_moe_layers=4,
        num_experts=10,
        experts_per_token=2,
        expert_params=1000,
        **fields,
    )
    cost = CostModel(shape, plain(**{rate: 1e9}), tp=tp)
    return cost.forward_ns([(0, 1000)], NO_CONTEXT).total_ns


@pytest.mark.parametrize(
    ("rate", "fields"),
    [
        ("moe_narrow", {"expert_width": 512}),
        ("moe_narrow", {"expert_width": 640}),
        ("moe_wide", {"expert_width": 641}),
        ("moe_wide", {"expert_width": 1408}),
        ("moe_fp8_narrow", {"expert_width": 512, "expert_param_bytes": 1}),
        ("moe_fp8_wide", {"expert_width": 641, "expert_param_bytes": 1}),
        ("moe_mxfp4", {"expert_width": 512, "expert_param_bytes": 0.53}),
        ("moe_two_matrix", {"expert_width": 512, "expert_matrices": 2}),
        ("moe_two_matrix", {"expert_width": 1408, "expert_matrices": 2}),
    ],
)
def test_experts_are_computed_at_the_rate_of_their_sort(
    rate: str, fields: dict[str, float]
) -> None:
    others = {"moe_narrow", "moe_wide", "moe_two_matrix", "moe_fp8_wide", "moe_mxfp4"} - {rate}
    assert experts(rate, **fields) == 4 * 2 * 1000 * 2 * 1000
    assert {experts(other, **fields) for other in others} == {0}


SPARSE = small(
    dense_params=0,
    num_moe_layers=4,
    num_experts=10,
    experts_per_token=2,
    expert_params=1000,
    expert_width=800,
)


def test_a_slice_of_an_expert_is_computed_more_slowly_than_the_whole() -> None:
    slices = RateTable(size=[200, 800], rate=[1e9, 4e9])
    machine = replace(plain(moe_wide=1e9), moe_slice=slices)
    flops = 4 * 2 * 1000 * 2 * 1000
    times = [
        CostModel(SPARSE, machine, tp=tp).forward_ns([(0, 1000)], NO_CONTEXT).total_ns
        for tp in (1, 4)
    ]
    assert times == pytest.approx([flops, flops / 4 * (1 + 1 - 1 / 4)])


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_expert_parallelism_keeps_experts_wide_and_has_a_busiest_group(ep: int) -> None:
    slices = RateTable(size=[200, 800], rate=[1e9, 4e9])
    machine = replace(plain(moe_wide=1e9), moe_slice=slices)
    cost = CostModel(SPARSE, machine, tp=4, ep=ep)
    seconds_each = 1 + 1 / {1: 1, 2: 2, 4: 4}[ep] - 1 / 4
    assert cost.forward_ns([(0, 1000)], NO_CONTEXT).total_ns == pytest.approx(
        4 * 2 * 1000 * 2 * 1000 / 4 * seconds_each * ep**IMBALANCE
    )


def test_experts_take_their_kernels_at_the_least() -> None:
    cost = CostModel(SPARSE, plain(kernel_s=1e-6), tp=1)
    kernels = 4 * (LAYER_KERNELS + EXPERT_KERNELS)
    assert cost.forward_ns([], contexts(1)).total_ns == kernels * 1000


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tensor_parallelism_divides_experts_but_not_their_kernels(tp: int) -> None:
    whole_ns = 4 * 2 * 1000 * 2 * 1000  # four layers at 1 flop a nanosecond
    layers_ns, experts_ns = 4 * LAYER_KERNELS * 100, 4 * EXPERT_KERNELS * 100
    cost = CostModel(SPARSE, plain(moe_wide=1e9, kernel_s=1e-7), tp=tp)
    assert cost.forward_ns([(0, 1000)], NO_CONTEXT).total_ns == pytest.approx(
        layers_ns + experts_ns + (whole_ns - experts_ns) / tp
    )


def test_padded_chunks_attend_to_what_is_before_them_as_long_as_the_longest() -> None:
    shape = small(num_query_heads=1, head_dim=64)
    machine = plain(attention_d64=1e9)
    plainly, padded = (CostModel(shape, machine, tp=1, pads_chunks=pads) for pads in (False, True))

    def ns(cost: CostModel, *extends: tuple[int, int]) -> int:
        return cost.forward_ns(extends, NO_CONTEXT).total_ns

    assert ns(padded, (500, 600)) == ns(plainly, (500, 600))
    assert ns(padded, (0, 3), (500, 600)) == ns(plainly, (0, 3), (500, 600))
    missing = 97 * 500  # pairs of a query and a key, 4 x 64 flops each
    more_ns = ns(padded, (0, 100), (500, 503)) - ns(plainly, (0, 100), (500, 503))
    assert more_ns == pytest.approx(missing * 4 * 64 * shape.num_full_layers, abs=1)


@pytest.mark.parametrize(("output_len", "middle"), [(2, 1001), (9, 1004), (100, 1050)])
def test_a_request_asks_for_its_prefill_and_its_share_of_each_decode_step(
    output_len: int, middle: int
) -> None:
    cost = COSTS["llama3_8b"]
    step_ns = cost.forward_ns([], np.full(16, middle, np.int64)).total_ns
    share_s = (output_len - 1) * step_ns / 16 * 1e-9
    asked = cost.offered_s(0, 1000, output_len, 16)
    assert asked == pytest.approx(cost.prefill_s(0, 1000) + share_s, rel=1e-12)


def test_what_is_cached_is_not_asked_for_again() -> None:
    cost = COSTS["llama3_8b"]
    assert cost.offered_s(900, 1000, 1, 16) == cost.prefill_s(900, 1000)


@pytest.mark.parametrize(("pattern", "waits"), [("F D D D", True), ("D D D F", False)])
def test_layers_that_need_nothing_hide_the_load_of_a_later_one(
    pattern: str, *, waits: bool
) -> None:
    shape = small(
        pattern=pattern,
        num_full_layers=1,
        num_mamba_layers=3,
        recurrent_heads=4,
        recurrent_head_dim=32,
        recurrent_state_dim=16,
    )
    cost = CostModel(shape, plain(delta_rate=1e9), tp=1)
    computing_s = cost.forward_ns([(0, 1000)], NO_CONTEXT).total_ns * 1e-9
    layer_bytes = cost.layer_bytes(4000, 0, 0)
    rate = float(layer_bytes.sum()) / (computing_s * 0.9)  # loaded shortly before the last layer
    step = cost.forward_ns([(0, 1000)], NO_CONTEXT, load_layer_bytes=layer_bytes, load_rate=rate)
    assert (step.load_stall_ns > 0) == waits
    late = cost.forward_ns(
        [(0, 1000)], NO_CONTEXT, load_layer_bytes=layer_bytes, load_rate=rate / 9
    )
    assert late.load_stall_ns > 0


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
@pytest.mark.parametrize("layer", range(5))
def test_a_layer_waits_for_what_is_not_hidden_by_the_layers_before_it(
    layer: int, slowdown: float
) -> None:
    shape = small(
        pattern="F M S D F",
        num_layers=5,
        num_full_layers=2,
        num_swa_layers=1,
        num_mamba_layers=2,
        window_len=64,
        recurrent_heads=4,
        recurrent_head_dim=32,
        recurrent_state_dim=16,
    )
    machine = plain(
        gemm_bf16=1e11,
        attention_d64=1e10,
        attention_window=1e9,
        mamba_rate=1e9,
        delta_rate=1e9,
        step_s=0.001,
    )
    full_s = 1000 * 1001 // 2 * 8 * 256 / 1e10
    swa_s = (64 * 65 // 2 + 936 * 64) * 8 * 256 / 1e9
    scan_s = 1000 * 4 * 32 * 16 / 1e9
    even_s = 2 * 1000 * 10**6 / 1e11 / 5
    before_s = 0.001 + sum(
        even_s + own_s for own_s in [full_s, scan_s, swa_s, scan_s, full_s][:layer]
    )
    layer_bytes = np.zeros(5)
    layer_bytes[layer] = 3e9
    step = CostModel(shape, machine, tp=1).forward_ns(
        [(0, 1000)], NO_CONTEXT, load_layer_bytes=layer_bytes, load_rate=1e9, slowdown=slowdown
    )
    assert step.load_stall_ns == pytest.approx((3 - before_s * slowdown) * 1e9, abs=2)


@pytest.mark.parametrize(("pattern", "groups"), [("M", 3), ("D", 5)])
def test_a_recurrent_layer_convolves_its_heads_and_what_its_groups_share(
    pattern: str, groups: int
) -> None:
    shape = small(
        pattern=pattern,
        num_full_layers=0,
        num_mamba_layers=4,
        recurrent_heads=4,
        recurrent_head_dim=32,
        recurrent_state_dim=16,
        recurrent_groups=3,
        recurrent_key_heads=5,
    )
    cost = CostModel(shape, plain(conv_rate=1e9), tp=2)
    channels = 4 * 32 + 2 * groups * 16
    assert cost.forward_ns([(0, 100)], NO_CONTEXT).total_ns == 4 * 100 * channels / 2


def test_queries_read_all_keys_before_them_and_themselves() -> None:
    cost = CostModel(small(), plain(decode_bandwidth=1e9), tp=1)
    token_bytes = 4 * 64 * 2 * 2
    assert cost.forward_ns([(99, 100), (0, 7)], NO_CONTEXT).total_ns == 4 * 107 * token_bytes


@pytest.mark.parametrize(("head_dim", "table"), [(64, "attention_d64"), (65, "attention_d128")])
def test_the_rate_of_attention_is_that_of_the_prompts_that_have_most_pairs(
    head_dim: int, table: str
) -> None:
    rising = RateTable(size=[1, 1000], rate=[1e9, 1000e9])  # a gigaflop for every token
    machine = replace(plain(), **{table: rising})
    cost = CostModel(small(head_dim=head_dim), machine, tp=1)
    each = [100 * 101 // 2, 50 * 51 // 2]
    pairs, squares = sum(each), sum(count**2 for count in each)
    flops = 4 * pairs * 8 * 2 * head_dim * 2
    step_ns = cost.forward_ns([(0, 100), (0, 50)], NO_CONTEXT).total_ns
    assert step_ns == round(flops / sqrt(2 * squares / pairs))
    once, twice = (
        cost.forward_ns([(0, 100)] * count, NO_CONTEXT).total_ns for count in (1, 2)
    )  # packed prompts are as fast as one
    assert twice == pytest.approx(2 * once, abs=1)
    with pytest.raises(ValueError, match=rf"hardware\.{table} must have at least one size"):
        CostModel(small(head_dim=head_dim), replace(machine, **{table: RateTable()}), tp=1)


def test_a_query_reads_the_window_before_it_and_itself() -> None:
    shape = small(pattern="S", num_full_layers=0, num_swa_layers=4, window_len=30)
    cost = CostModel(shape, plain(decode_bandwidth=1e9), tp=1)
    token_bytes = 4 * 64 * 2 * 2
    assert cost.forward_ns([(99, 100)], NO_CONTEXT).total_ns == 4 * 31 * token_bytes
    assert cost.forward_ns([(9, 10)], NO_CONTEXT).total_ns == 4 * 10 * token_bytes


def test_logits_cost_the_head_of_every_sequence() -> None:
    shape = small(dense_params=0, head_params=10**6)
    cost = CostModel(shape, plain(gemm_bf16=1e12), tp=1)
    assert cost.forward_ns([(0, 500)], contexts(7, 9)).total_ns == 3 * 2_000
    slow_to_read = CostModel(shape, plain(weight_bandwidth=1e12), tp=1)
    assert slow_to_read.forward_ns([(0, 500)], contexts(7, 9)).total_ns == 2_000


@pytest.mark.parametrize(("tp", "name"), [(2, "all_reduce_2"), (4, "all_reduce_4")])
def test_all_reduces_take_what_the_curve_of_their_devices_says(tp: int, name: str) -> None:
    cost = CostModel(small(dense_params=0), plain(**{name: 1e9}), tp=tp)
    num_reduces, hidden_bytes = 4 * 2, 512 * 2
    expected_ns = num_reduces * 100 * hidden_bytes
    assert cost.forward_ns([(0, 100)], NO_CONTEXT).total_ns == expected_ns
    slow = CostModel(small(dense_params=0), plain(all_reduce_s=1e-3, **{name: 1e9}), tp=tp)
    assert slow.forward_ns([(0, 100)], NO_CONTEXT).total_ns == num_reduces * 10**6


def test_a_recurrence_runs_over_tokens_and_not_over_tiles() -> None:
    shape = small(
        pattern="D",
        dense_params=0,
        num_full_layers=0,
        num_mamba_layers=4,
        recurrent_heads=4,
        recurrent_head_dim=32,
        recurrent_state_dim=16,
    )
    cost = CostModel(shape, plain(delta_rate=1e9, tile_tokens=16), tp=1)
    assert cost.forward_ns([(0, 10)], NO_CONTEXT).total_ns == 4 * 10 * 4 * 32 * 16


def test_a_device_computes_whole_query_heads() -> None:
    six, eight = (
        CostModel(small(num_query_heads=heads), plain(attention_d64=1e9), tp=4) for heads in (6, 8)
    )
    assert six.forward_ns([(0, 100)], NO_CONTEXT) == eight.forward_ns([(0, 100)], NO_CONTEXT)
