"""Paged append and attention against torch, and that a wrong mask, window edge or scale shows.

Tolerances are of numbers around 1: fp32 sums of up to 512 products differ by less than 4e-6, and
fp16 rounds the weights of the softmax and the result to 11 bits, 5e-4 each.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import triton.language as tl
from torch import Tensor

from hicache.kernels import attend as attend_module
from hicache.kernels.append import append, naive_append
from hicache.kernels.attend import attend, naive_attend

TOLERANCE = {torch.float32: 4e-6, torch.float16: 1e-3}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two tiles of a batch; the second begins three pages earlier."""

    page: int = 16
    heads: int = 2
    group: int = 2
    dim: int = 16
    rows: int = 16
    start: int = 48
    held: int = 10  # rows of each tile that are there
    window: int = 0
    has_sinks: bool = True
    dtype: torch.dtype = torch.float32
    split: int = 64


CASES = {
    "prefill": Case(),
    "whole page": Case(held=16, dtype=torch.float16),
    "window": Case(page=4, rows=4, start=100, held=3, window=9),
    "window of fp16": Case(window=20, dtype=torch.float16, has_sinks=False),
    "decode": Case(page=64, rows=1, held=1, start=200, heads=3, group=1),
    "decode in splits": Case(rows=1, held=1, start=290, group=4, dtype=torch.float16),
    "large pages": Case(page=128, rows=128, start=384, held=128, group=1, dim=32),
    "nothing cached": Case(page=8, rows=8, start=24, held=5, window=7),
}


def tensors(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Pages hold numbers where tokens are, and NaN where none is."""
    generator = torch.Generator().manual_seed(0)
    starts = [case.start, case.start - 3 * case.page]
    columns = -(-(case.start + case.rows) // case.page)
    num_pages = 2 * columns + 2
    pool = torch.randn(2, num_pages, case.page, case.heads, case.dim, generator=generator)
    pages = torch.randperm(num_pages, generator=generator)[: 2 * columns].int().view(2, columns)
    pool[:, [each for each in range(num_pages) if each not in pages]] = torch.nan
    for start, row in zip(starts, pages, strict=True):
        for position in range(start + case.held, columns * case.page):
            pool[:, row[position // case.page], position % case.page] = torch.nan
        for position in range(max(start - case.window + 1, 0) if case.window else 0):
            pool[:, row[position // case.page], position % case.page] = torch.nan
    shape = (2, case.rows, case.heads * case.group, case.dim)
    drawn = {
        "pool": pool.to(case.dtype),
        "table": pages,
        "tiles": torch.tensor([[start, 0, case.held, 0] for start in starts], dtype=torch.int32),
        "queries": 3 * torch.randn(shape, generator=generator).to(case.dtype),
        "sinks": torch.randn(case.heads * case.group, generator=generator),
    }
    return {name: each.to(device) for name, each in drawn.items()}


def error(case: Case, device: torch.device, wanted: Case | None = None) -> float:
    """The largest difference from torch in fp32, of rows that are there."""
    drawn, wanted = tensors(case, device), wanted or case
    results = []
    for function, each in ((attend, case), (naive_attend, wanted)):
        its = {name: value.clone() for name, value in drawn.items()}
        if function is naive_attend:
            its |= {name: its[name].float() for name in ("pool", "queries")}
            its["pool"] = its["pool"].nan_to_num(0.0)
        if not each.has_sinks:
            its["sinks"] = None
        end = each.start + each.held
        out = function(**its, end=end, window_len=each.window)
        results.append(out[:, : wanted.held].float())
    return float((results[0] - results[1]).abs().max())


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    monkeypatch.setattr(attend_module, "SPLIT", 64)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_equals_torch(case, device):
    assert error(case, device) < TOLERANCE[case.dtype]


WRONG = {
    "the next token is seen": (CASES["prefill"], "start", 1),
    "the window is one token longer": (CASES["window"], "window", 1),
    "the window is one token shorter": (CASES["window of fp16"], "window", -1),
    "no sinks": (CASES["decode"], "has_sinks", -1),
}


@pytest.mark.parametrize(("case", "name", "by"), WRONG.values(), ids=WRONG)
def test_a_wrong_mask_shows(case, name, by, device):
    """The tolerance is far below what one token at an edge changes."""
    wanted = replace(case, **{name: getattr(case, name) + by})
    drawn = tensors(replace(case, window=0), device)
    drawn["pool"] = drawn["pool"].nan_to_num(0.5)
    both = []
    for function, each in ((attend, case), (naive_attend, wanted)):
        its = dict(drawn)
        its["tiles"] = its["tiles"] + torch.tensor([each.start - case.start, 0, 0, 0]).to(device)
        its["sinks"] = its["sinks"] if each.has_sinks else None
        its["tiles"] = its["tiles"].int()
        both.append(function(**its, end=case.start + case.held, window_len=each.window))
    difference = (both[0] - both[1])[:, : case.held - 1 or 1].abs().max()
    assert difference > 10 * TOLERANCE[case.dtype]


def test_a_wrong_scale_shows(monkeypatch, device):
    wrong = attend_module.LOG2_E.value * 1.001
    monkeypatch.setattr(attend_module, "LOG2_E", tl.constexpr(wrong))
    assert error(CASES["prefill"], device) > 10 * TOLERANCE[torch.float32]


def test_a_row_has_the_same_bits_however_much_of_its_tile_is_there(device):
    drawn = tensors(replace(CASES["prefill"], held=16), device)
    results = []
    for held in (6, 16):
        drawn["tiles"][:, 2] = held
        results.append(attend(**drawn, end=48 + held))
    assert torch.equal(results[0][:, :6], results[1][:, :6])


@pytest.mark.parametrize("page", [4, 16, 64])
def test_appended_tokens_lie_where_torch_puts_them(page, device):
    generator = torch.Generator().manual_seed(0)
    slab = torch.randn(2, 3, 24, page, 3, 8, generator=generator).to(device)
    table = torch.randperm(24, generator=generator)[:20].int().view(2, 10).to(device)
    tiles = torch.tensor([[3 * page - 1, 0, 20, 2], [page, 3, 19, 1]], dtype=torch.int32)
    both = torch.randn(2, 2, 21, 5, 8, generator=generator).to(device)
    keys, values = both[..., 1:4, :]
    pools = [slab.clone(), slab.clone()]
    for function, pool in zip((append, naive_append), pools, strict=True):
        function(pool[:, 1], table, tiles.to(device), keys, values)
    assert torch.equal(*pools)
    assert not torch.equal(pools[0], slab)
