"""The cost of steps: each term against its closed form, and steps against each other."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import sqrt
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
from hicache.models.cost import EXPERT_KERNELS, IMBALANCE, LAYER_KERNELS, CostModel, Rates
from hicache.models.plausible import CONSTANTS, FACTORS
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
# models whose files say that the default devices are too few for this trace
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
LLAMA = COSTS["llama3_8b"]


def plain(*, tile_tokens: int = 1, **rates: float) -> HardwareConfig:
    """Return a machine on which only the operations named in `rates` take time."""
    flat = {name: rates.get(name, 1e30) for name in HardwareConfig.__dataclass_fields__}
    fields: dict[str, Any] = {"name": "plain", "num_devices": 4}
    for name, field in HardwareConfig.__dataclass_fields__.items():
        if field.type is RateTable:
            fields[name] = RateTable(size=[1], rate=[flat[name]])
        elif field.type is Figure:
            fields[name] = Figure(value=flat[name])
    for name in (*CONSTANTS, "activation_bytes"):
        fields[name] = Figure(value=rates.get(name, 0.0))
    for name in FACTORS:
        fields[name] = Figure(value=rates.get(name, 1.0))
    return HardwareConfig(**fields, tile_tokens=tile_tokens)


def small(**fields: Any) -> ModelConfig:
    """Return a model of four layers of full attention, with a million dense parameters."""
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


def step_ns(
    *extends: tuple[int, int],
    lens: Sequence[int] = (),
    shape: ModelConfig | None = None,
    tp: int = 1,
    saved_states: int = 0,
    **machine: float,
) -> int:
    """Return the duration in ns of a step of `shape` on the machine `plain(**machine)`."""
    cost = CostModel(shape or small(), plain(**machine), tp=tp)
    return cost.forward_ns(extends, contexts(*lens), saved_states=saved_states).total_ns


def step_ends(
    cost: CostModel, lens: Sequence[int], num_steps: int, *, now_ns: int = 0, looks: int = 1
) -> list[int]:
    """Return the ends in ns of decode steps, priced in `looks` calls that each reach further."""
    more = cost.decode_ends_ns(lens, num_steps, now_ns)
    ends = StepEnds(next(more), more)
    first_ns = ends.known[0]
    for part in range(1, looks):
        ends.look(now_ns + (first_ns - now_ns) * num_steps * part // looks)
    ends.look(NEVER)
    return ends.known


STATES = {
    "num_full_layers": 0,
    "num_mamba_layers": 4,
    "recurrent_heads": 4,
    "recurrent_head_dim": 32,
    "recurrent_state_dim": 16,
}
MAMBA, DELTA = (small(pattern=letter, **STATES) for letter in "MD")
GROUPS = {"recurrent_groups": 3, "recurrent_key_heads": 5}
WINDOW = small(pattern="S", num_full_layers=0, num_swa_layers=4, window_len=30)
RESTARTS = replace(WINDOW, window_restarts=True)
HALF_WINDOW = small(pattern="F S", num_full_layers=2, num_swa_layers=2, window_len=50)
EXPERTS = {
    "dense_params": 0,
    "num_moe_layers": 4,
    "num_experts": 10,
    "experts_per_token": 2,
    "expert_params": 1000,
}
SPARSE = small(**EXPERTS, expert_width=800)
EXPERT_FLOPS = 4 * 2 * 1000 * 2 * 1000  # of 1,000 tokens
HEAD = small(dense_params=0, head_params=10**6)
NO_PARAMS = small(dense_params=0)
KEY_BYTES = 4 * 64 * 2 * 2  # of a token in one layer
PAIR_FLOPS = 4 * 8 * (64 + 64) * 2  # of a query and a key in four layers
MATRICES = {"gemm_bf16": 1e12, "weight_bandwidth": 1e12}
KEYS = {"decode_bandwidth": 1e9}
PAIRS = {"attention_d64": 1e12}

# by term: nanoseconds, extends, and the other arguments of `step_ns`
TERMS: dict[str, tuple[float, list[tuple[int, int]], dict[str, Any]]] = {
    "a step": (1e6, [], {"step_s": 0.001}),
    "flops of matrices, for many tokens": (2e6, [(0, 1000)], MATRICES),
    "bytes of matrices, for few tokens": (2000, [], {"lens": [1], **MATRICES}),
    # [15, 17) is in two tiles, [32, 33) in one, and a decoded token in one
    "whole tiles of each sequence": (
        4 * 16 * 2000, [(15, 17), (32, 33)], {"lens": [7], "gemm_bf16": 1e12, "tile_tokens": 16},
    ),
    "each extended sequence": (
        5e6, [(0, 8), (4, 5)], {"lens": [7], "step_s": 0.001, "extend_s": 0.002},
    ),
    "pairs of full attention": (
        (100 * 101 // 2 - 40 * 41 // 2) * PAIR_FLOPS * 1e-3, [(40, 100)], PAIRS,
    ),
    "pairs in a window": (
        sum(min(end, 30) for end in range(21, 101)) * PAIR_FLOPS * 1e-3, [(20, 100)],
        {"shape": WINDOW, **PAIRS},
    ),
    "pairs since the last multiple of a window that restarts": (
        sum(place % 30 + 1 for place in range(20, 100)) * PAIR_FLOPS * 1e-3, [(20, 100)],
        {"shape": RESTARTS, **PAIRS},
    ),
    "whole query heads on each device": (
        5050 * 4 * 2 * 128 * 2, [(0, 100)],
        {"shape": small(num_query_heads=6), "tp": 4, "attention_d64": 1e9},
    ),
    **{
        f"{length} keys of a window that restarts, {name}": (
            4 * num_keys * KEY_BYTES, extends, {"shape": RESTARTS, "lens": lens, **KEYS},
        )
        for length, num_keys in ((30, 30), (31, 1), (100, 10))
        for name, extends, lens in (
            ("decoded", [], [length]), ("extended", [(length - 1, length)], []),
        )
    },
    "keys of decoded contexts": (
        (2 * (30 + 400) + 2 * (30 + 50)) * KEY_BYTES, [],
        {"shape": HALF_WINDOW, "lens": [30, 400], **KEYS},
    ),
    "keys before extended queries, and their own": (4 * 107 * KEY_BYTES, [(99, 100), (0, 7)], KEYS),
    "keys of a full window": (4 * 31 * KEY_BYTES, [(99, 100)], {"shape": WINDOW, **KEYS}),
    "keys of a short window": (4 * 10 * KEY_BYTES, [(9, 10)], {"shape": WINDOW, **KEYS}),
    **{
        f"recurrence of tokens from {start} on": (
            4 * 10 * 4 * 32 * 16, [(start, start + 10)],
            {"shape": DELTA, "delta_rate": 1e9, "tile_tokens": 16},
        )
        for start in (0, 5000)
    },
    **{
        f"states of {len(lens)} decoded sequences, {shape.pattern}": (
            2 * len(lens) * shape.mamba_slot_bytes, [],
            {"shape": shape, "lens": lens, "state_bandwidth": 1e9},
        )
        for shape in (MAMBA, DELTA)
        for lens in ([10], [10, 4000, 7])
    },
    "saved states": (
        3 * MAMBA.mamba_slot_bytes, [(0, 10)],
        {"shape": MAMBA, "saved_states": 3, "tp": 2, "state_bandwidth": 1e9},
    ),
    **{
        f"convolution of {groups} groups": (
            4 * 100 * (4 * 32 + 2 * groups * 16) / 2, [(0, 100)],
            {"shape": small(pattern=letter, **STATES, **GROUPS), "tp": 2, "conv_rate": 1e9},
        )
        for letter, groups in (("M", 3), ("D", 5))
    },
    "flops of the head": (6000, [(0, 500)], {"shape": HEAD, "lens": [7, 9], "gemm_bf16": 1e12}),
    "bytes of the head": (
        2000, [(0, 500)], {"shape": HEAD, "lens": [7, 9], "weight_bandwidth": 1e12},
    ),
    "matrices on four devices, and all-reduces": (
        2e6 / 4 + 4 * 2 * 1000, [(0, 1000)], {"tp": 4, "gemm_bf16": 1e12, "all_reduce_s": 1e-6},
    ),
    **{
        f"all-reduces of {tp} devices, {name}": (
            each_ns, [(0, 100)],
            {"shape": NO_PARAMS, "tp": tp, f"all_reduce_{tp}": 1e9, "all_reduce_s": least_s},
        )
        for tp in (2, 4)
        for name, each_ns, least_s in (("long", 8 * 100 * 512 * 2, 0.0), ("short", 8e6, 1e-3))
    },
    "kernels of layers": (4 * LAYER_KERNELS * 1000, [], {"lens": [1], "kernel_s": 1e-6}),
    "kernels of experts": (
        4 * (LAYER_KERNELS + EXPERT_KERNELS) * 1000, [],
        {"shape": SPARSE, "lens": [1], "kernel_s": 1e-6},
    ),
    **{
        f"experts on {tp} devices, whose kernels are not divided": (
            400 * (LAYER_KERNELS + EXPERT_KERNELS) + (EXPERT_FLOPS - 400 * EXPERT_KERNELS) / tp,
            [(0, 1000)], {"shape": SPARSE, "tp": tp, "moe_wide": 1e9, "kernel_s": 1e-7},
        )
        for tp in (1, 2, 4)
    },
    # hidden states of each layer, and elements beside each matrix
    **{
        f"elements that short kernels move on {tp} devices": (
            1000 * 2 * (4 * 2 * 4 * 512 + 10**6 / 512 / tp), [(0, 1000)],
            {"tp": tp, "short_bandwidth": 1e9},
        )
        for tp in (1, 4)
    },
}  # fmt: skip


@pytest.mark.parametrize("term", TERMS)
def test_each_term_of_a_step_takes_the_time_of_its_closed_form(term):
    expected, extends, options = TERMS[term]
    assert step_ns(*extends, **options) == pytest.approx(round(expected), rel=1e-6)


def test_weights_of_experts_that_no_token_chose_are_not_read():
    shape = small(**EXPERTS | {"num_experts": 100}, expert_width=512)
    assert step_ns(lens=[9], shape=shape, weight_bandwidth=1e9) < 9 * 4 * 2 * 1000 * 2
    assert step_ns(lens=[9, 9], shape=shape, weight_bandwidth=1e9) > 4 * 2 * 1000 * 2


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
def test_experts_are_computed_at_the_rate_of_their_format_and_width(rate, fields):
    shape = small(**EXPERTS, **fields)
    rates = {"moe_narrow", "moe_wide", "moe_two_matrix", "moe_fp8_wide", "moe_mxfp4", rate}
    found = {each: step_ns((0, 1000), shape=shape, **{each: 1e9}) for each in rates}
    assert {each for each, ns in found.items() if ns} == {rate}
    assert found[rate] == EXPERT_FLOPS


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_tp_slices_of_experts_are_slower_and_ep_waits_for_its_busiest_group(tp, ep):
    slices = RateTable(size=[200, 800], rate=[1e9, 4e9])
    machine = replace(plain(moe_wide=1e9), moe_slice=slices)
    cost = CostModel(SPARSE, machine, tp=tp, ep=ep)
    assert cost.forward_ns([(0, 1000)], NO_CONTEXT).total_ns == pytest.approx(
        EXPERT_FLOPS / tp * (1 + 1 / ep - 1 / tp) * ep**IMBALANCE
    )


def test_padded_chunks_pay_for_earlier_tokens_with_the_length_of_the_longest_chunk():
    shape, machine = small(num_query_heads=1, head_dim=64), plain(attention_d64=1e9)

    def more_ns(*extends: tuple[int, int]) -> int:
        padded, exact = (CostModel(shape, machine, tp=1, pads_chunks=it) for it in (True, False))
        return (
            padded.forward_ns(extends, NO_CONTEXT).total_ns
            - exact.forward_ns(extends, NO_CONTEXT).total_ns
        )

    assert more_ns((500, 600)) == more_ns((0, 3), (500, 600)) == 0
    missing = 97 * 500  # pairs of a query and a key, 4 x 64 flops each
    assert more_ns((0, 100), (500, 503)) == pytest.approx(missing * 4 * 64 * 4, abs=1)


@pytest.mark.parametrize(("head_dim", "table"), [(64, "attention_d64"), (65, "attention_d128")])
def test_the_rate_of_attention_is_that_of_the_mean_length_weighted_by_pairs(head_dim, table):
    rising = RateTable(size=[1, 1000], rate=[1e9, 1000e9])  # a gigaflop for every token
    machine = replace(plain(), **{table: rising})
    cost = CostModel(small(head_dim=head_dim), machine, tp=1)
    each = [100 * 101 // 2, 50 * 51 // 2]
    pairs, squares = sum(each), sum(count**2 for count in each)
    flops = 4 * pairs * 8 * 2 * head_dim * 2
    of_two_ns = cost.forward_ns([(0, 100), (0, 50)], NO_CONTEXT).total_ns
    assert of_two_ns == round(flops / sqrt(2 * squares / pairs))
    once, twice = (cost.forward_ns([(0, 100)] * n, NO_CONTEXT).total_ns for n in (1, 2))
    assert twice == pytest.approx(2 * once, abs=1)
    with pytest.raises(ValueError, match=rf"hardware\.{table} must have at least one size"):
        CostModel(small(head_dim=head_dim), replace(machine, **{table: RateTable()}), tp=1)


@pytest.mark.parametrize("copying_s", [0.0, 1e-4])
def test_copies_slow_a_step_only_while_they_last(copying_s):
    alone = LLAMA.forward_ns([(0, 512)], contexts(100))
    beside = LLAMA.forward_ns([(0, 512)], contexts(100), slowdown=1.25, copying_s=copying_s)
    # beside copies the step computes 1 / 1.25 of what it computes alone
    assert beside.total_ns - alone.total_ns == pytest.approx(copying_s * 0.2 * 1e9, abs=1)
    slowed = LLAMA.forward_ns([(0, 512)], contexts(100), slowdown=2.0)
    assert slowed.compute_ns == pytest.approx(2 * alone.compute_ns, abs=1)


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
@pytest.mark.parametrize("rate", [1e8, 4e8, 1e9, 1e10])
@pytest.mark.parametrize("loaded", ["all", "none", 0, 1, 2, 3, 4])
def test_a_layer_waits_for_its_own_load_and_those_of_layers_before(loaded, rate, slowdown):
    kinds = {"num_full_layers": 2, "num_swa_layers": 1, "num_mamba_layers": 2, "window_len": 64}
    shape = small(**STATES | kinds | {"pattern": "F M S D F", "num_layers": 5})
    machine = plain(
        gemm_bf16=1e11,
        attention_d64=1e10,
        attention_window=1e9,
        mamba_rate=1e9,
        delta_rate=1e9,
        step_s=0.001,
    )
    cost = CostModel(shape, machine, tp=1)
    full_s = 1000 * 1001 // 2 * 8 * 256 / 1e10
    swa_s = (64 * 65 // 2 + 936 * 64) * 8 * 256 / 1e9
    scan_s = 1000 * 4 * 32 * 16 / 1e9
    even_s = 2 * 1000 * 10**6 / 1e11 / 5
    layer_bytes = cost.layer_bytes(4000, 64, 1)
    if loaded == "none":
        layer_bytes = cost.layer_bytes(0, 0, 0)
    elif loaded != "all":
        layer_bytes = 3 * rate * np.eye(5)[loaded]
    finish_s, loaded_s = 0.001 * slowdown, 0.0
    for own_s, num_bytes in zip([full_s, scan_s, swa_s, scan_s, full_s], layer_bytes, strict=True):
        loaded_s += num_bytes / rate
        finish_s = max(finish_s, loaded_s) + (even_s + own_s) * slowdown
    step = cost.forward_ns(
        [(0, 1000)], NO_CONTEXT, load_layer_bytes=layer_bytes, load_rate=rate, slowdown=slowdown
    )
    assert step.total_ns == pytest.approx(finish_s * 1e9, abs=2)
    assert step.total_ns == step.compute_ns + step.load_stall_ns


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_layers_add_up_to_what_is_copied_to_all_devices(name):
    cost = COSTS[name]
    page = 128  # whole entries of compressed KV
    full, swa, state = model_kinds(model(name), page, cost.tp).page_bytes
    tokens, windows, states = (
        cost.layer_bytes(*counts) for counts in ((7 * page, 0, 0), (0, 5 * page, 0), (0, 0, 2))
    )
    assert [each.sum() for each in (tokens, windows, states)] == [7 * full, 5 * swa, 2 * state]
    assert (cost.layer_bytes(7 * page, 5 * page, 2) == tokens + windows + states).all()


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None)
@given(
    lens=st.lists(st.integers(1, 60_000) | st.integers(1000, 1030), min_size=1, max_size=40),
    num_steps=st.integers(1, 60),
    looks=st.integers(1, 5),
)
def test_decode_steps_priced_together_end_like_steps_priced_alone(name, lens, num_steps, looks):
    cost = COSTS[name]
    together = step_ends(cost, lens, num_steps, now_ns=5, looks=looks)
    alone = [
        cost.forward_ns([], [each + step for each in lens]).total_ns for step in range(num_steps)
    ]
    assert together == list(accumulate(alone, initial=5))[1:]


# 4 KiB a token and layer over 4 devices, and 1 KiB; the second table jumps between two steps
@pytest.mark.parametrize(
    ("cost", "first"),
    [
        (LLAMA, int(H200.decode_bandwidth.size[0] / 1024) - 20),
        (
            CostModel(
                small(),
                replace(
                    plain(),
                    decode_bandwidth=RateTable(size=[100.5 * 1024, 101.5 * 1024], rate=[1e9, 1e12]),
                ),
                tp=1,
            ),
            95,
        ),
    ],
    ids=["h200", "jump"],
)
def test_steps_priced_together_are_exact_across_a_point_of_the_bandwidth_table(cost, first):
    for looks in (1, 3):
        together = step_ends(cost, [first], 40, looks=looks)
        alone = [cost.forward_ns([], contexts(first + step)).total_ns for step in range(40)]
        assert together == list(accumulate(alone))


@pytest.mark.parametrize("name", MODELS)
def test_a_longer_cached_prefix_never_makes_a_prefill_slower(name):
    seconds = [COSTS[name].prefill_s(cached, 8000) for cached in range(0, 8000, 400)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({"chunk_tokens": 1000}, [(100, 1100), (1100, 2100), (2100, 2500)]),
        ({}, [(100, 8292), (8292, 10_000)]),
    ],
)
def test_the_time_of_a_prefill_is_the_sum_of_its_chunks(options, chunks):
    wanted = sum(LLAMA.forward_ns([chunk], NO_CONTEXT).total_ns for chunk in chunks)
    found_s = LLAMA.prefill_s(100, chunks[-1][1], **options)
    assert found_s == pytest.approx(wanted * 1e-9, rel=1e-12)


@pytest.mark.parametrize("name", ["llama3_8b", "gemma3_27b", "deepseek_v4_flash"])
@pytest.mark.parametrize(
    ("cached", "output_len", "middle"), [(900, 1, 1000), (0, 2, 1001), (0, 9, 1004), (0, 100, 1050)]
)
def test_a_request_occupies_the_machine_for_its_prefill_and_its_share_of_each_decode_step(
    name, cached, output_len, middle
):
    cost = COSTS[name]
    decode_ns = cost.forward_ns([], np.full(16, middle, np.int64)).total_ns
    share_s = (output_len - 1) * decode_ns / 16 * 1e-9
    found_s = cost.offered_s(cached, 1000, output_len, 16)
    assert found_s == pytest.approx(cost.prefill_s(cached, 1000) + share_s, rel=1e-12)


def test_the_operations_of_a_part_are_those_of_all_queries_with_the_keys_that_they_read():
    shape = model("deepseek_v4_flash")
    assert any(part.top for part in shape.parts)
    wanted = 0.0
    for part in shape.parts:
        reach = part.window_len or part.top * part.tokens or 10**9
        tokens = sum(min(query + 1, reach) for query in range(1000, 3000))
        one = 2 * part.query_heads * part.query_dim  # a multiplication and an addition
        num_layers = part.num_layers + sum(part.is_in(word) for word in shape.layer_words)
        wanted += num_layers * one * tokens / part.tokens
    unread = replace(shape, parts=[replace(part, query_heads=0) for part in shape.parts])
    whole, bare = (CostModel(each, H200, tp=2) for each in (shape, unread))
    assert whole.flops(1000, 3000) - bare.flops(1000, 3000) == pytest.approx(wanted)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TOO_LARGE])
def test_the_default_devices_serve_the_conversation_trace_without_a_cache(name):
    seconds = [COSTS[name].offered_s(0, prompt, answer, 32) for prompt, answer in CONVERSATION]
    assert CONVERSATION_RATE * sum(seconds) / len(seconds) <= 0.9


@pytest.mark.parametrize("name", MODELS)
def test_a_prefill_is_no_faster_than_the_peak_of_its_devices(name):
    """989 TFLOPS in bf16 and twice that in fp8 is the data sheet's dense peak of an H200."""
    shape, cost = model(name), COSTS[name]
    active = shape.dense_params + (
        shape.num_moe_layers * shape.experts_per_token * shape.expert_params
    )
    peak = 989e12 * (2 if shape.dense_param_bytes == 1 else 1)
    assert cost.prefill_s(0, 8192) * cost.tp * peak > 2 * 8192 * active


def test_the_cache_gets_the_memory_that_weights_and_activations_leave():
    usable = H200.device_memory_bytes.value - H200.activation_bytes.value
    assert LLAMA.free_device_bytes == 4 * usable - LLAMA.model.weight_bytes


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_weights_must_leave_memory_for_the_cache(spare):
    weights = small().weight_bytes
    machine = plain(device_memory_bytes=weights + spare + 7.0, activation_bytes=7.0)
    if spare <= 0:
        with pytest.raises(ValueError, match=r"raise parallel\.tp"):
            CostModel(small(), machine, tp=1)
        return
    assert CostModel(small(), machine, tp=1).free_device_bytes == spare


@pytest.mark.parametrize(
    ("name", "tp", "told"),
    [
        ("qwen3_next_80b", 1, r"qwen3_next_80b \(159\.3 GB\) do not fit on 1 device"),
        ("llama3_8b", 0, "between 1 and the 32 devices of h200, got 0"),
        ("llama3_8b", 33, "between 1 and the 32 devices of h200, got 33"),
    ],
)
def test_too_few_or_too_many_devices_are_refused(name, tp, told):
    with pytest.raises(ValueError, match=told):
        CostModel(model(name), H200, tp=tp)


@pytest.mark.parametrize("size", [0.5, 1.0, 2.0, 3.0, 7.9, 8.0, 100.0])
def test_a_rate_is_linear_between_points_and_constant_outside(size):
    table = RateTable(size=[1, 2, 8], rate=[10, 30, 60])
    wanted = 10 + 20 * (size - 1) if size < 2 else 30 + 5 * (size - 2)
    assert Rates(table, "some").at(size) == min(60.0, max(10.0, wanted))


def test_kernels_start_sooner_in_the_graph_of_a_decode_step_than_in_a_prefill():
    kernels = {"kernel_s": 4e-6}
    graph = {**kernels, "graph_kernel_s": 1e-6}
    layers = small().num_layers * LAYER_KERNELS
    assert step_ns(lens=[9], **kernels) == layers * 4000
    assert step_ns(lens=[9], **graph) == layers * 1000
    assert step_ns((0, 9), lens=[9], **graph) == layers * 4000


def test_in_a_graph_the_experts_of_one_token_take_the_time_to_read_their_weights():
    slow = {"moe_wide": 1e12, "weight_bandwidth": 1e12, "kernel_s": 4e-6}
    shape = small(num_moe_layers=4, num_experts=8, experts_per_token=1, expert_params=10**7,
                  expert_width=768, dense_params=0)  # fmt: skip
    of_layer = EXPERT_KERNELS * 1000 + 20_000  # 20 MB at 1 TB/s, which the table's time exceeds
    many = [
        step_ns(lens=[9] * count, shape=shape, **{**slow, "moe_wide": 1e11}) for count in (1, 2)
    ]
    in_graph = [
        step_ns(lens=[9] * count, shape=shape, graph_kernel_s=1e-6, **{**slow, "moe_wide": 1e11})
        for count in (1, 2)
    ]
    kernels = shape.num_layers * LAYER_KERNELS * 1000
    assert in_graph[0] == pytest.approx(4 * of_layer + kernels, rel=1e-6)
    # the second token costs what it does in the table
    assert in_graph[1] - in_graph[0] == pytest.approx(many[1] - many[0], rel=1e-6)


@pytest.mark.parametrize(("is_asynchronous", "wanted"), [(False, 50_000), (True, 31_000)])
def test_cpu_work_overlaps_with_the_device_if_steps_are_asynchronous(is_asynchronous, wanted):
    rates = {"step_s": 1e-6, "kernel_s": 0.475e-6, "request_s": 10e-6}
    cost = CostModel(small(), plain(**rates), tp=1, is_asynchronous=is_asynchronous)
    assert cost.forward_ns([], contexts(9, 9, 9)).total_ns == wanted
    assert step_ends(cost, [9, 9, 9], 2) == [wanted, 2 * wanted]


def test_the_prefill_factor_scales_neither_constants_nor_decode_steps():
    rates = {"step_s": 1e-3, "gemm_bf16": 1e12}
    once, twice = (step_ns((0, 1000), prefill_factor=f, **rates) for f in (1.0, 2.0))
    assert twice - once == once - 1_000_000
    assert step_ns(lens=[9], **rates) == step_ns(lens=[9], prefill_factor=2.0, **rates)
