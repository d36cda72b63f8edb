"""Two runs share stored pages only if they would have written the same bytes."""

from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from hicache import experiment
from hicache.executor.real.page_origin import NEUTRAL, PageOrigin
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import RankPools
from hicache.executor.real.reference_model import ReferenceModel
from hicache.models import ModelConfig
from hicache.results.metrics import Result
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
BASE = (
    "model=tiny_hybrid",
    "executor=torch",
    "executor.device=cpu",
    "executor.verify=true",
    "workload=agents",
    "workload.limit=2",
    "workload.token_stride=32",
    "cache.page_size=16",
    "cache.device_gib=0.05",
    "cache.host_gib=0.05",
    "prefetch.threshold=16",
    "prefetch.stop=wait_complete",
    "storage=slab",
)
Changed = TypeVar("Changed", ModelConfig, PageOrigin)
MODEL_FIELDS = {field.name for field in fields(ModelConfig)}


def changed(instance: Changed, name: str) -> Changed:
    """One field is another. What cannot be must be told apart all the same: no check is asked."""
    other = copy(instance)
    value = getattr(instance, name)
    match value:
        case None:
            value = "something"
        case str():
            value += "'"
        case tuple():
            value += value or ("something",)
        case _:
            value += 1
    object.__setattr__(other, name, value)
    return other


@pytest.mark.parametrize("name", sorted(MODEL_FIELDS - set(NEUTRAL)))
def test_another_model_has_other_pages(name: str) -> None:
    assert replace(ORIGIN, model=changed(MODEL, name)).namespace != ORIGIN.namespace


@pytest.mark.parametrize("name", sorted({field.name for field in fields(PageOrigin)} - {"model"}))
def test_another_origin_has_other_pages(name: str) -> None:
    assert changed(ORIGIN, name).namespace != ORIGIN.namespace


def test_another_version_has_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ORIGIN.namespace
    monkeypatch.setattr("hicache.executor.real.page_origin.PAGE_VERSION", 2)
    assert ORIGIN.namespace != before


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_field_changes_neither_a_page_nor_its_name(name: str) -> None:
    other = changed(MODEL, name)
    assert replace(ORIGIN, model=other).namespace == ORIGIN.namespace
    for number, (got, wanted) in enumerate(zip(pages_of(other), pages_of(MODEL), strict=True)):
        assert torch.equal(got, wanted), number


def test_a_field_that_shapes_pages_would_be_noticed_among_the_neutral() -> None:
    other = pages_of(changed(MODEL, "window_len"))
    assert not all(map(torch.equal, other, pages_of(MODEL)))


def pools_of(config: ModelConfig) -> TorchPools:
    return cpu_pools(config, PAGE, (5, 5, 1))


def pages_of(config: ModelConfig) -> list[torch.Tensor]:
    """All that the model keeps of the same tokens."""
    model, pools = ReferenceModel(config, page_size=PAGE), pools_of(config)
    pages = np.arange(5, dtype=np.int32)
    OneSequence(model, pools, TOKENS, (pages, pages)).forward(0, 5 * PAGE)
    rank = pools.ranks[0]
    return [*rank.kv.values(), *rank.taps, *rank.states]


def test_a_layout_names_every_piece_of_every_item_in_order() -> None:
    rank: RankPools = pools_of(replace(MODEL, kv_dtype_bytes=2)).ranks[0]
    assert rank.layout == (
        "f0 torch.bfloat16 (8, 2, 8)",
        "f0 torch.bfloat16 (8, 2, 8)",
        "s1 torch.bfloat16 (8, 2, 8)",
        "s1 torch.bfloat16 (8, 2, 8)",
        "m2 torch.float32 (4, 3, 24)",
        "m2 torch.float32 (4, 8, 8)",
        "m3 torch.float32 (4, 3, 24)",
        "m3 torch.float32 (4, 8, 8)",
    )


def run_on(root: Path, **changes: object) -> Result:
    config = replace(config_of(*BASE), **changes)  # type: ignore[arg-type]
    return experiment.run(replace(config, storage=replace(config.storage, root=str(root))))


def storage_hits(result: Result) -> int:
    return sum(record.storage_hit_len for record in result.records)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    assert storage_hits(run_on(root)) == 0
    return root


def test_an_equal_run_is_served_what_the_first_one_stored(filled: Path) -> None:
    result = run_on(filled)
    assert storage_hits(result) > 0
    assert result.measures["verify/unequal_count"] == 0


@pytest.mark.parametrize("name", ["model", "parallel"])
def test_another_run_is_never_served_the_pages_of_the_first(filled: Path, name: str) -> None:
    config = config_of(*BASE)
    others = {
        "model": replace(config.model, hidden_size=32),
        "parallel": replace(config.parallel, tp=2),
    }
    result = run_on(filled, **{name: others[name]})
    assert result.measures["verify/checked_count"] == 2
    assert result.measures["verify/unequal_count"] == 0
    assert storage_hits(result) == 0


def test_other_weights_of_the_same_model_have_a_store_of_their_own(tmp_path: Path) -> None:
    workload = replace(config_of(*BASE).workload, limit=1)
    for seed in (0, 1, 0):  # other seeds have other prompts too: hits would prove nothing
        run_on(tmp_path, workload=workload, seed=seed)
    assert len(list(tmp_path.iterdir())) == 2
