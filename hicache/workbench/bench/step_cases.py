"""Cases of the bench for the other launches of a step: load-back, encode, append, attention, scan.

Attention and scan stand beside FlashInfer and flash-linear-attention, where they are installed.
Every result is verified before it is timed. A dry run launches the kernels themselves, in Triton's
interpreter at toy sizes.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hicache.kernels import scan
from hicache.kernels.append import append, naive_append
from hicache.kernels.attend import attend, naive_attend
from hicache.kernels.load import LoadBuffer, load_items, load_of, load_table
from hicache.kernels.transcode import (
    Format,
    code_table,
    coded_bytes,
    coded_of,
    encode_items,
    wide_of,
)
from hicache.workbench.bench import library_peers, peers
from hicache.workbench.bench.measure import KIB, Bench, graphed
from hicache.workbench.bench.session import Session
from hicache.workbench.contract import bound

PAGE = (16, 8, 128)  # tokens, KV heads, head size
STATE, TAPS = (32, 128, 128), (3, 8192)  # of a layer: 2 MiB in fp32, 48 KiB in bf16
QUERY_HEADS = 32
TILE_ROWS = 64  # query rows of a tile of prefill
NUM_DECODES = 64
TOLERANCE = 2e-2  # of the largest value: bf16 against a reference in fp32


def _host_bytes(bench: Bench) -> int:
    return bench.host_bytes if bench.on_gpu else 64 * KIB  # an interpreter pays for each item


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadBack:
    """A load-back of random items between host and device, and its buffers."""

    buffers: Sequence[LoadBuffer]
    moves: Mapping[int, tuple[Tensor, Tensor]]  # by kind: source and target ids in host memory
    num_layers: int
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes read from the host."""
        return sum(len(self.moves[each.kind][0]) * each.source[0].nbytes for each in self.buffers)

    def prepared(self) -> tuple[Callable[..., None], Tensor]:
        """Return a launch that takes a number of programs, and the counters that it raises."""
        table = load_table(self.buffers, self.num_layers)
        counters = torch.zeros(self.num_layers, 2, dtype=torch.int32, device=self.device)
        return partial(load_items, table, load_of(table, self.moves), counters), counters

    def verify(self) -> None:
        for number, each in enumerate(self.buffers):
            src_ids, dst_ids = (ids.long() for ids in self.moves[each.kind])
            items = each.source[src_ids].to(self.device)
            if each.form is not None:
                items = wide_of(items, each.target.shape[1:], each.form).to(each.target.dtype)
            wanted = torch.zeros_like(each.target)
            wanted[dst_ids.to(self.device)] = items
            bits = torch.int16 if wanted.dtype == torch.bfloat16 else torch.int32
            if not torch.equal(each.target.view(bits), wanted.view(bits)):
                raise RuntimeError(f"buffer {number} of a load-back differs from its source")


def load_back(bench: Bench, form: Format | None, *, has_states: bool) -> LoadBack:
    """Make a load-back of pages in all layers, or of pages in even and states in odd layers."""
    on_gpu = bench.on_gpu
    page, state, taps = (PAGE, STATE, TAPS) if on_gpu else ((4, 2, 64), (2, 8, 64), (3, 64))
    kv = [(0, page, torch.bfloat16, form)] * 2
    recurrent = [(1, state, torch.float32, form), (1, taps, torch.bfloat16, None)]
    parts = [
        (layer, *part)
        for layer in range(bench.num_layers)
        for part in (recurrent if has_states and layer % 2 else kv)
    ]
    buffers, moves = list[LoadBuffer](), dict[int, tuple[Tensor, Tensor]]()
    num_kinds, start = 1 + has_states, 0
    for kind in range(num_kinds):
        mine = [part for part in parts if part[1] == kind]
        sizes = [
            coded_bytes(shape, code) if code else math.prod(shape) * dtype.itemsize
            for _, _, shape, dtype, code in mine
        ]
        num_items = 2 * max(_host_bytes(bench) // num_kinds // sum(sizes), 1)
        slab = bench.arenas["host"][start : start + num_items * sum(sizes)]
        start += slab.numel()
        columns = slab.view(num_items, -1).split(sizes, dim=1)
        for (layer, _, shape, dtype, code), column in zip(mine, columns, strict=True):
            target = torch.zeros(num_items, *shape, dtype=dtype, device=bench.device)
            source = column.view(dtype).unflatten(1, shape) if code is None else column
            if code is not None:  # random bytes are no scales
                column.copy_(_coded(torch.randn_like(target), code, column.shape[1]))
            buffers.append(LoadBuffer(layer, kind, source, target, code))
        src_ids, dst_ids = bench.half_of(num_items)
        moves[kind] = src_ids.cpu(), dst_ids.cpu()
    buffers.sort(key=lambda each: each.layer)
    return LoadBack(buffers=buffers, moves=moves, num_layers=bench.num_layers, device=bench.device)


def _coded(items: Tensor, form: Format, num_bytes: int) -> Tensor:
    codes = coded_of(items, form)
    return functional.pad(codes, (0, num_bytes - codes.shape[1]))


def loads(session: Session) -> None:
    """Measure load-backs of all layers in one launch. Bytes are those read from the host."""
    bench = session.bench
    for form, has_states in itertools.product((None, Format.int8, Format.fp8), (False, True)):
        back = load_back(bench, form, has_states=has_states)
        launch, counters = back.prepared()
        launch()
        bench.synchronize()
        back.verify()
        if not bool((counters[:, 1] == 1).all()):
            raise RuntimeError(f"one launch counted in each layer wanted, got {counters[:, 1]}")
        what = f"{form.name if form else 'plain'} pages" + ", states and taps" * has_states
        for num_programs in (1, 2, 4, 8):
            case = f"{what}, {num_programs} programs"
            session.time("load", case, partial(launch, num_programs=num_programs), back.num_bytes)
        if form is None and not has_states and bench.on_gpu:
            sides = zip(*((each.source, each.target) for each in back.buffers), strict=True)
            every = bound(peers.memcpy_batch(*map(list, sides)), *back.moves[0])
            session.time("load", f"{what}, memcpy batch", every, back.num_bytes)


def encodes(session: Session) -> None:
    """Measure back-ups that change the format of numbers. Bytes are those of the wide numbers."""
    bench = session.bench
    page, state = (PAGE, STATE) if bench.on_gpu else ((4, 2, 64), (2, 8, 64))
    halves = (page[0], page[1], page[2] // 2) if bench.on_gpu else page
    for dtype, shape, form in (
        (torch.bfloat16, page, Format.int8),
        (torch.bfloat16, halves, Format.fp8),
        (torch.float32, state, Format.int8),
        (torch.float32, state, Format.bf16),
    ):
        item_bytes = coded_bytes(shape, form)
        num_items = 2 * max(_host_bytes(bench) // (bench.num_layers * item_bytes) // 4, 1)
        wide = [
            torch.randn(num_items, *shape, device=bench.device).to(dtype)
            for _ in range(bench.num_layers)
        ]
        ids = bench.half_of(num_items)
        num_bytes = len(ids[0]) * wide[0][0].nbytes * bench.num_layers
        for where, arena in (("device", "device_target"), ("to_host", "host_target")):
            slab = bench.arenas[arena][: num_items * item_bytes * bench.num_layers]
            coded = slab.view(bench.num_layers, num_items, item_bytes).unbind(0)
            table = code_table(wide, coded, form)
            encode_items(table, *ids)
            bench.synchronize()
            for number, (source, target) in enumerate(zip(wide, coded, strict=True)):
                wanted = coded_of(source[ids[0].long()], form)
                got = target[ids[1].long().to(target.device)].to(wanted.device)
                if not torch.equal(got[:, : wanted.shape[1]], wanted):
                    raise RuntimeError(f"{where}, {form.name}: buffer {number} differs")
            what = f"{where}, {str(dtype)[6:]} to {form.name}, items of {shape}"
            for num_programs in (1, 4) if where == "to_host" else (1, None):
                by = partial(encode_items, table, *ids, num_programs=num_programs)
                case = f"{what}, {num_programs or 'all'} programs"
                session.time("encode", case, by, num_bytes)


def appends(session: Session) -> None:
    """Measure the writes of new keys and values into pages. Bytes are those written."""
    bench = session.bench
    page, heads, dim = (64, 8, 128) if bench.on_gpu else (4, 2, 64)
    batches = {"decode": (NUM_DECODES, 1), "prefill": (1, 8192)}
    if not bench.on_gpu:
        batches = {"decode": (2, 1), "prefill": (1, 16)}
    for name, (num_tiles, num_rows) in batches.items():
        columns = -(-num_rows // page) + 1
        num_pages = num_tiles * columns
        pool = torch.zeros(2, num_pages, page, heads, dim, device=bench.device).bfloat16()
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int()
        table = order.view(num_tiles, columns).to(bench.device)
        tiles = torch.tensor([[3, 0, num_rows, 0]] * num_tiles, dtype=torch.int32).to(bench.device)
        keys, values = (
            torch.randn(num_tiles, num_rows, heads, dim, device=bench.device).bfloat16()
            for _ in range(2)
        )
        wanted = pool.clone()
        naive_append(wanted, table, tiles, keys, values)
        ours = partial(append, pool, table, tiles, keys, values)
        position = 3 + torch.arange(num_rows, device=bench.device)
        place = (table.long()[:, position // page] * page + position % page).flatten()
        rows = [each.flatten(0, 1) for each in (keys, values)]
        slots = [each.flatten(0, 1) for each in pool]

        def by_torch(slots: list[Tensor] = slots, place: Tensor = place, rows=rows) -> None:
            for target, source in zip(slots, rows, strict=True):
                target.index_copy_(0, place, source)

        for who, launch in (("ours", ours), ("torch", by_torch)):
            pool.zero_()
            launch()
            if not torch.equal(pool, wanted):
                raise RuntimeError(f"append for {name}, {who}, differs from its reference")
            repeated = graphed(launch, times=20) if bench.on_gpu else launch
            session.time("append", f"{name}, {who}", repeated, 20 * 2 * keys.nbytes, launches=20)


def attention(session: Session) -> None:
    """Measure paged attention, which verifies the cache here, beside libraries.

    Bytes are those of keys and values of all sequences, read once; those of a prefill are its
    floating-point operations, divided by 1,000.
    """
    bench = session.bench
    heads, dim, page = (8, 128, 64) if bench.on_gpu else (2, 32, 16)
    query_heads = QUERY_HEADS if bench.on_gpu else 4
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32  # bf16 dots fail in the interpreter
    for name, num_sequences, length, num_rows in (
        ("decode of 64 sequences of 8,192", NUM_DECODES, 8192, 1),
        ("decode of 1 sequence of 8,192", 1, 8192, 1),
        ("decode of 1 sequence of 131,072", 1, 131_072, 1),
        ("prefill of 2,048 tokens at 6,144", 1, 8192, 2048),
    ):
        if not bench.on_gpu:
            num_sequences, length, num_rows = min(num_sequences, 2), 64, min(num_rows, 32)
        columns = length // page
        num_pages = num_sequences * columns
        pool = torch.randn(2, num_pages, page, heads, dim, device=bench.device).to(dtype)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int()
        table = order.view(num_sequences, columns).to(bench.device)
        queries = torch.randn(num_sequences, num_rows, query_heads, dim, device=bench.device)
        queries = queries.to(dtype)
        tile = min(num_rows, TILE_ROWS if bench.on_gpu else 16)
        per_tile = num_rows // tile
        starts = length - num_rows + torch.arange(per_tile) * tile
        tiles = torch.stack([starts, 0 * starts, 0 * starts + tile, 0 * starts], dim=1)
        tiles = tiles.int().repeat(num_sequences, 1).to(bench.device)
        of_tiles = table.repeat_interleave(per_tile, dim=0)
        tiled = queries.reshape(num_sequences * per_tile, tile, query_heads, dim)
        ours = partial(attend, pool, of_tiles, tiles, tiled, end=length)
        naive = naive_attend(pool.float(), of_tiles[:1], tiles[:1], tiled[:1].float(), end=length)
        wanted = naive[0]
        num_bytes = 2 * num_sequences * length * heads * dim * dtype.itemsize
        if num_rows > 1:  # two products; half of the last square is masked
            pairs = num_rows * (length - num_rows) + num_rows * (num_rows + 1) // 2
            num_bytes = 4 * query_heads * dim * pairs // 1000
        launches: dict[str, Callable[[], Tensor]] = {"ours": ours}
        if bench.on_gpu:
            launches |= library_peers.attention(session, pool, table, queries)
        for who, launch in launches.items():
            got = launch().view(num_sequences, num_rows, query_heads, dim)[0, :tile].float()
            error = float((got - wanted).abs().max() / wanted.abs().max())
            if not error < TOLERANCE:
                raise RuntimeError(f"{name}, {who}: error {error:.2g} of the largest value")
            session.time("attend", f"{name}, {who}", launch, num_bytes)


def scans(session: Session) -> None:
    """Measure the scan of the gated delta rule, which verifies the cache here, beside fla's.

    Ours also convolves its inputs. Bytes are those of the inputs of ours.
    """
    bench = session.bench
    heads, keys, dim = STATE if bench.on_gpu else (2, 16, 16)
    channels = dim + 2 * keys
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    weights = scan.ScanWeights(
        torch.randn(4, heads, channels, device=bench.device),
        torch.rand(heads, device=bench.device),
        None,
    )
    long, many = (2048, NUM_DECODES) if bench.on_gpu else (32, 2)
    for count, num_rows in (1, 1), (many, 1), (1, long):
        tokens = f"{count} × {num_rows} tokens" if count > 1 else f"{num_rows} tokens"
        inputs = torch.randn(count * num_rows, heads, channels, device=bench.device).to(dtype)
        gates = torch.randn(count * num_rows, 2, heads, device=bench.device).to(dtype)
        taps = torch.zeros(2 * count, heads, 3, channels, device=bench.device, dtype=dtype)
        states = torch.zeros(2 * count, heads, keys, dim, device=bench.device)
        each = torch.arange(count, dtype=torch.int32, device=bench.device)
        ends = torch.stack([0 * each + num_rows, count + each], dim=1)
        sequences = torch.stack([each, each * num_rows, each, each + 1, 0 * each], dim=1)
        given = sequences, ends, inputs, gates, weights
        ours = partial(scan.scan, taps, states, *given, block=64)
        got = ours()
        pools, rows = (taps.float(), states.clone()), (inputs.float(), gates.float())
        tables = sequences.cpu(), ends.cpu()
        wanted = scan.naive_scan(*pools, *tables, *rows, weights, block=64)
        error = float((got - wanted).abs().max() / wanted.abs().max())
        if not error < TOLERANCE:
            raise RuntimeError(f"scan of {tokens}: error {error:.2g} of the largest value")
        launches: dict[str, Callable[[], object]] = {"ours": ours}
        if bench.on_gpu:
            launches |= library_peers.delta_rule(session, (count, num_rows, heads), keys, dim)
        for who, launch in launches.items():
            # a library launches several kernels, which takes the host longer than the GPU
            replay = graphed(launch, times=1) if bench.on_gpu else launch
            session.time("scan", f"{tokens}, {who}", replay, inputs.nbytes)
