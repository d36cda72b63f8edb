"""Every kernel at the shapes of models (`codegen_cases`), against references in fp64 on the host.

On a GPU the sizes are those of production. Without one, the interpreter runs the same tests at
small sizes, with fp16 in place of bf16 in attention, because its products of bf16 are wrong.

Copies, coded pages, appended rows and page tables must be equal bit for bit. The other tolerances:

encode     int8 rounds to multiples of a scale that is below 2/127 of the largest value; fp8 rounds
           to 4 bits, or to multiples of 2**-9 of its scale, at most 1/128 of the largest value.
attention  the weights of the softmax and the result are rounded to the dtype (`u`), so an element
           is off by u · (Σ weight · |value| + |result|), and u · `tiny` · Σ |value| for weights
           that are subnormal; fp32 sums and scores add `SLACK` of the first sum: a score has an
           error of at most 128 · 2**-24 · Σ |q · k| / √128.
scan       fp32 sums of 128 products over 100 steps whose errors decay with the state; measured
           with the values drawn here, they are below 2e-6 of the largest result.
"""

import math

import pytest
import torch
from torch.nn.functional import pad

from hicache.kernels import attend as attend_module
from hicache.kernels import copy, copy_table, index, transcode
from hicache.kernels.append import append, naive_append
from hicache.kernels.attend import attend
from hicache.kernels.load import LoadBuffer, load_items, load_of, load_table, wait_for_layer
from hicache.kernels.scan import ScanWeights, naive_scan, scan
from hicache.kernels.transcode import Format, code_table, coded_bytes, coded_of, wide_of
from hicache.workbench.codegen_cases import APPENDS, ATTENDS, COPIES, ENCODES, LOADS, PARTS, SCANS

ON_GPU = torch.cuda.is_available()
POISON = 0xA5
SLACK = {torch.float32: 2.0**-16, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-12}
SCAN_TOLERANCE = 1e-5
WINDOW = 1000 if ON_GPU else 100


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Many of these tests run at once, and the host computes their references."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def i32(values):
    return torch.as_tensor(values, dtype=torch.int32)


def on(device, *tensors):
    return [each.to(device) for each in tensors]


def pinned(tensor):
    return tensor.pin_memory() if ON_GPU else tensor


# copies


def copied(name, direction, device, draw, *, exchanges=False, has_sums=False):
    """Copy random items; return how many bytes of the target differ, and both checksums."""
    size, rows = COPIES[name]
    count = min((16 << 20) // size, 8192) if ON_GPU else 5
    shape = 2, count, rows, 2 * size // rows
    source = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    target = torch.full_like(source, POISON)
    ids = torch.randperm(count, generator=draw), torch.randperm(count, generator=draw)
    ids[1][1] = -1  # a hole
    expected = target.clone()
    expected[:, ids[1][ids[1] >= 0], :, : size // rows] = source[
        :, ids[0][ids[1] >= 0], :, : size // rows
    ]
    source = pinned(source) if direction == "from the host" else source.to(device)
    target = pinned(target) if direction == "to the host" else target.to(device)
    if exchanges:  # the first item and the last
        ids[1][[0, -1]] = ids[1][[-1, 0]]
    src, dst = ([each[..., : size // rows] for each in pool] for pool in (source, target))
    launch = copy.copy_items_with_checksum if has_sums else copy.copy_items
    sums = launch(copy_table(src, dst), *on(device, *map(i32, ids)))
    if ON_GPU:
        torch.cuda.synchronize()
    wanted = torch.zeros(count, dtype=torch.int64)
    if has_sums:
        words = torch.cat([each.cpu().flatten(1).view(torch.int64) for each in src], dim=1)
        wanted = torch.where(ids[1] >= 0, copy.checksums(words)[ids[0]], 0)
    return int((target.cpu() != expected).sum()), sums, wanted


@pytest.mark.parametrize("direction", ["in the device", "to the host", "from the host"])
@pytest.mark.parametrize("name", COPIES)
def test_copied_items_are_equal(name, direction, device, generator):
    differing, _, _ = copied(name, direction, device, generator)
    assert differing == 0


def test_checksums_are_those_of_the_items(device, generator):
    name = "pages of 64 KiB and more, Mamba slots"
    differing, sums, wanted = copied(name, "in the device", device, generator, has_sums=True)
    assert differing == 0
    assert torch.equal(sums.cpu(), wanted)
    assert len(set(wanted.tolist())) == len(wanted)


@pytest.mark.parametrize("direction", ["in the device", "to the host", "from the host"])
def test_two_items_exchanged_show(direction, device, generator):
    name = "2 of 8 heads of 16 tokens (rows of 512 B)"
    differing, _, _ = copied(name, direction, device, generator, exchanges=True)
    assert differing > 2 * COPIES[name][0]


# coded copies


def encoded(name, device, draw):
    """Encode random items; return them, and the bytes that the kernel wrote."""
    dtype, shape, form = ENCODES[name]
    count = max((32 << 20) // (torch.Size(shape).numel() * dtype.itemsize), 4) if ON_GPU else 2
    items = torch.randn(2, count, *shape, generator=draw)
    items *= torch.exp2(8 * torch.randn(2, count, *shape[:-1], 1, generator=draw))
    items = items.to(dtype)
    coded = torch.full((2, count, coded_bytes(shape, form)), POISON, dtype=torch.uint8)
    wide, target = on(device, items, coded)
    ids = torch.arange(count).roll(1)
    given = on(device, i32(range(count)), i32(ids))
    transcode.encode_items(code_table([*wide], [*target], form), *given)
    return items, target.cpu()[:, ids], form


def excess(items, got, form):
    """The largest error of decoded items, in terms of the tolerance."""
    wide = torch.cat([wide_of(each, items.shape[2:], form) for each in got]).double()
    rows = items.double().flatten(0, 1).unflatten(-1, (-1, transcode.row_len(items.shape[-1])))
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
def test_encoded_items_are_as_near_as_their_format_allows(name, device, generator):
    items, got, form = encoded(name, device, generator)
    for each, its in zip(items, got, strict=True):
        wanted = coded_of(each, form)
        assert torch.equal(its[:, : wanted.shape[1]], wanted)
    assert 0.4 < excess(items, got, form) <= 1


@pytest.mark.parametrize("name", [*ENCODES][:2])
def test_a_wrong_scale_of_one_row_shows(name, device, generator):
    items, got, form = encoded(name, device, generator)
    got[0, 0, coded_bytes(items.shape[2:], form) - 1] ^= 1  # of its exponent, the highest bits
    assert excess(items, got, form) > 1


def load_buffers(name, device, draw, num_layers):
    """Random items on the host, and what the device shall hold of them."""
    form, parts = LOADS[name]
    buffers, wanted = [], []
    for layer in range(num_layers):
        for kind, part in enumerate(parts):
            shape, dtype = PARTS[part]
            count = (64 if part == "pages" else 8) if ON_GPU else 2
            code = None if part == "taps" else form
            if code is None:
                values = torch.randn(count, *shape, generator=draw).to(dtype)
                source = values.flatten(1).view(torch.uint8)
            elif code is Format.fp4:
                source = coded_of(torch.randn(count, *shape, generator=draw), code)
                values = wide_of(source, shape, code).to(dtype)
            else:
                row = transcode.row_len(shape[-1])
                codes = torch.randint(-127, 127, (count, torch.Size(shape).numel()), generator=draw)
                codes = torch.where(codes == -1, 1, codes).to(torch.int8)  # NaN in fp8
                rows = codes if code is Format.int8 else codes.view(torch.float8_e4m3fn).float()
                rows = rows.double().unflatten(1, (-1, row))
                powers = torch.randint(-20, 20, rows.shape[:2], generator=draw)
                scales = torch.ldexp(torch.ones(rows.shape[:2]), powers)
                values = (rows * scales.double()[..., None]).view(count, *shape).to(dtype)
                source = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=1)
                source = pad(source, (0, coded_bytes(shape, code) - source.shape[1]))
            target = torch.full((count, *shape), 7.0, dtype=dtype)
            buffers.append(LoadBuffer(layer, kind, pinned(source), target.to(device), code))
            wanted.append(values)
    return buffers, wanted


@pytest.mark.parametrize("name", LOADS)
def test_a_layer_whose_counter_has_risen_is_loaded(name, device, generator):
    """The load-back runs on a stream of its own; what waits for a layer reads it at once."""
    num_layers = 4 if ON_GPU else 1
    buffers, wanted = load_buffers(name, device, generator, num_layers)
    table = load_table(buffers, num_layers)
    counters = torch.zeros(num_layers, 2, dtype=torch.int32, device=device)
    moves = {}
    for each in buffers[: len(LOADS[name][1])]:
        ids = torch.randperm(len(each.source), generator=generator)
        moves[each.kind] = i32(ids), i32(ids.roll(1))
    given = load_of(table, moves)
    if ON_GPU:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            load_items(table, given, counters)
    else:
        load_items(table, given, counters)
    for layer in range(num_layers):
        wait_for_layer(counters, layer, 1)
        for each, values in zip(buffers, wanted, strict=True):
            if each.layer == layer:
                src_ids, dst_ids = moves[each.kind]
                got = each.target.clone().cpu()
                assert torch.equal(got[dst_ids.long()], values[src_ids.long()])
                assert not torch.equal(got, values)  # the order matters
    assert counters.tolist() == [[0, 1]] * num_layers


# appended tokens and attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", APPENDS)
def test_appended_rows_lie_where_torch_puts_them(name, dtype, device, generator):
    shape = APPENDS[name]
    tiles = 64 if ON_GPU else 2
    columns = 2 + shape.rows // shape.page
    size = (2, tiles * columns + 3, shape.page, shape.heads, shape.dim)
    pool = torch.full(size, 7.0, dtype=dtype)
    table = torch.randperm(size[1], generator=generator)[: tiles * columns].view(tiles, columns)
    info = torch.stack([torch.arange(tiles) * 5 % shape.page + shape.page] * 4, dim=1)
    info[:, 1], info[:, 2], info[:, 3] = 1, shape.rows - torch.arange(tiles) % 7, 1
    # keys and values lie beside each other, as a projection leaves them
    both = torch.randn(tiles, shape.rows, 2, *size[3:], generator=generator).to(dtype)
    wanted = pool.clone()
    naive_append(wanted, i32(table), i32(info), both[:, :, 0], both[:, :, 1])
    got, table, info, both = on(device, pool.clone(), i32(table), i32(info), both)
    append(got, table, info, both[:, :, 0], both[:, :, 1])
    assert torch.equal(got.cpu(), wanted)
    assert (wanted != pool).sum() > pool.numel() // 8
    append(got, table, info, both[:, :, 1], both[:, :, 0])
    assert not torch.equal(got.cpu(), wanted)  # keys and values exchanged


def drawn_attention(name, draw):
    """A batch of tiles; what no row may read is NaN, and tokens at edges have large values."""
    shape = ATTENDS[name]
    if not ON_GPU:
        half = torch.float16 if shape.dtype == torch.bfloat16 else shape.dtype
        shape = shape._replace(heads=2, rows=min(shape.rows, 16), dtype=half)
    long = (8192 if shape.rows == 1 else 1984) if ON_GPU else 192
    starts = [long, long // 2 - 64 + (shape.rows == 1) * 37, 0]
    columns = -(-(long + shape.rows) // shape.page)
    num_pages = columns * len(starts) + 1
    pool = torch.full((2, num_pages, shape.page, shape.heads, shape.dim), torch.nan)
    table = torch.randperm(num_pages, generator=draw)[:-1].view(len(starts), columns)
    for start, row in zip(starts, table, strict=True):
        token = torch.arange(start + shape.rows)
        values = torch.randn(2, len(token), shape.heads, shape.dim, generator=draw)
        values[1, start:] *= 1024
        if start >= WINDOW:
            values[1, start - WINDOW] *= 1024
        pool[:, row[token // shape.page], token % shape.page] = values
    size = len(starts), shape.rows, shape.heads * shape.group, shape.dim
    return {
        "pool": pool.to(shape.dtype),
        "table": i32(table),
        "tiles": i32([[start, 0, shape.rows, 0] for start in starts]),
        "queries": (2 * torch.randn(size, generator=draw)).to(shape.dtype),
        "sinks": torch.randn(size[2], generator=draw) + math.log(long) + 2,  # a share of about half
    }


def attention(pool, table, tiles, queries, sinks, *, window=0, late=0, hidden=(), scale=1.0):
    """Attention in fp64, with the values' magnitudes, and the sum of the latter over all tokens.

    `late`, `hidden` and `scale` are faults: rows see fewer tokens, tokens are hidden, scores are
    scaled.
    """
    results = []
    for row, (start, _, held, _), query in zip(table, tiles.tolist(), queries, strict=True):
        token = torch.arange(start + held)
        pages = row[token // pool.shape[2]].long()
        keys, values = pool[:, pages, token % pool.shape[2]].double().permute(0, 2, 1, 3)
        heads, dim = keys.shape[0], keys.shape[2]
        its = query.double().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, G, R, D]
        scores = (its.flatten(1, 2) @ keys.mT).view(*its.shape[:3], -1) * (dim**-0.5 * scale)
        position = start + torch.arange(len(query))[:, None]
        seen = token <= position - late
        if window:
            seen &= token > position - window
        seen &= ~torch.isin(token, torch.tensor(hidden, dtype=torch.int64))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.double().view(heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=-1)
        shares = scores.softmax(-1)[..., : len(token)].flatten(1, 2)
        once = seen.double().repeat(its.shape[1], 1)
        sums = [shares @ values, shares @ values.abs(), once @ values.abs()]
        sums = [each.view(its.shape).permute(2, 0, 1, 3).flatten(1, 2) for each in sums]
        results.append(torch.stack(sums))
    return torch.stack(results, dim=1)


def attention_excess(name, device, draw, *, window=0, **fault):
    """The largest error of each tile, in terms of the tolerance; a fault is the reference's."""
    drawn = drawn_attention(name, draw)
    dtype = drawn["pool"].dtype
    end = int(drawn["tiles"][:, [0, 2]].sum(1).max())
    given = {key: each.to(device) for key, each in drawn.items()}
    got = attend(**given, end=end, window_len=window).cpu().double()
    if fault.pop("exchanges", False):
        count = drawn["table"].shape[1] // 4
        drawn["table"][:2, :count] = drawn["table"][:2, :count].flip(0)
    if fault.pop("has_no_sinks", False):
        drawn["sinks"] = None
    if fault.pop("rounds", False):
        bits = drawn["queries"].view(torch.int32)
        bits.copy_((bits + 0x1000) & ~0x1FFF)
    wanted, magnitude, every = attention(**drawn, window=window + fault.pop("longer", 0), **fault)
    info = torch.finfo(dtype)
    tolerance = info.eps / 2 * (magnitude + wanted.abs() + info.tiny * every)
    tolerance += SLACK[dtype] * magnitude
    ratio = (got - wanted).abs() / tolerance
    return ratio.nan_to_num(torch.inf).flatten(1).amax(1).tolist()


@pytest.fixture
def small_splits(monkeypatch):
    """Several splits of the short sequences that the interpreter has."""
    if not ON_GPU:
        monkeypatch.setattr(attend_module, "SPLIT", 64)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("name", ATTENDS)
def test_attention_is_as_near_as_its_dtype_allows(name, device, generator):
    assert max(attention_excess(name, device, generator)) < 1


DECODE, PREFILL, FP32 = (
    f"{what} attention, {form}"
    for what, form in (
        ("decode", "pages of 16 × 8 heads"),
        ("prefill", "pages of 64 × 8 heads"),
        ("decode", "fp32"),
    )
)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_windows_are_as_near_as_their_dtype_allows(name, device, generator):
    assert max(attention_excess(name, device, generator, window=WINDOW)) < 1


FAULTS = {
    "the last token is not seen": {"late": 1},
    "a token more in the window": {"longer": 1, "window": WINDOW},
    "pages of another sequence": {"exchanges": True},
    "a split is missing": {"hidden": [*range(512, 1024)] if ON_GPU else [*range(64, 128)]},
    "no sinks": {"has_no_sinks": True},
    "another scale": {"scale": 1.1},
}


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("name", [DECODE, PREFILL, FP32])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_attention_shows(fault, name, device, generator):
    assert attention_excess(name, device, generator, **fault)[0] > 2


@pytest.mark.usefixtures("small_splits")
def test_products_of_11_bits_would_show_in_fp32(device, generator):
    """Tensor cores multiply fp32 so unless they are told otherwise."""
    assert attention_excess(FP32, device, generator, rounds=True)[0] > 2


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_rows_have_the_same_bits_alone_and_in_a_batch(name, device, generator):
    drawn = {key: each.to(device) for key, each in drawn_attention(name, generator).items()}
    pool, sinks = drawn.pop("pool"), drawn.pop("sinks")
    ends = drawn["tiles"][:, [0, 2]].sum(1).tolist()
    both = attend(pool, **drawn, sinks=sinks, end=max(ends))
    for tile, end in enumerate(ends):
        its = {key: each[tile : tile + 1].contiguous() for key, each in drawn.items()}
        assert torch.equal(attend(pool, **its, sinks=sinks, end=end)[0], both[tile])


# scans and page tables


def scan_error(name, device, draw, *, fault=None):
    """The largest difference from fp64 in terms of the largest result, and from the taps."""
    (keys, dim), has_skip = SCANS[name]
    rows, heads, slots = (100, 32, 4) if ON_GPU else (6, 1, 4)
    ends = [[rows // 3, 1], [rows // 3 + 1, 2], [rows, 0]]
    channels, half = dim + 2 * keys, torch.bfloat16
    taps = torch.randn(slots, heads, 3, channels, generator=draw).to(half)
    states = torch.randn(slots, heads, keys, dim, generator=draw)
    inputs = torch.randn(rows, heads, channels, generator=draw).to(half)
    gates = torch.randn(rows, 1 if has_skip else 2, heads, generator=draw).to(half)
    skip = torch.randn(heads, generator=draw) if has_skip else None
    decay = torch.rand(heads, generator=draw) + 0.05
    weights = ScanWeights(torch.randn(4, heads, channels, generator=draw) / 2, decay, skip)
    moved = on(device, taps, states, inputs, gates)
    its = ScanWeights(*(None if each is None else each.to(device) for each in weights))
    sequence = i32([[3, 0, 0, len(ends), 0]])
    out = scan(*moved[:2], *on(device, sequence, i32(ends)), *moved[2:], its, block=8)
    wide = [each.double() for each in (taps, states, inputs, gates)]
    its = ScanWeights(*(None if each is None else each.double() for each in weights))
    if fault == "end":
        ends[0][0] += 1
    elif fault == "tap":
        its = its._replace(conv=its.conv.roll(1, 0))
    elif fault == "decay":
        its = its._replace(decay=its.decay * 1.001)
    wanted = naive_scan(*wide[:2], sequence, i32(ends), *wide[2:], its, block=8)
    errors = [
        float((got.cpu().double() - each).abs().max() / each.abs().max())
        for got, each in ((out, wanted), (moved[1], wide[1]))
    ]
    return max(errors), int((moved[0].cpu().double() != wide[0]).sum())


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_is_as_near_as_fp32_allows(name, device, generator):
    error, differing_taps = scan_error(name, device, generator)
    assert error < SCAN_TOLERANCE
    assert differing_taps == 0


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("fault", ["end", "tap", "decay"])
def test_a_fault_of_a_scan_shows(fault, name, device, generator):
    error, differing_taps = scan_error(name, device, generator, fault=fault)
    assert error > 5 * SCAN_TOLERANCE
    assert (differing_taps > 0) == (fault == "end")


def page_tables(device, draw, *, late=0):
    """Tables of random spans; return the kernel's and that of Python."""
    requests, columns = (256, 2048) if ON_GPU else (5, 40)
    page_ids = torch.randint(-1, 5000, (3 * columns,), generator=draw)
    lengths = torch.randint(1, columns // 2, (requests, 2), generator=draw)
    starts = torch.randint(0, columns, (requests, 2), generator=draw)
    spans = torch.stack([starts, lengths], dim=-1).flatten(0, 1)
    bounds = torch.arange(0, 2 * requests + 1, 2)
    rows = []
    for each in spans.view(requests, 2, 2).tolist():
        ids = torch.cat([page_ids[start + late : start + late + n] for start, n in each])
        rows.append(pad(ids.clamp(min=0), (0, columns - len(ids))))
    given = on(device, *map(i32, (page_ids, spans, bounds)))
    return index.page_table(*given, num_columns=columns).cpu(), i32(torch.stack(rows))


def test_page_tables_are_those_of_python(device, generator):
    assert torch.equal(*page_tables(device, generator))


def test_a_span_that_starts_late_shows(device, generator):
    assert not torch.equal(*page_tables(device, generator, late=1))
