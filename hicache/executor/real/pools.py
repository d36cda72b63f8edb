"""Real memory: the pages and slots of every component, on the device and in pinned host memory.

Each rank has its own pools, with its share of the heads. A pool is one slab: on the device it lies
layer by layer, because a layer's attention reads it; on the host an item (a page, a slot) lies in
one piece, because that is what storage reads and writes. Every move of whole items goes through
`hicache.kernels`, over tables built once.

Axes: layer (that keeps this component), kv (keys and values), page or slot, token, head, dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hicache.cache.pages import PageIds
from hicache.cache.tiers.transfer import Move
from hicache.cache.tree.keys import COMPONENT_TAGS
from hicache.cache.tree.node import DEVICE, FULL, HOST, KINDS, MAMBA, SWA
from hicache.kernels import (
    CopyTable,
    copy_pages,
    copy_pages_with_checksum,
    copy_table,
    layer_first_buffers,
    page_first_buffers,
    send_ids,
    warm_up,
)
from hicache.models import ModelConfig

KV_LETTERS = {FULL: "F", SWA: "S"}
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
SUMMED_ITEMS = 4  # at once, on their way through a scratch pool
POISON = 0xFF  # as floating-point numbers of any width: NaN

Counts = Sequence[int | None]  # items by component


class Buffer(NamedTuple):
    """What one layer keeps of a component, item by item, on both tiers."""

    layer: int  # of the model
    device: Tensor  # [item, ...]
    host: Tensor  # [item, ...], as many bytes an item


class Arrival(NamedTuple):
    """A copy into the device: from the host or, of states, from other slots `is_within` it."""

    is_within: bool
    move: Move


class Sent(NamedTuple):
    """The same with its ids on the device that copies, checked."""

    is_within: bool
    kind: int
    sources: Tensor
    targets: Tensor


class RankPools:
    """The pools of one rank.

    `kv[kind]` is [layer, kv, page, token, head, dim]; `taps` and `states` are lists by layer of
    [slot, ...]. `host[kind]` is [item, bytes]; `layout` names the pieces of every item in order.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rank: int,
        tp: int,
        page_size: int,
        device_counts: Counts,
        host_counts: Counts,
        device: torch.device,
        layer_groups: Sequence[range],
    ) -> None:
        self.kv: dict[int, Tensor] = {}
        self.taps: list[Tensor] = []
        self.states: list[Tensor] = []
        self.host: dict[int, Tensor] = {}
        self.heads = {kind: _heads(config, kind, rank, tp) for kind in (FULL, SWA)}
        share = config.recurrent_heads // tp
        self.recurrent_heads = slice(rank * share, (rank + 1) * share)
        buffers: dict[int, list[Buffer]] = {}
        for kind in (FULL, SWA):
            layers = [
                layer for layer, word in enumerate(config.layer_words) if KV_LETTERS[kind] in word
            ]
            if layers:
                head_shape = _head_shape(config, kind, self.heads[kind])
                num_pages = _count(device_counts, kind)
                shape = (len(layers), 2, num_pages, page_size, *head_shape)
                self.kv[kind] = torch.zeros(
                    shape, dtype=DTYPES[config.kv_dtype_bytes], device=device
                )
                item_bytes = self.kv[kind][:, :, 0].numel() * config.kv_dtype_bytes
                self.host[kind] = _host_slab(_count(host_counts, kind), item_bytes, device)
                rows = self.host[kind].view(self.kv[kind].dtype)
                host = rows.view(len(rows), *shape[:2], *shape[3:])
                buffers[kind] = [
                    Buffer(layers[place // 2], *pair)
                    for place, pair in enumerate(
                        zip(
                            layer_first_buffers(self.kv[kind]),
                            page_first_buffers(host),
                            strict=True,
                        )
                    )
                ]
        if config.num_mamba_layers:
            buffers[MAMBA] = self._make_states(config, tp, device_counts, host_counts, device)
        self.layout = tuple(
            f"{COMPONENT_TAGS[kind].decode()}{each.layer} {each.device.dtype} "
            f"{tuple(each.device.shape[1:])}"
            for kind, pieces in buffers.items()
            for each in pieces
        )
        self.loads = [
            {kind: _table(each, group, to_device=True) for kind, each in buffers.items()}
            for group in layer_groups
        ]
        everything = range(len(config.layer_words))
        self.saves = {
            kind: _table(each, everything, to_device=False) for kind, each in buffers.items()
        }
        self.copies = [
            _in_place(buffers[MAMBA], group) if MAMBA in buffers else None
            for group in (*layer_groups, everything)
        ]
        # of what each host item holds, as it was copied or read there
        self._sums = {
            kind: torch.zeros(len(host), dtype=torch.int64, device=device)
            for kind, host in self.host.items()
        }
        self._sum_tables = {
            kind: _summing(each) for kind, each in buffers.items() if len(self.host[kind])
        }
        self._sum_stream = _stream(device)

    def _make_states(
        self,
        config: ModelConfig,
        tp: int,
        device_counts: Counts,
        host_counts: Counts,
        device: torch.device,
    ) -> list[Buffer]:
        layers = [layer for layer, word in enumerate(config.layer_words) if set("MD") & set(word)]
        num_slots = _count(device_counts, MAMBA)
        for layer in layers:
            taps, state = _state_shapes(config, config.layer_words[layer], tp)
            dtype = DTYPES[config.conv_dtype_bytes]
            self.taps.append(torch.zeros(num_slots, *taps, dtype=dtype, device=device))
            dtype = DTYPES[config.state_dtype_bytes]
            self.states.append(torch.zeros(num_slots, *state, dtype=dtype, device=device))
        parts = [
            (layer, part)
            for layer, pair in zip(layers, zip(self.taps, self.states, strict=True), strict=True)
            for part in pair
            if part[:1].numel()
        ]
        sizes = [part[:1].numel() * part.element_size() for _, part in parts]
        self.host[MAMBA] = slab = _host_slab(_count(host_counts, MAMBA), sum(sizes), device)
        pieces = torch.split(slab, sizes, dim=1)
        return [
            Buffer(layer, part, piece) for (layer, part), piece in zip(parts, pieces, strict=True)
        ]

    def save(
        self, kind: int, sources: Tensor, targets: Tensor, *, num_programs: int | None
    ) -> None:
        """Device to host, all layers in one launch; ids are those of `send_ids`."""
        sums = copy_pages_with_checksum(
            _there(self.saves[kind]), sources, targets, num_programs=num_programs, trusted=True
        )
        self._sums[kind][targets.long()] = sums

    def sums(self, items: Sequence[tuple[int, int]]) -> list[int]:
        """Checksums of host items (component, id), as they were when they came there."""
        found: dict[tuple[int, int], int] = {}
        for kind, sums in self._sums.items():
            its = [item for item in items if item[0] == kind]
            found.update(zip(its, sums[[page for _, page in its]].tolist(), strict=True))
        return [found[item] for item in items]

    def new_sums(self, items: Sequence[tuple[int, int]]) -> list[int]:
        """Checksums of what host items hold now, which somebody else has written."""
        with torch.cuda.stream(self._sum_stream):  # changes nothing where there is none
            for kind, table in self._sum_tables.items():
                its = torch.tensor([i for its_kind, i in items if its_kind == kind]).int()
                for ids in torch.split(its, SUMMED_ITEMS) if len(its) else ():
                    places = torch.arange(len(ids), dtype=torch.int32)
                    sums = copy_pages_with_checksum(table, ids, places)
                    self._sums[kind][ids.long().to(sums.device)] = sums
            return self.sums(items)

    def payload(self, kind: int, page_id: int) -> memoryview:
        """The bytes of a host item, in place."""
        item = self.host[kind][page_id].numpy()
        return memoryview(item)  # type: ignore[arg-type]  # numpy's stubs before 3.12 buffers


class TorchPools:
    """The pools of all ranks of an engine; what happens, happens on all of them.

    Args:
        layer_groups: layers whose load-back is one launch, from the first.
        link_programs: of a copy across the link; none: as many as the kernel takes by itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        page_size: int,
        device_counts: Counts,
        host_counts: Counts,
        device: torch.device,
        tp: int = 1,
        layer_groups: Sequence[range] = (),
        link_programs: int | None = None,
    ) -> None:
        _check_ranks(config, tp)
        self._link_programs = link_programs
        self.page_size = page_size
        self.device = device
        self.layer_groups = list(layer_groups)
        self.ranks = [
            RankPools(
                config,
                rank=rank,
                tp=tp,
                page_size=page_size,
                device_counts=device_counts,
                host_counts=host_counts,
                device=device,
                layer_groups=layer_groups,
            )
            for rank in range(tp)
        ]
        self.holders = _holders(config)
        first = self.ranks[0]  # tables of one shape share what is compiled
        tables = [*first.saves.values(), *first.copies]
        tables += [table for group in first.loads for table in group.values()]
        warm_up(*(table for table in tables if table is not None), page_size=page_size)
        self.num_full_pages = _count(device_counts, FULL)
        self.window_len = config.window_len

    def send(self, arrivals: Sequence[Arrival]) -> list[Sent]:
        """Check the ids of copies into the device, and send all of them ahead in one piece."""
        rank = self.ranks[0]  # the others have as many items, and copy the same
        tables = []
        for is_within, move in arrivals:
            groups = rank.copies if is_within else [each[move.kind] for each in rank.loads]
            tables.append(next(table for table in groups if table is not None))
        ids = _sent(tables, [arrival.move for arrival in arrivals])
        return [
            Sent(a.is_within, a.move.kind, *pair) for a, pair in zip(arrivals, ids, strict=True)
        ]

    def load(self, sent: Sequence[Sent], group: int) -> None:
        """Copy into the device, for the layers of a group."""
        for is_within, kind, sources, targets in sent:
            for rank in self.ranks:
                table = rank.copies[group] if is_within else rank.loads[group][kind]
                if table is not None:
                    programs = None if is_within else self._link_programs
                    copy_pages(table, sources, targets, num_programs=programs, trusted=True)

    def save(self, moves: Sequence[Move]) -> None:
        """Device to host, all layers of a component in one launch."""
        first = [_there(self.ranks[0].saves[move.kind]) for move in moves]
        for move, (sources, targets) in zip(moves, _sent(first, moves), strict=True):
            for rank in self.ranks:
                rank.save(move.kind, sources, targets, num_programs=self._link_programs)

    def copy_states(self, sources: PageIds, targets: PageIds) -> None:
        """State slots to others on the device, all layers in one launch."""
        first = _there(self.ranks[0].copies[-1])
        (ids,) = _sent([first], [Move(MAMBA, sources, targets)])
        for rank in self.ranks:
            copy_pages(_there(rank.copies[-1]), *ids, trusted=True)

    def clear_state(self, slot: PageIds) -> None:
        """The state before the first token."""
        index = int(slot[0])
        for rank in self.ranks:
            for part in (*rank.taps, *rank.states):
                part[index].zero_()

    def poison(self, tier: int, kind: int, page_ids: PageIds) -> None:
        """Make whoever reads these items see NaN."""
        index = torch.tensor(page_ids).to(self.device)
        for rank in self.ranks:
            if tier == HOST and kind in rank.host:
                rank.host[kind][index.cpu()] = POISON
            elif tier == DEVICE and kind == MAMBA:
                for part in (*rank.taps, *rank.states):
                    part[index] = torch.nan
            elif tier == DEVICE and kind in rank.kv:
                rank.kv[kind][:, :, index] = torch.nan


def _there(table: CopyTable | None) -> CopyTable:
    assert table is not None, "nothing moves between pools that hold nothing"
    return table


def _sent(tables: Sequence[CopyTable], moves: Sequence[Move]) -> list[tuple[Tensor, Tensor]]:
    return send_ids(
        *(
            (table, _int32(sources), _int32(targets))
            for table, (_, sources, targets) in zip(tables, moves, strict=True)
        )
    )


def _int32(page_ids: PageIds) -> Tensor:
    return torch.tensor(page_ids, dtype=torch.int32)


def _table(buffers: Sequence[Buffer], layers: range, *, to_device: bool) -> CopyTable | None:
    chosen = [buffer for buffer in buffers if buffer.layer in layers]
    if not chosen or not all(len(buffer.device) and len(buffer.host) for buffer in chosen):
        return None
    device = [buffer.device for buffer in chosen]
    host = [buffer.host for buffer in chosen]
    return copy_table(host, device) if to_device else copy_table(device, host)


def _summing(buffers: Sequence[Buffer]) -> CopyTable:
    """From the host to a scratch pool, for the checksums on the way."""
    scratch = [
        torch.empty(SUMMED_ITEMS, *b.device.shape[1:], dtype=b.device.dtype, device=b.device.device)
        for b in buffers
    ]
    return copy_table([buffer.host for buffer in buffers], scratch)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _in_place(buffers: Sequence[Buffer], layers: range) -> CopyTable | None:
    chosen = [buffer.device for buffer in buffers if buffer.layer in layers]
    return copy_table(chosen, chosen) if chosen else None


def _host_slab(count: int, item_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(count, item_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _count(counts: Counts, kind: int) -> int:
    count = counts[kind]
    if count is None:
        raise ValueError("real memory has an end: cache.unlimited must be false")
    return count


def _heads(config: ModelConfig, kind: int, rank: int, tp: int) -> slice:
    """The KV heads of a rank; with more ranks than heads, some have the same."""
    num_heads = (kind == SWA and config.swa_num_kv_heads) or config.num_kv_heads
    first = rank * num_heads // tp
    return slice(first, first + max(num_heads // tp, 1))


def _head_shape(config: ModelConfig, kind: int, heads: slice) -> tuple[int, int]:
    """[head, dim] of a token's keys; of a latent, half of it, for it is keys and values in one."""
    if config.latent_dim and kind == FULL:
        return 1, config.latent_dim // 2
    dim = (kind == SWA and config.swa_head_dim) or config.head_dim
    return heads.stop - heads.start, dim


def _state_shapes(
    config: ModelConfig, word: str, tp: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The taps and the state of one slot and layer."""
    groups = config.recurrent_groups if "M" in word else config.recurrent_key_heads
    heads, dim, state_dim = (
        config.recurrent_heads // tp,
        config.recurrent_head_dim,
        config.recurrent_state_dim,
    )
    state = (heads, state_dim, dim)
    if groups == config.recurrent_heads:
        return (heads, config.conv_taps - 1, dim + 2 * state_dim), state
    # groups that several heads share are on every rank that has one of these heads
    shared = max(groups // tp, min(groups, 1))
    return (config.conv_taps - 1, heads * dim + 2 * shared * state_dim), state


def _holders(config: ModelConfig) -> list[int]:
    """Of each layer, which of the layers that keep its component it is."""
    seen = dict.fromkeys(KINDS, 0)
    holders = []
    for word in config.layer_words:
        if word == "-":
            holders.append(-1)
            continue
        kind = FULL if "F" in word else SWA if "S" in word else MAMBA
        holders.append(seen[kind])
        seen[kind] += 1
    return holders


def _check_ranks(config: ModelConfig, tp: int) -> None:
    heads = [config.num_kv_heads, config.swa_num_kv_heads]
    for count in heads:
        if count and count % tp and tp % count:
            raise ValueError(f"{count} KV heads cannot be dealt to parallel.tp={tp} ranks")
    if config.recurrent_heads % tp:
        raise ValueError(
            f"{config.recurrent_heads} recurrent heads cannot be dealt to parallel.tp={tp} ranks"
        )
