"""Load-back: items of all kinds and layers in one launch, with a counter for each layer.

A layer's attention or scan waits for its own counter only, so it starts while later layers are
still on the link. The launch walks over *parts*: the buffers of one layer, one kind and one number
format. Parts are ordered by layer. All programs share the tiles of each part. When the last program
has written its tiles of a layer, it adds 1 to the layer's counter.

Sizes: L layers, S parts, G items of one kind, P programs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hicache.kernels.checks import check_copy_form, check_copy_ids
from hicache.kernels.copy import (
    ID_POINTERS,
    NUM_WARPS,
    _lines,
    _read,
    _write,
    programs_of,
    tile_shape,
)
from hicache.kernels.ops import send
from hicache.kernels.table import CopyTable, copy_table
from hicache.kernels.transcode import (
    NUM_STAGES,
    CodeTable,
    Format,
    _move_tiles,
    code_table,
    constants_of,
    naive_decode_buffer,
)

PART_FIELDS = tl.constexpr(7)


class LoadBuffer(NamedTuple):
    """One layer's tensor in a host pool, and the device tensor that its pages are loaded into."""

    layer: int
    kind: int  # buffers of one kind share ids
    source: Tensor  # [items, ...]; coded: [items, bytes] uint8
    target: Tensor  # [items, ...]
    form: Format | None  # of the source's numbers; None means those of the target


class _Sides(NamedTuple):
    device: torch.device
    num_src_items: int
    num_dst_items: int
    in_place: bool


class _Part(NamedTuple):
    layer: int
    kind: int
    form: int  # 0: plain; n: `coded[n - 1]`
    buffers: range  # of the table
    first_piece: int
    num_pieces: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadTable:
    """Describes all buffers of a load-back: a launch that copies KV cache from host to device.

    `parts` divides the buffers by layer, kind of cache and number format. A launch copies the parts
    in the order of the layers.
    """

    plain: CopyTable | None
    coded: tuple[CodeTable, ...]
    parts: tuple[_Part, ...]
    addresses: Tensor  # [len(coded), 3] int64 in bytes: pieces, strides of wide and coded items
    sides: Mapping[int, _Sides]  # by kind
    num_layers: int

    @property
    def device(self) -> torch.device:
        return self.addresses.device

    @property
    def crosses_link(self) -> bool:
        return (self.plain or self.coded[0]).crosses_link


class Load(NamedTuple):
    """The ids of all pages and Mamba states that one launch loads from host to device.

    The tensors are in device memory. `src_ids` and `dst_ids` hold one kind of cache after the
    other.
    """

    parts: Tensor  # [S, PART_FIELDS] int32
    src_ids: Tensor  # [all G] int32, kind after kind
    dst_ids: Tensor
    num_tiles: int


def load_table(buffers: Sequence[LoadBuffer], num_layers: int) -> LoadTable:
    """Describe how the given buffers are loaded back from host to device, layer by layer.

    Raises:
        ValueError: the copy kernels do not support the shapes, strides or memory of the buffers.
    """
    order = sorted(buffers, key=lambda each: (each.layer, each.kind))
    plain = [each for each in order if each.form is None]
    shapes: dict[torch.Size, list[LoadBuffer]] = {}
    for each in order:
        if each.form is not None:
            shapes.setdefault(each.target.shape, []).append(each)
    table = None
    parts = list[_Part]()
    if plain:
        table = copy_table([each.source for each in plain], [each.target for each in plain])
        parts += _parts(plain, _pieces_of(table), 0)
    coded = []
    for form, same in enumerate(shapes.values(), 1):
        assert same[0].form is not None
        wide, codes = [each.target for each in same], [each.source for each in same]
        coded.append(code_table(wide, codes, same[0].form))
        parts += _parts(same, [len(coded[-1].pieces) // len(same)] * len(same), form)
    # a layer without buffers is ready, too
    parts += [_Part(layer, 0, 0, range(0), 0, 0) for layer in range(num_layers)]
    device = (table or coded[0]).device
    is_within = table is not None and table.in_place
    sides = dict[int, _Sides]()
    for kind in {each.kind for each in buffers}:
        both = [(each.source, each.target) for each in buffers if each.kind == kind]
        num_src_items, num_dst_items = (min(map(len, side)) for side in zip(*both, strict=True))
        sides[kind] = _Sides(device, num_src_items, num_dst_items, is_within)
    addresses = [[each.pieces.data_ptr(), each.wide_stride, each.coded_stride] for each in coded]
    return LoadTable(
        plain=table,
        coded=tuple(coded),
        parts=tuple(sorted(parts, key=lambda part: part.layer)),
        addresses=torch.tensor(addresses, dtype=torch.int64, device=device).view(-1, 3),
        sides=sides,
        num_layers=num_layers,
    )


def _pieces_of(table: CopyTable) -> list[int]:
    sizes = [(each.shape[1:-1].numel(), each.shape[-1]) for each in table.src]
    return [rows * -(-words // table.piece_words) for rows, words in sizes]


def _parts(buffers: Sequence[LoadBuffer], counts: Sequence[int], form: int) -> list[_Part]:
    parts, place, first = list[_Part](), 0, 0
    for (layer, kind), same in groupby(buffers, lambda each: (each.layer, each.kind)):
        span = range(place, place + len(list(same)))
        num_pieces = sum(counts[span.start : span.stop])
        parts.append(_Part(layer, kind, form, span, first, num_pieces))
        place, first = span.stop, first + num_pieces
    return parts


def load_of(table: LoadTable, moves: Mapping[int, tuple[Tensor, Tensor]]) -> Load:
    """Prepare a load-back (a copy from host to device): check its ids and send them to the device.

    All ids are sent in one copy. The result is what the copy kernel needs besides the table. It can
    be used with any other table whose buffers have the same shapes.

    Args:
        table: the buffers to copy.
        moves: for each kind of cache, the page or slot numbers to copy from and those to copy to.
            Both are [items] int32 in host memory and not negative.

    Raises:
        ValueError: an id is out of range, a target occurs twice, or a tensor has a wrong shape,
            dtype or device.
    """
    spans, first = dict[int, tuple[int, int]](), 0
    for kind, (src_ids, dst_ids) in moves.items():
        check_copy_form(src_ids, dst_ids, device=torch.device("cpu"))
        check_copy_ids(table.sides[kind], src_ids, dst_ids)
        spans[kind] = first, len(src_ids)
        first += len(src_ids)
    rows, num_tiles = [], 0
    for part, after in zip(table.parts, [*table.parts[1:], None], strict=True):
        first, num_items = spans.get(part.kind, (0, 0))
        num_lines = part.num_pieces * num_items
        is_last = after is None or after.layer != part.layer
        counter = part.layer if is_last else -1
        place = part.first_piece, num_lines, first, num_items, num_tiles
        rows.append((counter, part.form, *place))
        num_tiles += _tiles_of(table, part.form, num_lines)
    if num_tiles >= 1 << 30:
        raise ValueError(f"a load-back of {num_tiles} tiles is too long, fewer than 2**30 wanted")
    none = torch.zeros(0, dtype=torch.int32)
    ids = [torch.cat([none, *(pair[side] for pair in moves.values())]) for side in (0, 1)]
    parts = torch.tensor(rows, dtype=torch.int32)
    sent = send([parts.flatten(), *ids], table.device)
    return Load(sent[0].view(-1, PART_FIELDS.value), sent[1], sent[2], num_tiles)


def _tiles_of(table: LoadTable, form: int, num_lines: int) -> int:
    if form == 0:
        return -(-num_lines // tile_shape(table.plain)["LINES"]) if table.plain else 0
    coded = table.coded[form - 1]
    return -(-num_lines * coded.rows // constants_of(coded, encodes=False)["TILE"])


@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=[*ID_POINTERS, "parts_ptr", "counters_ptr"],
)
def _load_kernel(
    pieces_ptr,  # [NP, 6] of the plain buffers; None: all are coded
    addresses_ptr,  # [len(CODED), 3]
    parts_ptr,  # [S, 7]
    src_ids_ptr,  # [all G]
    dst_ids_ptr,  # [all G]
    counters_ptr,  # [L, 2]
    num_parts,  # S
    LINES: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CODED: tl.constexpr,  # of each coded table: FORM, BITS, ROWS, TILE, DIM, SCALES
    STAGES: tl.constexpr,
):
    programs = tl.num_programs(0)
    part = 0
    while part < num_parts:
        row = parts_ptr + part * PART_FIELDS
        counter, form, piece = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        num_lines, first_id, num_items = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
        # programs take the tiles of all parts in turn
        first = (tl.program_id(0) + programs - tl.load(row + 6) % programs) % programs
        if pieces_ptr is not None:  # noqa: SIM102 - known to the compiler, the second is not
            if form == 0:
                tile = first
                while tile * LINES < num_lines:
                    src, dst, words, _, _ = _lines(
                        pieces_ptr + piece * 6, src_ids_ptr + first_id, dst_ids_ptr + first_id,
                        num_items, num_lines, tile, 1, LINES,
                    )  # fmt: skip
                    _write(dst, words, _read(src, words, STEPS, WIDTH), STEPS, WIDTH)
                    tile += programs
        for each in tl.static_range(len(CODED)):
            if form == each + 1:
                address = addresses_ptr + each * 3
                pieces = tl.load(address).to(tl.pointer_type(tl.int64)) + piece * 3
                _move_tiles(
                    pieces, src_ids_ptr + first_id, dst_ids_ptr + first_id, tl.load(address + 1),
                    tl.load(address + 2), num_items, num_lines, first,
                    ENCODES=False, FORM=CODED[each][0], BITS=CODED[each][1], ROWS=CODED[each][2],
                    TILE=CODED[each][3], DIM=CODED[each][4], SCALES=CODED[each][5],
                    STAGES=STAGES,
                )  # fmt: skip
        if counter >= 0:
            tl.debug_barrier()  # all threads have stored
            landed = counters_ptr + counter * 2
            if tl.atomic_add(landed, 1, sem="acq_rel", scope="gpu") == programs - 1:
                tl.store(landed, 0)
                tl.atomic_add(landed + 1, 1, sem="release", scope="gpu")
        part += 1


@triton.jit(
    do_not_specialize=["layer", "num_launches"], do_not_specialize_on_alignment=["counters_ptr"]
)
def _wait_kernel(counters_ptr, layer, num_launches):
    while tl.atomic_add(counters_ptr + layer * 2 + 1, 0, sem="acquire", scope="gpu") < num_launches:
        pass


def load_items(
    table: LoadTable, load: Load, counters: Tensor, *, num_programs: int | None = None
) -> None:
    """Launch a load-back: copy KV cache into the device, with a counter for each layer.

    The kernel copies layer after layer. It adds 1 to a layer's counter when the layer is complete.

    Args:
        table: the buffers to copy.
        load: the items to copy, as returned by `load_of`.
        counters: [layers, 2] int32 on the table's device, initially zero. `counters[i, 1]` counts
            the launches that have completed layer i. `counters[i, 0]` is scratch space of the
            kernel.
        num_programs: number of Triton programs that share the work. None means 4 between host and
            device, and 2 per SM within a device.
    """
    shape: dict[str, int] = {"LINES": 1, "STEPS": 1, "WIDTH": 1}
    pieces = None
    if table.plain is not None:
        pieces = table.plain.pieces
        shape = {key: n for key, n in tile_shape(table.plain).items() if key != "TOGETHER"}
    coded = [constants_of(each, encodes=False) for each in table.coded]
    names = "FORM", "BITS", "ROWS", "TILE", "DIM", "SCALES"
    constants = {
        **shape,
        "CODED": tuple(tuple(each[name] for name in names) for each in coded),
        "STAGES": max((each["STAGES"] for each in coded), default=NUM_STAGES),
        "num_warps": max((each["num_warps"] for each in coded), default=NUM_WARPS),
    }
    with torch.cuda.device_of(counters):
        _load_kernel[(programs_of(table, load.num_tiles, num_programs),)](
            pieces, table.addresses, *load[:3], counters, len(load.parts), **constants
        )


def wait_for_layer(counters: Tensor, layer: int, num_launches: int) -> None:
    """Make the current stream wait until `num_launches` load-backs have completed a layer.

    `counters` is the tensor that these load-backs were launched with.
    """
    with torch.cuda.device_of(counters):
        _wait_kernel[(1,)](counters, layer, num_launches, num_warps=1)


def naive_load_items(
    table: LoadTable,
    load: Load,
    counters: Tensor,
    *,
    num_programs: int | None = None,
    layers: range | None = None,
) -> None:
    """Load KV cache into the device in plain PyTorch, as a reference for the kernel `load_items`.

    `layers` limits the load to these layers; None means all. `num_programs` is ignored.
    """
    for part, (counter, *_, first, num_items, _) in zip(
        table.parts, load.parts.tolist(), strict=True
    ):
        if layers is not None and part.layer not in layers:
            continue
        src_ids, dst_ids = (ids[first : first + num_items].long() for ids in load[1:3])
        for buffer in part.buffers:
            if part.form:
                coded = table.coded[part.form - 1]
                naive_decode_buffer(coded, buffer, src_ids, dst_ids)
            elif table.plain is not None:
                items = table.plain.src[buffer].index_select(0, src_ids)
                table.plain.dst[buffer].index_copy_(0, dst_ids, items)
        if counter >= 0:
            counters[counter, 1] += 1
