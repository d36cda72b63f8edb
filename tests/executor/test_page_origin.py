"""Runs share stored pages only if they would have written the same bytes."""

from copy import copy
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from hicache import experiment
from hicache.executor.real.page_origin import NEUTRAL, PageOrigin
from hicache.executor.real.reference_model import ReferenceModel
from hicache.runs.schema import config_of
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny
from tests.executor.one_sequence import OneSequence

PAGE = 8
TOKENS = np.arange(5 * PAGE, dtype=np.int32).tobytes()
MODEL = tiny("F S M D", PAGE)
ORIGIN = PageOrigin(
    model=MODEL, page_size=PAGE, rank=0, tp=1, weights="w", arithmetic="a", layout=("l",)
)
PARTS = (
    "model.parts=[{name: wide, letter: W, window_len: 40, dim: 32, heads: 2, element_bytes: 4, "
    "query_heads: 4, query_dim: 32, device_share: 0.2, host_share: 0.2}, {name: index, "
    "letter: I, dim: 16, element_bytes: 4, query_heads: 2, query_dim: 16}]"
)
BASE = (
    "model=tiny_hybrid",
    *("model.pattern=FtI S W M D", "model.num_layers=5", "model.top_tokens=48", PARTS),
    *("model.num_full_layers=1", "model.num_swa_layers=1", "model.num_mamba_layers=2"),
    "model.dense_params=164608",
    "executor=torch",
    "executor.device=cpu",
    "executor.verify=true",
    "workload=agents",
    "workload.limit=2",
    "workload.token_stride=64",
    "cache.page_size=16",
    "cache.device_gib=0.05",
    "cache.host_gib=0.05",
    "prefetch.threshold=16",
    "prefetch.stop=wait_complete",
    "storage=slab",
)


def changed(instance, name):
    """A copy with another value in one field; its checks do not run."""
    other, value = copy(instance), getattr(instance, name)
    if value is None or value == ():
        value = ("something",)
    elif isinstance(value, str | tuple):
        value += value or "x"
    else:
        value += 1
    object.__setattr__(other, name, value)
    return other


def names_of(kind):
    return [field.name for field in fields(kind)]


def test_every_field_of_an_origin_but_neutral_ones_changes_its_namespace(monkeypatch):
    origins = [ORIGIN, *(changed(ORIGIN, name) for name in names_of(PageOrigin)[1:])]
    of_pages = [name for name in names_of(type(MODEL)) if name not in NEUTRAL]
    origins += [replace(ORIGIN, model=changed(MODEL, name)) for name in of_pages]
    namespaces = {origin.namespace for origin in origins}
    assert len(namespaces) == len(origins) > 30
    monkeypatch.setattr("hicache.executor.real.page_origin.PAGE_VERSION", 2)
    assert ORIGIN.namespace not in namespaces


def pages_of(config):
    """All that the model of `config` caches of `TOKENS`: pages, taps and states."""
    pools, pages = cpu_pools(config, PAGE, (5, 5, 1)), range(5)
    model = ReferenceModel(config, page_size=PAGE)
    OneSequence(model, pools, TOKENS, (pages, pages)).forward(0, 5 * PAGE)
    rank = pools.ranks[0]
    return [*rank.kv.values(), *rank.taps, *rank.states]


@pytest.mark.parametrize("name", [*NEUTRAL, "window_len"])
def test_neutral_fields_change_neither_pages_nor_their_namespace(name):
    other = changed(MODEL, name)
    are_equal = all(map(torch.equal, pages_of(other), pages_of(MODEL)))
    has_same_name = replace(ORIGIN, model=other).namespace == ORIGIN.namespace
    assert are_equal is has_same_name is (name in NEUTRAL)


def test_a_layout_names_every_piece_of_every_item_in_order():
    rank = cpu_pools(replace(MODEL, kv_dtype_bytes=2), PAGE, (5, 5, 1)).ranks[0]
    assert rank.layout == (
        *["f0 torch.bfloat16 (8, 2, 8)"] * 2,
        *["s1 torch.bfloat16 (8, 2, 8)"] * 2,
        "m2 torch.float32 (4, 3, 24)",
        "m2 torch.float32 (4, 8, 8)",
        "m3 torch.float32 (4, 3, 24)",
        "m3 torch.float32 (4, 8, 8)",
    )


def test_only_a_run_of_the_same_origin_hits_stored_pages(tmp_path):
    config = config_of(*BASE)
    config = replace(config, storage=replace(config.storage, root=str(tmp_path)))
    for change, num_stores, has_hits in (
        ({}, 1, False),
        ({}, 1, True),
        ({"model": replace(config.model, hidden_size=32)}, 2, False),
        ({"parallel": replace(config.parallel, tp=2)}, 4, False),  # one store a rank
        ({"seed": 1}, 5, False),  # other weights
    ):
        result = experiment.run(replace(config, **change))
        assert result.measures["verify/checked_count"] == 2
        assert result.measures["verify/unequal_count"] == 0
        assert (result.measures["transfer/load_back_bytes"] > 0) is has_hits
        assert any(record.storage_hit_len for record in result.records) is has_hits
        assert len(list(tmp_path.iterdir())) == num_stores
