"""Encoding and decoding of items equal torch's, bit for bit; repetition changes nothing more."""

from random import Random

import pytest
import torch
from on_gpu import ON_GPU

from hicache.kernels import transcode
from hicache.kernels.load import LoadBuffer, load_items, load_of, load_table, naive_load_items
from hicache.kernels.transcode import (
    Format,
    code_table,
    coded_bytes,
    coded_of,
    row_len,
    wide_of,
)
from hicache.workbench.codegen_cases import ENCODES

POISON = 0x55
COMBINATIONS = [
    (torch.bfloat16, Format.int8),
    (torch.bfloat16, Format.fp8),
    (torch.float32, Format.int8),
    (torch.float32, Format.fp8),
    (torch.float32, Format.bf16),
    (torch.bfloat16, Format.fp4),
    (torch.float32, Format.fp4),
]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 KiB, so that even small pools have several."""
    monkeypatch.setattr(transcode, "TILE_BYTES", 4 << 10)


def loaded(table, coded_ids, wide_ids, launch=load_items, **options):
    """Decode items by a load-back of one layer; those with a negative id stay."""
    sides = zip(table.coded, table.wide, strict=True)
    buffers = [LoadBuffer(0, 0, source, target, table.form) for source, target in sides]
    loads = load_table(buffers, 1)
    pairs = [pair for pair in zip(coded_ids, wide_ids, strict=True) if min(pair) >= 0]
    ids = torch.tensor(pairs, dtype=torch.int32).view(-1, 2)
    counters = torch.zeros(1, 2, dtype=torch.int32, device=loads.device)
    launch(loads, load_of(loads, {0: (ids[:, 0].clone(), ids[:, 1].clone())}), counters, **options)


def bits_of(values):
    return values.contiguous().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def difficult(draw, shape, dtype):
    """Rows of very different sizes, with zeros, subnormal and extreme values, ties and NaN."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    spread = draw.choice((0.0, 1.0, 20.0))
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(spread * torch.randn((*shape[:-1], 1), generator=generator))
    values = values.to(dtype)
    special = (0.0, -0.0, 1e-40, -3e-38, 3.3e38, -3.4e38, torch.inf, torch.nan, 127 / 128, 255.0)
    special += (1.984375, 1.9921875, 240.0, 248.0, 2.0**-9, 0.5, 1.5, 2.5)
    rows = values.view(-1, shape[-1])
    for row in range(0, len(rows), 3):
        for _ in range(draw.randrange(3)):
            rows[row, draw.randrange(shape[-1])] = draw.choice(special)
        if draw.random() < 0.1:
            rows[row] = draw.choice(special)
    return values


class Case:
    """A random case: wide items are some heads of a larger slab, coded items have gaps."""

    def __init__(self, number, device):
        draw = Random(number)
        self.dtype, self.form = draw.choice(COMBINATIONS)
        num_buffers, self.num_wide, self.num_coded = (draw.randint(1, n) for n in (3, 4, 5))
        token, head = draw.choice((1, 4, 8)), draw.choice((1, 2, 3, 8))
        dims = (64, 128, 192, 256) if self.form is Format.fp4 else (16, 32, 48, 64, 128, 192)
        shape = (token, head, draw.choice(dims))
        more = draw.choice((0, 0, 2))  # heads of other ranks
        layers = draw.random() < 0.5
        slab = (num_buffers, self.num_wide) if layers else (self.num_wide, num_buffers)
        slab = difficult(draw, (*slab, token, head + more, shape[-1]), self.dtype).to(device)
        self.slab = slab
        self.num_bytes = coded_bytes(shape, self.form)
        apart = self.num_bytes + 16 * draw.randrange(3)
        self.host = torch.full((self.num_coded, num_buffers, apart), POISON, dtype=torch.uint8)
        if device.type == "cuda":
            self.host = self.host.pin_memory()
        first = draw.randint(0, more)
        heads = slice(first, first + head)
        self.wide = [part[..., heads, :] for part in slab.unbind(0 if layers else 1)]
        self.coded = [part[:, : self.num_bytes] for part in self.host.unbind(1)]
        self.table = code_table(self.wide, self.coded, self.form)
        self.programs = draw.choice((None, 1, 2, 5))
        count = draw.randint(0, min(self.num_wide, self.num_coded))
        self.wide_ids = draw.sample(range(self.num_wide), count)
        self.coded_ids = draw.sample(range(self.num_coded), count)
        if count > 1 and draw.random() < 0.3:
            self.wide_ids[0] = self.wide_ids[1]  # one item coded twice
        if count and draw.random() < 0.3:
            draw.choice((self.wide_ids, self.coded_ids))[0] = -1
        self.device = device

    def moved(self, encode, decode, **options):
        """Encode, then decode; return the contents of both pools after each."""
        both = self.wide_ids, self.coded_ids
        ids = [torch.tensor(each, dtype=torch.int32, device=self.device) for each in both]
        encode(self.table, *ids, **options)
        self.synchronize()
        encoded = [self.host.clone(), bits_of(self.slab).cpu().clone()]
        wide_ids = [-1 if i in self.wide_ids[:n] else i for n, i in enumerate(self.wide_ids)]
        loaded(self.table, self.coded_ids, wide_ids, decode, **options)
        self.synchronize()
        return [*encoded, self.host, self.slab.cpu().nan_to_num(nan=7.5)]

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


FEW = 40


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "numbers", [range(FEW), pytest.param(range(FEW, 1000), marks=pytest.mark.soak)], ids=len
)
def test_random_encodes_and_decodes_equal_torch_bit_for_bit(numbers, device):
    cases = [Case(number, device) for number in numbers]
    for number, case in zip(numbers, cases, strict=True):
        got = case.moved(transcode.encode_items, load_items, num_programs=case.programs)
        twin = Case(number, torch.device("cpu"))
        wanted = twin.moved(transcode.naive_encode_items, naive_load_items)
        assert all(map(torch.equal, got, wanted)), number
    assert {(case.dtype, case.form) for case in cases} == set(COMBINATIONS)
    # pieces are larger and smaller than a tile
    sizes = [
        transcode.constants_of(case.table, encodes=encodes)["TILE"] - case.table.rows
        for case in cases
        for encodes in (True, False)
    ]
    assert min(sizes) < 0 < max(sizes)
    assert any(not case.slab.isfinite().all() for case in cases)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("dtype", "form"), COMBINATIONS)
def test_repeated_encoding_and_decoding_equals_doing_it_once(dtype, form, device):
    wide = difficult(Random(7), (3, 4, 2, 64), dtype).to(device)
    coded = torch.zeros(2, 3, coded_bytes(wide.shape[1:], form), dtype=torch.uint8)
    coded = coded.pin_memory() if device.type == "cuda" else coded
    hops = [code_table([wide], [each], form) for each in coded]
    ids = torch.arange(3, dtype=torch.int32, device=device)
    results = []
    for move in range(3):
        transcode.encode_items(hops[move % 2], ids, ids.flip(0))
        loaded(hops[move % 2], ids.flip(0).tolist(), ids.tolist())
        if device.type == "cuda":
            torch.cuda.synchronize()
        results.append((coded[move % 2].clone(), wide.cpu().nan_to_num(nan=7.5)))
    assert all(map(torch.equal, results[-1], results[0]))


def encoded(name, device, draw):
    """Encode random items of a model; return them, the bytes that were written, and the format."""
    dtype, shape, form = ENCODES[name]
    if ON_GPU:
        count = max((32 << 20) // (torch.Size(shape).numel() * dtype.itemsize), 4)
    else:
        shape, count = (4, *shape[1:]), 2
    items = torch.randn(2, count, *shape, generator=draw)
    items *= torch.exp2(8 * torch.randn(2, count, *shape[:-1], 1, generator=draw))
    items = items.to(dtype)
    coded = torch.full((2, count, coded_bytes(shape, form)), POISON, dtype=torch.uint8)
    wide, target = items.to(device), coded.to(device)
    ids = torch.arange(count, dtype=torch.int32)
    given = ids.to(device), ids.roll(1).to(device)
    transcode.encode_items(code_table([*wide], [*target], form), *given)
    return items, target.cpu()[:, ids.roll(1).long()], form


def excess(items, got, form):
    """The largest error of decoded items divided by the tolerance of their format.

    int8 rounds to multiples of a scale that is below 2/127 of the row's largest value; fp8 rounds
    to 4 bits, or to multiples of 2**-9 of its scale, at most 1/128 of the largest value.
    """
    wide = torch.cat([wide_of(each, items.shape[2:], form) for each in got]).double()
    rows = items.double().flatten(0, 1).unflatten(-1, (-1, row_len(items.shape[-1])))
    # values above 248 of 256 are rounded up: the scale is then at most the largest value over 124
    largest = rows.abs().amax(-1, keepdim=True).expand_as(rows) * 128 / 124
    tolerance = largest / 127
    if form is Format.fp8:
        tolerance = torch.maximum(rows.abs() / 16, largest / 128 * 2.0**-10)
    elif form is Format.fp4:  # scales are rounded to 4 bits, and are 2**-6 of a row's at least
        blocks = rows.unflatten(-1, (-1, 16)).abs().amax(-1) * 17 / 16
        least = rows.abs().amax(-1, keepdim=True) * 2.0**-13
        blocks = torch.maximum(blocks, least).repeat_interleave(16, dim=-1)
        tolerance = torch.maximum(rows.abs() / 4, blocks / 24)
    return float(((wide.view_as(rows) - rows).abs() / tolerance).max())


@pytest.mark.parametrize("name", ENCODES)
def test_encoded_items_are_as_exact_as_their_format_allows(name, device, generator):
    items, got, form = encoded(name, device, generator)
    for each, its in zip(items, got, strict=True):
        wanted = coded_of(each, form)
        assert torch.equal(its[:, : wanted.shape[1]], wanted)
    assert 0.4 < excess(items, got, form) <= 1
    if form in (Format.int8, Format.fp8):
        got[0, 0, coded_bytes(items.shape[2:], form) - 1] ^= 1  # the exponent of a scale
        assert excess(items, got, form) > 1


@pytest.mark.parametrize(
    ("shape", "form", "num_bytes"),
    [
        ((16, 8, 128), Format.int8, 16 * 8 * 132),
        ((16, 8, 192), Format.fp8, 16 * 8 * (192 + 3 * 4)),
        ((64, 128), Format.bf16, 64 * 128 * 2),
        ((16, 8, 128), Format.fp4, 16 * 8 * (64 + 8 + 4)),  # 0.30 of bf16
        ((1, 1, 512), Format.int8, 512 + 16),  # two scales, padded to 16 bytes
    ],
)
def test_a_coded_item_has_a_code_for_each_element_and_a_scale_for_each_row(shape, form, num_bytes):
    assert coded_bytes(shape, form) == num_bytes


def test_the_length_of_a_coded_row_is_a_power_of_two():
    assert [row_len(n) for n in (64, 128, 192, 512, 576, 96)] == [64, 128, 64, 256, 64, 32]


BF16 = torch.bfloat16


def pool(*shape, dtype=BF16):
    return torch.zeros(2, *shape, dtype=dtype)


CODED = pool(4 * (64 + 4), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("wide", "coded", "form", "sentence"),
    [
        ([pool(4, 64)], [CODED], "bf16", "bf16 codes fp32 .* got torch.bfloat16"),
        ([pool(4, 64, dtype=torch.float64)], [CODED], "int8", "got torch.float64"),
        ([pool(4, 24)], [pool(144, dtype=torch.uint8)], "int8", "rows of 16·n coded bytes"),
        ([pool(4, 32)], [pool(96, dtype=torch.uint8)], "fp4", "64·n elements wanted, .* of 32"),
        ([pool(4, 64)], [], "int8", "got 1 and 0"),
        ([pool(4, 64)], [pool(272)], "int8", r"\[items, 272\] uint8 wanted, got .* torch.bfloat16"),
        ([pool(4, 64)], [CODED[:, :256]], "int8", r"\[items, 272\] uint8 wanted"),
        ([pool(4, 64)] * 2, [CODED, CODED], "int8", "buffer 0 and .* buffer 1 overlap"),
    ],
    ids=str,
)
def test_pools_that_cannot_be_coded_are_refused(wide, coded, form, sentence):
    with pytest.raises(ValueError, match=sentence):
        code_table(wide, coded, Format[form])
