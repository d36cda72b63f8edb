"""Paged append and attention against torch, and that a wrong mask, window edge or scale shows.

Tolerances are of numbers around 1: fp32 sums of up to 512 products differ by less than 4e-6, and
fp16 rounds the weights of the softmax and the result to 11 bits, 5e-4 each.
"""

from dataclasses import dataclass, replace

import pytest
import torch
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
    "heads of 96": Case(page=48, rows=2, held=2, start=290, dim=96, dtype=torch.float16),
    "heads of 192": Case(page=32, dim=192, heads=1),
    "heads of 40": Case(page=32, rows=3, held=2, dim=40, group=5, window=70, start=200),
    "decode in long splits": Case(page=64, rows=1, held=1, start=700, dim=16),
    "window in splits": Case(rows=1, held=1, start=1000, window=300),
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
    monkeypatch.setattr(attend_module, "MAX_SPLITS", 8)


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
    """The scale is an argument; a changed constant would stay in the kernels that are compiled."""
    right = attend_module._split_kernel

    class Wrong:
        def __getitem__(self, grid):
            def launch(*arguments, **constants):
                right[grid](*arguments[:-1], arguments[-1] * 1.001, **constants)

            return launch

    monkeypatch.setattr(attend_module, "_split_kernel", Wrong())
    assert error(CASES["prefill"], device) > 10 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["decode in long splits", "window in splits"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name, device):
    """The second tile begins elsewhere, and the longest sequence decides how many splits run."""
    case = CASES[name]
    drawn = tensors(case, device)
    options = {"window_len": case.window, "sinks": drawn.pop("sinks")}
    both = attend(**drawn, end=case.start + 1, **options)
    lengths = [case.start + 1, case.start - 3 * case.page + 1]
    for tile, end in enumerate(lengths):
        its = {name: drawn[name][tile : tile + 1] for name in ("table", "tiles", "queries")}
        alone = attend(drawn["pool"], **its, end=end, **options)
        assert torch.equal(alone[0], both[tile])


def test_one_decode_of_8k_fills_a_gpu_and_scratch_is_bounded(monkeypatch):
    """Of 132 SMs; each program reads a split of one KV head."""
    monkeypatch.undo()
    grids, sizes = [], []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **_: sizes.append(max(map(torch.numel, arguments[:2])))

    monkeypatch.setattr(attend_module, "_split_kernel", Kernel())
    monkeypatch.setattr(attend_module, "_merge_kernel", Kernel())
    pool, ids = torch.empty(2, 1, 64, 8, 128), torch.zeros(512, 4, dtype=torch.int32)
    for tiles, rows, end in ((1, 1, 8192), (1, 1, 131072), (512, 16, 131072), (128, 64, 131072)):
        queries = torch.empty(tiles, rows, 8, 128)
        attend(pool, ids[:tiles], ids[:tiles], queries, end=end)
    assert [x * y * z for x, y, z in grids[::2]] == [256, 256, 512 * 8 * 4, 128 * 4 * 8]
    assert max(sizes) <= 512 * 64 * 8 * 128


REFUSED = [
    ({"dim": 512}, "heads of 8·n elements up to 256, .* got 512 elements of torch.float32"),
    ({"dim": 576}, "got 576 elements"),
    ({"dim": 36}, "got 36 elements"),
    ({"dtype": torch.float64}, "fp32, fp16 or bf16: got 16 elements of torch.float64"),
    ({"group": 32, "rows": 1}, "at most 16 query heads a KV head, .* got 1 rows of 32"),
    ({"rows": 17}, "of 2\\*\\*n rows, wanted: got 17 rows"),
]


@pytest.mark.parametrize(("sizes", "sentence"), REFUSED)
def test_sizes_that_the_kernel_does_not_serve_are_refused(sizes, sentence, device):
    drawn = tensors(replace(Case(start=64, held=1), **sizes), device)
    with pytest.raises(ValueError, match=sentence):
        attend(**drawn, end=65)


FORMS = {
    "queries of another dtype": ({"queries": lambda x: x.half()}, "queries must be"),
    "queries of no multiple": ({"queries": lambda x: x[:, :, :3]}, "queries must be"),
    "a strided table": ({"table": lambda x: x.repeat(1, 2)[:, ::2]}, "contiguous table wanted"),
    "pages with gaps": ({"pool": lambda x: x.repeat(1, 1, 1, 1, 2)[..., :16]}, "contiguous pages"),
}


@pytest.mark.parametrize(("change", "sentence"), FORMS.values(), ids=FORMS)
def test_tensors_of_another_form_are_refused(change, sentence, device):
    drawn = tensors(CASES["prefill"], device)
    drawn |= {name: each(drawn[name]) for name, each in change.items()}
    with pytest.raises(ValueError, match=sentence):
        attend(**drawn, end=58)


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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda pool, keys: (pool.repeat(1, 1, 1, 9, 80), keys), "rows of at most 32768 bytes"),
        (lambda pool, keys: (pool, keys[..., :4]), "keys: contiguous rows of 3 × 8 wanted, got"),
        (lambda pool, keys: (pool, keys.mT.contiguous().mT), "keys: contiguous rows"),
        (lambda pool, keys: (pool, keys.transpose(0, 1)), "keys: rows equally far apart"),
    ],
)
def test_appends_that_the_kernel_does_not_serve_are_refused(change, sentence, device):
    pool, keys = torch.zeros(2, 3, 4, 3, 8, device=device), torch.zeros(2, 5, 3, 8, device=device)
    pool, keys = change(pool, keys)
    ids = torch.zeros(2, 4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=sentence):
        append(pool, ids, ids, keys, keys)
