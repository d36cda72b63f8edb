"""Parts of a model: what riders take in pools, links and storage, and what they cost."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from hicache.cache.kinds import FULL, Window
from hicache.engine.deployment import deploy
from hicache.experiment import run
from hicache.memory import model_kinds
from hicache.models import ModelConfig
from hicache.models.cost import CostModel
from hicache.models.shapes import Part
from hicache.runs.schema import config_of
from tests.models.test_cost import H200, contexts, plain, step_ends

# as SGLang keeps them: fp8, and a scale of four bytes
KEYS = Part(
    name="index", letter="I", dim=128, element_bytes=1, scale_bytes=4, query_heads=4, query_dim=128
)


def sparse(*parts: Part, **fields: Any) -> ModelConfig:
    """Latent attention in four layers, two of which keep index keys."""
    shape: dict[str, Any] = {
        "name": "sparse",
        "parts": parts or (KEYS,),
        "pattern": "FtI Ft",
        "num_layers": 4,
        "num_full_layers": 4,
        "latent_dim": 64,
        "num_query_heads": 8,
        "head_dim": 96,
        "value_dim": 64,
        "hidden_size": 512,
        "top_tokens": 256,
        "dense_params": 10**6,
    }
    return ModelConfig(**(shape | fields))


def test_index_keys_share_the_pages_of_full_on_every_device() -> None:
    sizes = model_kinds(sparse(), page_size=16, tp=2)
    assert sizes.numbers == (FULL,)
    assert sizes.page_bytes[FULL] == 2 * 16 * (4 * 64 * 2 + 2 * (128 + 4))


def test_a_page_that_is_kept_in_fewer_bytes_has_plain_index_keys() -> None:
    coded, without = (
        model_kinds(shape, 16, 1, "fp8").page_bytes[FULL]
        for shape in (sparse(), sparse(pattern="Ft", parts=()))
    )
    assert coded - without == 16 * 2 * 132


def test_an_entry_may_stand_for_several_tokens() -> None:
    pooled = replace(KEYS, tokens=4)
    kinds = model_kinds(sparse(pooled), page_size=16, tp=1)
    assert kinds.page_bytes[FULL] == 16 * 4 * 64 * 2 + 4 * 2 * 132
    with pytest.raises(ValueError, match=r"multiple of 4, the tokens of an entry of index, got 6"):
        model_kinds(sparse(pooled), page_size=6, tp=1)


def test_heads_of_a_part_are_dealt_out_to_devices() -> None:
    draft = Part(name="draft", num_layers=1, dim=32, heads=2)
    for tp, copies in ((1, 1), (2, 1), (4, 2)):
        kinds = model_kinds(sparse(draft, pattern="Ft", latent_dim=0, num_kv_heads=8), 1, tp)
        assert kinds.page_bytes[FULL] == 4 * 8 * 160 * 2 + copies * 2 * 32 * 2


def test_a_part_of_a_state_takes_one_entry_a_slot() -> None:
    taps = Part(name="taps", rides_on="mamba", num_layers=3, dim=10, element_bytes=4)
    assert taps.page_bytes(page_size=64) == 40


def test_each_layer_loads_its_own_parts_and_the_last_what_drafts() -> None:
    draft = Part(name="draft", num_layers=1, dim=16)
    cost = CostModel(sparse(KEYS, draft), plain(), tp=2)
    assert cost.layer_bytes(10, 0, 0).tolist() == [
        20 * (128 + each) for each in (132, 0, 132, 2 * 16)
    ]


def test_choosing_tokens_costs_every_pair_and_attending_only_the_chosen_ones() -> None:
    cost = CostModel(sparse(), plain(attention_d128=1e12), tp=1)
    pairs = 1000 * 1001 // 2
    chosen = sum(min(position, 256) for position in range(1, 1001))
    flops = 2 * pairs * 4 * 128 * 2 + 4 * chosen * 8 * (96 + 64) * 2
    assert cost.forward_ns([(0, 1000)], ()).total_ns == round(flops * 1e-3)


def test_a_query_multiplies_an_entry_of_several_tokens_once_and_top_ones_at_most() -> None:
    pooled = replace(KEYS, tokens=4, top=8)
    cost = CostModel(sparse(pooled, latent_dim=1), plain(attention_d128=1e12), tp=1)
    without = CostModel(
        sparse(latent_dim=1, pattern="Ft", parts=()), plain(attention_d128=1e12), tp=1
    )
    pairs = sum(min(position, 32) for position in range(1, 1001))
    more = cost.forward_ns([(0, 1000)], ()).total_ns - without.forward_ns([(0, 1000)], ()).total_ns
    assert more == pytest.approx(2 * pairs / 4 * 4 * 128 * 2 * 1e-3, abs=1)


def test_a_decode_reads_all_index_keys_and_the_chosen_tokens() -> None:
    cost = CostModel(sparse(), plain(decode_bandwidth=1e9), tp=1)
    read = 2 * 132 * (100 + 900) + 4 * 128 * (100 + 256)
    assert cost.forward_ns([], contexts(100, 900)).total_ns == read


@pytest.mark.parametrize("tp", [1, 4])
def test_a_run_of_decodes_costs_what_its_steps_do(tp: int) -> None:
    draft = Part(name="draft", num_layers=1, dim=64, query_heads=8, query_dim=64, top=240)
    cost = CostModel(sparse(KEYS, draft), H200, tp=tp)
    lens = np.array([3, 200, 250, 256, 4000])
    now, ends = 0, []
    for step in range(90):
        now += cost.forward_ns([], [*map(int, lens + step)]).total_ns
        ends.append(now)
    assert step_ends(cost, [*map(int, lens)], 90) == ends


def test_index_keys_are_counted_where_pages_go() -> None:
    told = [
        "workload.limit=40",
        "model=llama3_8b",
        "cache.device.tokens.full=20000",
        "hardware=h200",
    ]
    config = config_of(*told)
    with_keys = replace(
        config,
        model=replace(
            config.model, pattern="FI F", parts=(replace(KEYS, element_bytes=8, scale_bytes=0),)
        ),
    )
    page, keyed = (deploy(each).kinds.page_bytes[FULL] for each in (config, with_keys))
    assert keyed == page + 4 * 64 * 16 * 1024  # 16 layers, on each of 4 devices
    for name in ("transfer/back_up_bytes", "transfer/storage_write_bytes"):
        before, after = (run(each).measures[name] for each in (config, with_keys))
        assert after == pytest.approx(before / page * keyed)
        assert before > 0


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"letter": "F"}, "letter must be one that"),
        ({"letter": "t"}, "letter must be one that"),
        ({"num_layers": 2}, "either letter or num_layers"),
        ({"letter": ""}, "either letter or num_layers"),
        ({"dim": 3, "element_bytes": 0.5}, "whole bytes"),
        ({"tokens": 0}, "whole bytes"),
    ],
)
def test_a_part_that_cannot_be_is_refused(fields: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        Part(**(asdict(KEYS) | fields))


def test_a_letter_without_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match="letters of parts"):
        sparse(pattern="FtJ Ft")
    with pytest.raises(ValueError, match="top_tokens must be positive if pattern has t"):
        sparse(top_tokens=0)


def test_a_part_must_ride_on_what_the_model_may_have() -> None:
    with pytest.raises(ValueError, match="index must ride on one of full, swa, mamba, got 'wide'"):
        sparse(replace(KEYS, rides_on="wide"))


# tiny_hybrid, with a window of another length and index keys in some of its layers
SECOND = (
    "model=tiny_hybrid",
    "hardware=h200",
    "model.pattern=FI SW M D",
    "model.parts=[{name: wide, letter: W, window_len: 300, dim: 64, heads: 2, query_heads: 4, "
    "query_dim: 32, device_share: 0.2, host_share: 0.2}, {name: index, letter: I, dim: 16}, "
    "{name: scales, rides_on: wide, letter: W, dim: 2}]",
)


def test_a_second_window_has_pages_of_its_own() -> None:
    deployed = deploy(config_of(*SECOND, "cache.device_gib=0.002"))
    kinds = deployed.kinds
    assert kinds.names[3] == "wide"
    assert kinds.windows == ((1, Window(2)), (3, Window(5)))
    assert kinds.page_bytes[3] == 64 * 2 * (2 * 64 * 2 + 2 * 2)
    assert deployed.device.counts[3] == int(0.2 * int(0.002 * 2**30)) // kinds.page_bytes[3]
    assert deployed.cost.layer_bytes(0, 0, 0, 5).tolist() == [0, 5 * 260, 0, 0] * 2


def test_a_second_window_costs_the_pairs_within_it() -> None:
    wide = Part(
        name="wide", window_len=30, letter="W", dim=64, heads=2, query_heads=4, query_dim=128
    )
    shape = sparse(wide, pattern="FtW Ft", latent_dim=1, top_tokens=1, num_query_heads=0)
    cost = CostModel(shape, plain(attention_d128=1e12), tp=1)
    pairs = sum(min(position, 30) for position in range(21, 101))
    assert cost.forward_ns([(20, 100)], ()).total_ns == round(2 * pairs * 2 * 4 * 128 * 1e-3)


def test_a_run_with_a_second_window_keeps_every_law() -> None:
    told = (
        *SECOND,
        "workload=agents",
        "workload.limit=40",
        "cache.device_gib=0.04",
        "cache.host_gib=0.4",
        "engine.check_invariants=true",
    )
    jumping, single_steps = (run(config_of(*told, f"engine.jump={it}")) for it in (True, False))
    assert jumping.measures["evict/device_wide_pages"] > 0
    assert jumping.records == single_steps.records


def test_parts_are_told_on_the_command_line() -> None:
    part = "{name: keys, letter: K, dim: 64, heads: 2}"
    config = config_of("model=llama3_8b", "model.pattern=FK", f"model.parts=[{part}]")
    assert config.model.parts == (Part(name="keys", letter="K", dim=64, heads=2),)
