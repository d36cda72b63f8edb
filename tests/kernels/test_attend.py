"""Paged attention against PyTorch in fp64, at small sizes and at the shapes of models.

Without a GPU, the shapes of models have one KV head and few rows, and fp16 stands for bf16, whose
products the interpreter gets wrong.

The softmax weights and the result are rounded to the dtype (unit roundoff `u`): an element is off
by u · (Σ weight · |value| + |result|), and u · `tiny` · Σ |value| for subnormal weights. fp32 sums
and scores add `SLACK` of the first sum: a score has an error of at most
128 · 2**-24 · Σ |q · k| / √128.
"""

import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from on_gpu import ON_GPU

from hicache.kernels import attend as attend_module
from hicache.kernels.attend import attend, naive_attend
from hicache.workbench.codegen_cases import ATTENDS

SLACK = {torch.float32: 2.0**-16, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-12}
HALF = torch.float16


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of three tiles; the second sequence is shorter, the third starts at token 0."""

    page: int = 16
    heads: int = 2
    group: int = 2
    dim: int = 16
    rows: int = 16
    start: int = 48
    held: int = 10  # rows of each tile that exist
    window: int = 0
    has_sinks: bool = True
    dtype: torch.dtype = torch.float32


SMALL = {
    "prefill": Case(),
    "whole page": Case(held=16, dtype=HALF),
    "window": Case(page=4, rows=4, start=100, held=3, window=9),
    "window of fp16": Case(window=20, dtype=HALF, has_sinks=False),
    "decode": Case(page=64, rows=1, held=1, start=200, heads=3, group=1),
    "decode in splits": Case(rows=1, held=1, start=290, group=4, dtype=HALF),
    "large pages": Case(page=128, rows=32, start=256, held=32, heads=1, dim=32),
    "short": Case(page=8, rows=8, start=24, held=5, window=7),
    "heads of 40": Case(page=32, rows=2, held=2, dim=40, group=5, window=70, start=200),
    "decode in long splits": Case(page=64, rows=1, held=1, heads=1, start=700),
    "window in splits": Case(rows=1, held=1, heads=1, start=1000, window=300),
}


def at_shape_of_model(name):
    shape, window = ATTENDS[name], 1000 if name.endswith("16 × 8 heads") else 0
    if ON_GPU:
        return Case(**shape._asdict(), held=shape.rows, start=8192 >> (shape.rows > 1) * 2)
    sizes = {"heads": 1, "group": 4, "rows": min(shape.rows, 4), "window": window // 10}
    dtype = HALF if shape.dtype == torch.bfloat16 else shape.dtype
    sizes |= {"page": shape.page, "dim": shape.dim, "dtype": dtype}
    return Case(**sizes, held=sizes["rows"], start=128)


MODELS = {name: at_shape_of_model(name) for name in ATTENDS}
CASES = SMALL | MODELS


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    """Small splits, so that even the short sequences of the interpreter have several."""
    if not ON_GPU:
        monkeypatch.setattr(attend_module, "SPLIT", 64)
        monkeypatch.setattr(attend_module, "MAX_SPLITS", 8)


def drawn(case):
    """Random arguments of `attend`: NaN where no row reads, large V at the first and last token."""
    draw = torch.Generator().manual_seed(0)
    starts = [case.start, max(case.start - 3 * case.page - 5, 1), 0]
    columns = -(-(case.start + case.rows) // case.page)
    num_pages = columns * len(starts) + 1
    pool = torch.full((2, num_pages, case.page, case.heads, case.dim), torch.nan)
    table = torch.randperm(num_pages, generator=draw)[:-1].view(len(starts), columns)
    for start, row in zip(starts, table, strict=True):
        values = torch.randn(2, start + case.held, case.heads, case.dim, generator=draw)
        values[1, start:] *= 1024
        if 0 < case.window < start:
            values[:, : start - case.window + 1] = torch.nan
            values[1, start - case.window + 1] *= 1024
        token = torch.arange(start + case.held)
        pool[:, row[token // case.page], token % case.page] = values
    size = len(starts), case.rows, case.heads * case.group, case.dim
    return {
        "pool": pool.to(case.dtype),
        "table": table.int(),
        "tiles": torch.tensor([[start, 0, case.held, 0] for start in starts], dtype=torch.int32),
        "queries": (2 * torch.randn(size, generator=draw)).to(case.dtype),
        # a share of about half
        "sinks": torch.randn(size[2], generator=draw) + math.log(case.start) + 2,
        "end": case.start + case.held,
        "window_len": case.window,
    } | ({} if case.has_sinks else {"sinks": None})


def on(device, its):
    return {name: each.to(device) if torch.is_tensor(each) else each for name, each in its.items()}


@functools.cache
def computed(case, device):
    """The kernel's result, shared by tests that only read it."""
    return attend(**on(device, drawn(case)))


def excess(case, device, spoil=lambda its: its):
    """The largest error divided by its tolerance; `spoil` changes the reference's arguments."""
    its, got = drawn(case), computed(case, device).cpu().double()
    its["tiles"] = its["tiles"].clone()
    its = spoil(its)
    pool = its.pop("pool").double().nan_to_num(0.0)
    its["queries"] = its["queries"].double()
    wanted = naive_attend(pool, **its)
    pool[1].abs_()
    magnitude = naive_attend(pool, **its)
    flat = its | {"queries": torch.zeros_like(its["queries"]), "sinks": None}
    every = naive_attend(pool, **flat) * its["end"]  # at least the sum over all tokens
    info = torch.finfo(case.dtype)
    tolerance = info.eps / 2 * (magnitude + wanted.abs() + info.tiny * every)
    tolerance += SLACK[case.dtype] * magnitude
    ratio = ((got - wanted).abs() / tolerance)[:, : case.held]
    return float(ratio.nan_to_num(torch.inf).max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_as_near_to_fp64_as_its_dtype_allows(case, device):
    assert excess(case, device) < 1


def late(its):
    its["tiles"][:, 0] -= 1
    return its


def rounded(its):
    bits = its["queries"].view(torch.int32)
    return its | {"queries": ((bits + 0x1000) & ~0x1FFF).view(torch.float32)}


FAULTS = {
    "the last token is hidden": ("prefill", late),
    "one more token in the window": ("window", lambda its: its | {"window_len": 10}),
    "one token less in the window": ("window of fp16", lambda its: its | {"window_len": 19}),
    "no sinks": ("decode", lambda its: its | {"sinks": None}),
    "another scale": ("prefill", lambda its: its | {"queries": its["queries"] * 1.001}),
    "products of 11 bits, as tensor cores round fp32": ("decode", rounded),
}


@pytest.mark.parametrize(("name", "spoil"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_of_attention_exceeds_twice_the_tolerance(name, spoil, device):
    assert excess(SMALL[name], device, spoil) > 2


BATCHED = "decode in long splits", "window in splits", "whole page"


@pytest.mark.parametrize("name", BATCHED)
def test_attention_of_a_tile_has_the_same_bits_alone_and_in_a_batch(name, device):
    its, both = on(device, drawn(CASES[name])), computed(CASES[name], device)
    for tile, (start, _, held, _) in enumerate(its["tiles"].tolist()):
        alone = {name: its[name][tile : tile + 1] for name in ("table", "tiles", "queries")}
        assert torch.equal(attend(**its | alone | {"end": start + held})[0], both[tile])


def test_attention_of_a_row_has_the_same_bits_in_a_full_tile_and_a_partial_one(device):
    case = replace(SMALL["prefill"], held=16, heads=1, group=1)
    its, whole = on(device, drawn(case)), computed(case, device)
    its["tiles"][:, 2] = 6
    assert torch.equal(attend(**its)[:, :6], whole[:, :6])


def test_one_decode_of_8k_tokens_fills_a_gpu_and_scratch_memory_is_bounded(monkeypatch):
    """A GPU has 132 SMs; each program reads a split of one KV head."""
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
    ({"dim": 512}, {}, "heads of 8·n elements up to 256, .* got 512 elements of torch.float32"),
    ({"dim": 264}, {}, "got 264 elements"),
    ({"dim": 36}, {}, "got 36 elements"),
    ({"dtype": torch.float64}, {}, "fp32, fp16 or bf16: got 16 elements of torch.float64"),
    ({"group": 32, "rows": 1}, {}, "at most 16 query heads a KV head, .* got 1 rows of 32"),
    ({"rows": 17}, {}, "of 2\\*\\*n rows, wanted: got 17 rows"),
    ({}, {"queries": lambda x: x.half()}, "queries must be"),
    ({}, {"queries": lambda x: x[:, :, :3]}, "queries must be"),
    ({}, {"table": lambda x: x.repeat(1, 2)[:, ::2]}, "contiguous table wanted"),
    ({}, {"pool": lambda x: x.repeat(1, 1, 1, 1, 2)[..., :16]}, "contiguous pages"),
]


@pytest.mark.parametrize(("sizes", "change", "sentence"), REFUSED)
def test_arguments_that_attention_does_not_support_are_refused(sizes, change, sentence, device):
    its = on(device, drawn(replace(Case(held=1), **sizes)))
    its |= {name: each(its[name]) for name, each in change.items()}
    with pytest.raises(ValueError, match=sentence):
        attend(**its)
