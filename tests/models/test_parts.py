"""Parts of a model: what they take in pools, links and storage, and what they cost."""

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
from hicache.results.remarks import pool_remarks
from hicache.runs.schema import config_of
from tests.models.test_cost import H200, plain, step_ends, step_ns

# as SGLang keeps them: fp8, and a scale of four bytes
KEYS = Part(
    name="index", letter="I", dim=128, element_bytes=1, scale_bytes=4, query_heads=4, query_dim=128
)
POOLED = replace(KEYS, tokens=4)
DRAFT = Part(name="draft", num_layers=1, dim=32, heads=2)


def sparse(*parts: Part, **fields: Any) -> ModelConfig:
    """Return a model of four layers of latent attention, two of which have index keys."""
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


PLAIN = sparse(pattern="Ft", parts=())
HEADS = {"pattern": "Ft", "latent_dim": 0, "num_kv_heads": 8}


@pytest.mark.parametrize(
    ("shape", "page_size", "tp", "page_bytes"),
    [
        (sparse(), 16, 2, 2 * 16 * (4 * 64 * 2 + 2 * (128 + 4))),
        (sparse(POOLED), 16, 1, 16 * 4 * 64 * 2 + 4 * 2 * 132),  # an entry stands for 4 tokens
        *(
            (sparse(DRAFT, **HEADS), 1, tp, 4 * 8 * 160 * 2 + copies * 2 * 32 * 2)
            for tp, copies in ((1, 1), (2, 1), (4, 2))
        ),
    ],
)
def test_a_page_of_full_attention_holds_the_entries_of_its_parts(shape, page_size, tp, page_bytes):
    kinds = model_kinds(shape, page_size, tp)
    assert kinds.numbers == (FULL,)
    assert kinds.page_bytes[FULL] == page_bytes


def test_index_keys_keep_their_format_in_pages_coded_in_another():
    coded, without = (
        model_kinds(shape, 16, 1, "fp8").page_bytes[FULL] for shape in (sparse(), PLAIN)
    )
    assert coded - without == 16 * 2 * 132


def test_a_part_of_a_state_takes_one_entry_per_slot():
    taps = Part(name="taps", rides_on="mamba", num_layers=3, dim=10, element_bytes=4)
    assert taps.page_bytes(page_size=64) == 40


def test_each_layer_loads_its_own_parts_and_the_last_one_those_of_the_draft():
    draft = Part(name="draft", num_layers=1, dim=16)
    cost = CostModel(sparse(KEYS, draft), plain(), tp=2)
    parts = (132, 0, 132, 2 * 16)
    assert cost.layer_bytes(10, 0, 0).tolist() == [20 * (128 + each) for each in parts]


def test_the_indexer_costs_every_pair_of_tokens_and_attention_only_chosen_ones():
    pairs = 1000 * 1001 // 2
    chosen = sum(min(position, 256) for position in range(1, 1001))
    flops = 2 * pairs * 4 * 128 * 2 + 4 * chosen * 8 * (96 + 64) * 2
    found_ns = step_ns((0, 1000), shape=sparse(), attention_d128=1e12)
    assert found_ns == round(flops * 1e-3)


def test_a_query_costs_one_pair_per_entry_of_tokens_and_at_most_top_entries():
    shapes = sparse(replace(POOLED, top=8), latent_dim=1), replace(PLAIN, latent_dim=1)
    with_part, without = (step_ns((0, 1000), shape=each, attention_d128=1e12) for each in shapes)
    pairs = sum(min(position, 32) for position in range(1, 1001))
    assert with_part - without == pytest.approx(2 * pairs / 4 * 4 * 128 * 2 * 1e-3, abs=1)


def test_a_decode_step_reads_all_index_keys_and_the_chosen_tokens():
    read = 2 * 132 * (100 + 900) + 4 * 128 * (100 + 256)
    assert step_ns(lens=[100, 900], shape=sparse(), decode_bandwidth=1e9) == read


@pytest.mark.parametrize("tp", [1, 4])
def test_decode_steps_priced_together_cost_as_much_as_alone(tp):
    draft = Part(name="draft", num_layers=1, dim=64, query_heads=8, query_dim=64, top=240)
    cost = CostModel(sparse(KEYS, draft), H200, tp=tp)
    lens = np.array([3, 200, 250, 256, 4000])
    now, ends = 0, []
    for step in range(90):
        now += cost.forward_ns([], [*map(int, lens + step)]).total_ns
        ends.append(now)
    assert step_ends(cost, [*map(int, lens)], 90) == ends


def test_index_keys_are_counted_in_transfers():
    config = config_of(
        *("workload.limit=12", "model=llama3_8b", "hardware=h200"), "cache.device.tokens.full=20000"
    )
    keys = replace(KEYS, element_bytes=8, scale_bytes=0)
    keyed = replace(config, model=replace(config.model, pattern="FI F", parts=(keys,)))
    page, keyed_page = (deploy(each).kinds.page_bytes[FULL] for each in (config, keyed))
    assert keyed_page == page + 4 * 64 * 16 * 1024  # 16 layers, on each of 4 devices
    measures, keyed_measures = (run(each).measures for each in (config, keyed))
    for name in ("transfer/back_up_bytes", "transfer/storage_write_bytes"):
        assert keyed_measures[name] == pytest.approx(measures[name] / page * keyed_page)
        assert measures[name] > 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"letter": "F"}, "letter must be one that"),
        ({"letter": "t"}, "letter must be one that"),
        ({"num_layers": 2}, "either letter or num_layers"),
        ({"letter": ""}, "either letter or num_layers"),
        ({"dim": 3, "element_bytes": 0.5}, "whole bytes"),
        ({"tokens": 0}, "whole bytes"),
    ],
)
def test_an_invalid_part_is_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        Part(**(asdict(KEYS) | fields))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"pattern": "FtJ Ft"}, "letters of parts"),
        ({"top_tokens": 0}, "top_tokens must be positive if pattern has t"),
        (
            {"parts": (replace(KEYS, rides_on="wide"),)},
            "index must ride on one of full, swa, mamba, got 'wide'",
        ),
    ],
)
def test_a_model_that_contradicts_its_parts_is_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        sparse(**fields)


def test_a_page_size_that_splits_an_entry_of_several_tokens_is_refused():
    with pytest.raises(ValueError, match=r"multiple of 4, the tokens of an entry of index, got 6"):
        model_kinds(sparse(POOLED), page_size=6, tp=1)


# tiny_hybrid, with a window of another length and index keys in some of its layers
SECOND = (
    "model=tiny_hybrid",
    "hardware=h200",
    "model.pattern=FI SW M D",
    "model.parts=[{name: wide, letter: W, window_len: 300, dim: 64, heads: 2, query_heads: 4, "
    "query_dim: 32, device_share: 0.2, host_share: 0.2}, {name: index, letter: I, dim: 16}, "
    "{name: scales, rides_on: wide, letter: W, dim: 2}]",
)


def test_a_second_window_has_pages_of_its_own():
    deployed = deploy(config_of(*SECOND, "cache.device_gib=0.002"))
    kinds = deployed.kinds
    assert kinds.names[3] == "wide"
    assert kinds.windows == ((1, Window(2)), (3, Window(5)))
    assert kinds.page_bytes[3] == 64 * 2 * (2 * 64 * 2 + 2 * 2)
    assert deployed.device.counts[3] == int(0.2 * int(0.002 * 2**30)) // kinds.page_bytes[3]
    assert deployed.cost.layer_bytes(0, 0, 0, 5).tolist() == [0, 5 * 260, 0, 0] * 2


def test_a_tier_without_room_for_a_second_window_is_noted_or_refused():
    no_host = [word.replace("host_share: 0.2", "host_share: 0") for word in SECOND]
    config = config_of(*no_host, "cache.device_gib=0.002")
    notes = pool_remarks(config, deploy(config))
    assert [each for each in notes if "set cache.host.share.wide" in each]
    with pytest.raises(ValueError, match=r"or set cache\.device\.tokens\.wide"):
        deploy(config_of(*SECOND, "cache.device.share.wide=0"))


def test_a_second_window_costs_the_pairs_within_it():
    wide = Part(
        name="wide", window_len=30, letter="W", dim=64, heads=2, query_heads=4, query_dim=128
    )
    shape = sparse(wide, pattern="FtW Ft", latent_dim=1, top_tokens=1, num_query_heads=0)
    pairs = sum(min(position, 30) for position in range(21, 101))
    found_ns = step_ns((20, 100), shape=shape, attention_d128=1e12)
    assert found_ns == round(2 * pairs * 2 * 4 * 128 * 1e-3)


def test_a_run_with_a_second_window_keeps_all_invariants():
    pools = ("cache.device_gib=0.03", "cache.host_gib=0.2", "engine.check_invariants=true")
    load = ("workload=agents", "workload.limit=16")
    jumping, single_steps = (
        run(config_of(*SECOND, *pools, *load, f"engine.jump={it}")) for it in (True, False)
    )
    assert jumping.measures["evict/device_wide_pages"] > 0
    assert jumping.records == single_steps.records
