"""Production shapes of every kernel, and the cases of `codegen` at these shapes, with limits.

The tests on a GPU launch the kernels at the same shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from hicache.kernels import append, attend, copy, index, load, scan, transcode
from hicache.kernels.load import LoadBuffer, load_table
from hicache.kernels.table import copy_table
from hicache.kernels.transcode import Format, code_table, coded_bytes

KIB = 1 << 10
# pools for the user's kernel: bytes of an item's row, rows of an item, stride of rows in bytes
SHAPES = {
    "pages of 128 KiB": (128 * KIB, 1, 128 * KIB),
    "pages of 4 KiB": (4 * KIB, 1, 4 * KIB),
    "rows of 256 B": (256, 1, 256),
    "2 of 8 heads": (512, 16, 2 * KIB),
}
HEAD_BYTES = 256
PARTS = {  # of a load-back
    "pages": ((16, 8, 128), torch.bfloat16),
    "states": ((64, 128, 128), torch.float32),
    "taps": ((3, 8192), torch.bfloat16),
}


class Heads(NamedTuple):
    """Pages of one layer of a model, and the query rows of a tile."""

    page: int
    rows: int
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    heads: int = 8
    group: int = 4


COPIES = {  # bytes of an item, rows
    "pages of 64 KiB and more, Mamba slots": (128 * KIB, 1),
    "pages of 4 KiB (16 tokens × 256 B)": (4 * KIB, 1),
    "token rows of 2 KiB (8 heads × 128 × bf16)": (2 * KIB, 1),
    "token rows of 256 B (1 head × 128 × bf16)": (256, 1),
    "2 of 8 heads of 16 tokens (rows of 512 B)": (8 * KIB, 16),
}
ENCODES = {
    "bf16 to int8, pages of 16 × 8 heads": (torch.bfloat16, (16, 8, 128), Format.int8),
    "bf16 to fp8, pages of 64 × 8 heads of 64": (torch.bfloat16, (64, 8, 64), Format.fp8),
    "bf16 to fp4, pages of 16 × 8 heads": (torch.bfloat16, (16, 8, 128), Format.fp4),
    "fp32 to int8, states": (torch.float32, (64, 128, 128), Format.int8),
}
LOADS: dict[str, tuple[Format | None, list[str]]] = {
    "load-back of pages, states and taps": (None, [*PARTS]),
    "load-back of int8 to bf16, pages of 16 × 8 heads": (Format.int8, ["pages"]),
    "load-back of fp8 to bf16, pages of 16 × 8 heads": (Format.fp8, ["pages"]),
    "load-back of fp4 to bf16, pages of 16 × 8 heads": (Format.fp4, ["pages"]),
    "load-back of fp4 to fp32, states": (Format.fp4, ["states"]),
    "load-back of int8 to fp32, states": (Format.int8, ["states"]),
    "load-back of int8 pages and states, plain taps": (Format.int8, [*PARTS]),
}
APPENDS = {
    "append to pages of 16 × 8 heads": Heads(16, 64),
    "append to pages of 64 × 1 head": Heads(64, 64, heads=1),
    "append to pages of 64 × 32 heads": Heads(64, 64, heads=32, group=1),
}
ATTENDS = {"decode attention, pages of 16 × 8 heads": Heads(16, 1)} | {
    f"{what} attention, {form}": Heads(64, rows, dim, dtype)
    for what, rows in (("decode", 1), ("prefill", 64))
    for form, dim, dtype in (
        ("pages of 64 × 8 heads", 128, torch.bfloat16),
        ("fp32", 128, torch.float32),
        *((f"heads of {dim}", dim, torch.bfloat16) for dim in (64, 96, 192, 256)),
    )
}
MERGES = {  # the second launch of an attention
    "decode attention, pages of 64 × 8 heads": "merge of splits, decode",
    "prefill attention, pages of 64 × 8 heads": "merge of splits, tiles of 64",
}
SCANS = {  # keys and values of a head, and whether there is a skip connection
    "scan of Mamba-2, heads of 64 × 128 keys": ((128, 64), True),
    "scan of gated delta, heads of 128 × 128 keys": ((128, 128), False),
}


def shaped(shape: str, num_items: int, src: Tensor, dst: Tensor) -> list[tuple[Tensor, ...]]:
    row_bytes, rows, pitch = SHAPES[shape]
    pools = []
    for arena, apart in ((src, pitch), (dst, row_bytes)):
        slab = arena[: 2 * num_items * rows * apart]
        slab = slab.view(2, num_items, rows, apart)[..., :row_bytes]
        # a head slice as [token, head, dim], not flattened to rows
        heads = slab.unflatten(-1, (-1, HEAD_BYTES)) if rows > 1 else slab.flatten(2)
        pools.append(heads.unbind(0))
    return pools


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    max_registers: int = 64  # of a copy: two programs per SM
    min_flight_bytes: int = 0  # of a program, in every iteration
    min_sm_bytes: int = 0  # of all programs that fit on an SM
    max_shared_bytes: int = 0
    max_barriers: int = 0
    payload_bits: int | None = 128  # width of every payload access; None means an index kernel
    other_stores: frozenset[int] = frozenset()  # widths of other stores


COPY = Limits(min_flight_bytes=64 * KIB, min_sm_bytes=128 * KIB)
# hashing fills the registers: one program per SM; tile sums go through shared memory, once per tile
CHECKSUM = replace(
    COPY, max_registers=128, min_sm_bytes=64 * KIB, max_shared_bytes=256, max_barriers=4
)
# a load-back counts: another store and barriers for each layer
LOAD = replace(COPY, max_shared_bytes=16, max_barriers=4, other_stores=frozenset({32}))
# three tiles in shared memory; scales are other stores
ENCODE = replace(LOAD, max_registers=128, max_shared_bytes=112 * KIB, max_barriers=24)
CODED_LOAD = replace(ENCODE, max_barriers=40)
# one program an SM, with twice as many tiles in shared memory; scales of blocks are stored, too
FP4 = replace(
    CODED_LOAD,
    min_sm_bytes=64 * KIB,
    max_shared_bytes=134 * KIB,
    other_stores=frozenset({16, 32}),
)
# blocks of keys and values in shared memory or loading; maximum and sum of a row are stored
ATTEND = replace(ENCODE, max_registers=192, max_shared_bytes=112 * KIB + 64, max_barriers=16)
OTHER_HEADS = replace(
    ATTEND,
    max_registers=255,
    min_flight_bytes=32 * KIB,
    min_sm_bytes=64 * KIB,
    max_shared_bytes=128 * KIB + 64,
    max_barriers=20,
)
MERGE = Limits(max_registers=96, max_shared_bytes=4 * KIB, max_barriers=40, payload_bits=None)
APPEND = Limits(max_registers=96, min_flight_bytes=32 * KIB, min_sm_bytes=128 * KIB)
# the state in registers; sums over keys go through shared memory
SCAN = Limits(max_registers=168, max_shared_bytes=KIB, max_barriers=32, payload_bits=None)
INDEX = Limits(payload_bits=None)
WAIT = replace(INDEX, max_shared_bytes=16, max_barriers=2)


class Case(NamedTuple):
    name: str
    kernel: Any  # a @triton.jit function
    arguments: tuple[object, ...]
    constants: dict[str, Any]
    limits: Limits


def cases() -> list[Case]:
    """Launch every kernel at these shapes, without running it; return what each launch passed."""
    ids, counters = torch.zeros(256, dtype=torch.int32), torch.zeros(64, 2, dtype=torch.int32)
    spans = partial(index.page_table, ids, ids[:8].view(4, 2), ids[:5], num_columns=2048)
    found = [
        *(_copy(name, size, rows=rows) for name, (size, rows) in COPIES.items()),
        _copy("pages with checksum", 64 * KIB, sums=ids.long(), limits=CHECKSUM),
        *(_encode(name, *shape) for name, shape in ENCODES.items()),
        *(_load(name, *shape) for name, shape in LOADS.items()),
        _case("wait for a layer", WAIT, partial(load.wait_for_layer, counters, 0, 1)),
        *(_append(name, shape) for name, shape in APPENDS.items()),
    ]
    for name, shape in ATTENDS.items():
        usual = shape.dim == 128 and shape.dtype == torch.bfloat16
        pool, queries = _pages(shape)
        launch = partial(attend.attend, pool, ids[None], ids[None, :4], queries, end=16_384)
        found.append(_case(name, ATTEND if usual else OTHER_HEADS, launch))
        if name in MERGES:
            launch = partial(launch, sinks=torch.zeros(queries.shape[2]))
            found.append(_case(MERGES[name], MERGE, launch, number=1))
    return [
        *found,
        *(_scan(name, keys, has_skip=skip) for name, (keys, skip) in SCANS.items()),
        _case("page table from spans", INDEX, spans),
    ]


def _case(name: str, limits: Limits, launch: Callable[[], object], *, number: int = 0) -> Case:
    launches = list[tuple[Any, tuple[object, ...], dict[str, Any]]]()

    def record(kernel: object, grid: object) -> Callable[..., None]:
        return lambda *arguments, **constants: launches.append((kernel, arguments, constants))

    with patch.object(KernelInterface, "__getitem__", record):
        launch()
    return Case(name, *launches[number], limits)


def _copy(
    name: str, item_bytes: int, *, rows: int = 1, sums: Tensor | None = None, limits: Limits = COPY
) -> Case:
    ids = torch.zeros(256, dtype=torch.int32)
    pools = torch.zeros(2, 2, rows, 2 * item_bytes // rows, dtype=torch.uint8)
    table = copy_table(*([pool[..., : item_bytes // rows]] for pool in pools))
    return _case(name, limits, partial(copy.copy_items, table, ids, ids, sums=sums))


def _encode(name: str, dtype: torch.dtype, shape: tuple[int, ...], form: Format) -> Case:
    coded = torch.zeros(2, coded_bytes(shape, form), dtype=torch.uint8)
    table = code_table([torch.zeros(2, *shape, dtype=dtype)], [coded], form)
    ids = torch.zeros(256, dtype=torch.int32)
    return _case(
        name,
        FP4 if form is Format.fp4 else ENCODE,
        partial(transcode.encode_items, table, ids, ids),
    )


def _load(name: str, form: Format | None, parts: Sequence[str]) -> Case:
    buffers = []
    for kind, part in enumerate(parts):
        shape, dtype = PARTS[part]
        target = torch.zeros(2, *shape, dtype=dtype)
        code = None if part == "taps" else form
        num_bytes = coded_bytes(shape, code) if code else target[0].nbytes
        source = torch.zeros(2, num_bytes, dtype=torch.uint8)
        buffers.append(LoadBuffer(0, kind, source, target, code))
    table = load_table(buffers, 2)
    ids, counters = torch.zeros(256, dtype=torch.int32), torch.zeros(64, 2, dtype=torch.int32)
    moves = load.Load(torch.zeros(64, load.PART_FIELDS.value, dtype=torch.int32), ids, ids, 4096)
    launch = partial(load.load_items, table, moves, counters)
    limits = FP4 if form is Format.fp4 else CODED_LOAD if form else LOAD
    return _case(name, limits, launch)


def _append(name: str, shape: Heads) -> Case:
    pool, keys = _pages(shape._replace(group=1))
    ids = torch.zeros(256, dtype=torch.int32)
    return _case(name, APPEND, partial(append.append, pool, ids[None], ids[None, :4], keys, keys))


def _pages(shape: Heads) -> tuple[Tensor, Tensor]:
    pool = torch.zeros(2, 2, shape.page, shape.heads, shape.dim, dtype=shape.dtype)
    queries = torch.zeros(1, shape.rows, shape.heads * shape.group, shape.dim, dtype=shape.dtype)
    return pool, queries


def _scan(name: str, state: tuple[int, int], *, has_skip: bool) -> Case:
    states, heads = torch.zeros(2, 32, *state), torch.zeros(32)
    channels = state[1] + 2 * state[0]
    inputs = torch.zeros(16, 32, channels, dtype=torch.bfloat16)
    gates = torch.zeros(16, 1 if has_skip else 2, 32, dtype=torch.bfloat16)
    weights = scan.ScanWeights(torch.zeros(4, 32, channels), heads, heads if has_skip else None)
    taps = inputs[:6].view(2, 32, 3, channels)
    sequences, ends = (torch.zeros(3, width, dtype=torch.int32) for width in (5, 2))
    given = taps, states, sequences, ends, inputs, gates, weights
    return _case(name, SCAN, partial(scan.scan, *given, block=1))
