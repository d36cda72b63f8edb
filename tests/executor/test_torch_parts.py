"""Index keys and a second window on real memory: logits through three tiers, spoiled pages too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import Move
from hicache.cache.tree.node import DEVICE
from hicache.executor.real.pools import Arrival, TorchPools
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.tables import HoleError
from hicache.experiment import run
from hicache.models.shapes import ModelConfig, Part
from hicache.runs.schema import config_of
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny
from tests.executor.one_sequence import OneSequence

PAGE, LENGTH, NUM_PAGES = 8, 61, 8
TOKENS = np.random.default_rng(0).integers(0, 10_000, LENGTH, dtype=np.int32).tobytes()
WIDE = 3  # the number of the second window
WINDOW = Part(
    name="wide", letter="W", window_len=12, dim=16, heads=2, element_bytes=4, query_heads=4
)
INDEX = Part(name="index", letter="I", dim=8, element_bytes=4, query_heads=2, query_dim=8)


def shape_of(pattern: str, head_dim: int = 8) -> ModelConfig:
    """The small model with these layers; FtI attends to 10 tokens."""
    words = pattern.split()
    fields: dict[str, Any] = {"pattern": pattern, "num_layers": len(words), "top_tokens": 0}
    fields |= {"head_dim": head_dim, "recurrent_head_dim": head_dim}
    fields["parts"] = replace(WINDOW, dim=2 * head_dim), INDEX
    if "FtI" in words:
        fields |= {"num_full_layers": words.count("FtI"), "top_tokens": 10}
    return replace(tiny("S", PAGE) if "S" in words else tiny("M", PAGE), **fields | counts(words))


def counts(words: list[str]) -> dict[str, Any]:
    return {
        "num_swa_layers": words.count("S"),
        "num_mamba_layers": words.count("M") + words.count("D"),
    }


def sequence(pools: TorchPools, model: ReferenceModel, pages: Any) -> OneSequence:
    return OneSequence(model, pools, TOKENS, [pages] * 4)


def poisoned(model: ReferenceModel, *, tp: int = 1) -> TorchPools:
    device, host = (NUM_PAGES, NUM_PAGES, 1, NUM_PAGES), (NUM_PAGES, NUM_PAGES, 2, NUM_PAGES)
    pools = cpu_pools(model.config, PAGE, device, host, tp=tp)
    for kind in (FULL, SWA, WIDE):
        pools.poison(DEVICE, kind, range(NUM_PAGES))
    return pools


@pytest.mark.parametrize("pattern", ["FtI", "W", "FtI S W M D"])
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_do_not_depend_on_the_cut_the_pages_or_the_ranks(pattern: str, tp: int) -> None:
    model = ReferenceModel(shape_of(pattern), page_size=PAGE)
    whole = sequence(poisoned(model), model, range(NUM_PAGES)).in_cuts([LENGTH])
    pages = np.random.default_rng(1).permutation(NUM_PAGES).tolist()
    cut = sequence(poisoned(model, tp=tp), model, pages)
    assert torch.equal(cut.in_cuts([16, 24, *range(25, 45), 48, LENGTH]), whole)
    assert torch.isfinite(whole).all()


def test_a_second_window_reads_no_page_before_it() -> None:
    model = ReferenceModel(shape_of("W"), page_size=PAGE)
    its = sequence(poisoned(model), model, range(NUM_PAGES))
    its.forward(0, 40)
    its.pages[WIDE][:3] = [-1] * 3  # 12 tokens before 40 are in pages 3 and 4
    its.forward(40, 48)
    its.pages[WIDE][4] = -1
    with pytest.raises(HoleError, match="at least one is missing"):
        its.forward(48, LENGTH)


@pytest.mark.parametrize("spoiled", [None, "index", "wide"])
def test_index_keys_and_a_second_window_come_back_from_the_host(spoiled: str | None) -> None:
    model = ReferenceModel(shape_of("FtI S W M D"), page_size=PAGE)
    whole = sequence(poisoned(model), model, range(NUM_PAGES)).in_cuts([LENGTH])
    pools, pages = poisoned(model), list(range(NUM_PAGES))
    sequence(pools, model, pages).forward(0, 40)
    others = pages[::-1]
    pools.save([Move(kind, pages, others) for kind in (FULL, SWA, WIDE)])
    pools.save([Move(MAMBA, [0], [1])])
    host = pools.ranks[0].host
    if spoiled == "index":  # the last bytes of an item
        host[FULL][others[1], -PAGE * 8 * 4 :] = 0
    elif spoiled == "wide":
        host[WIDE][others[4]] = 0
    for kind in (FULL, SWA, WIDE):
        pools.poison(DEVICE, kind, pages)
    moves = [Move(kind, others, pages) for kind in (FULL, SWA, WIDE)]
    pools.load([Arrival(is_within=False, moves=[*moves, Move(MAMBA, [1], [0])])])
    again = sequence(pools, model, pages).forward(40, LENGTH, logits_from=40)
    assert torch.equal(again, whole[40:]) is (spoiled is None)


def test_logits_are_equal_through_three_tiers(tmp_path: Path) -> None:
    parts = (
        "model.parts=[{name: wide, letter: W, window_len: 40, dim: 32, heads: 2, element_bytes: 4, "
        "query_heads: 4, query_dim: 32, device_share: 0.2, host_share: 0.2}, {name: index, "
        "letter: I, dim: 16, element_bytes: 4, query_heads: 2, query_dim: 16}]"
    )
    layers = ("model.pattern=FtI S W M D", "model.num_layers=10", "model.top_tokens=48", parts)
    told = (
        *("workload=agents", "workload.limit=4", "cache.page_size=16"),
        *("storage=file", f"storage.root={tmp_path}"),
        *("prefetch.threshold=16", "prefetch.stop=wait_complete"),
        *("executor=torch", "executor.device=cpu", "executor.verify=true"),
        "engine.check_invariants=true",
    )
    config = config_of("model=tiny_hybrid", *layers, *told)
    for _ in range(2):  # the first run fills the storage
        result = run(config)
        assert result.measures["verify/checked_count"] == 4
        assert result.measures["verify/unequal_count"] == 0
    assert result.measures["transfer/storage_read_bytes"] > 0
    assert result.measures["transfer/load_back_bytes"] > 0
    assert sum(record.storage_hit_len for record in result.records) > 0


@pytest.mark.parametrize(
    "part", [replace(WINDOW, dim=8), replace(WINDOW, heads=1), replace(INDEX, tokens=4)]
)
def test_parts_that_the_model_does_not_compute_are_refused(part: Part) -> None:
    parts = [each for each in (WINDOW, INDEX) if each.name != part.name]
    with pytest.raises(ValueError, match="no parts but other windows and one of index keys"):
        ReferenceModel(replace(shape_of("FtI S W M D"), parts=(*parts, part)), page_size=PAGE)
