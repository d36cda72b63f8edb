"""The pools of one rank: pages and slots on the device and in pinned host memory, and their tables.

A pool is one slab: on the device it lies layer by layer, because a layer's attention reads it; on
the host an item (a page, a slot) lies in one piece, because that is what storage reads and writes.

Axes: layer (that keeps this kind), kv (keys and values), page or slot, token, head, dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hicache.cache.kinds import FULL, KEY_TAGS, MAMBA, SWA
from hicache.executor.real.pinned import pinned_bytes
from hicache.kernels import (
    CopyTable,
    checksums,
    copy_pages_with_checksum,
    copy_table,
    layer_first_buffers,
    page_first_buffers,
)
from hicache.models import ModelConfig

KV_LETTERS = {FULL: "F", SWA: "S"}
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Counts = Sequence[int | None]  # items by kind


class Buffer(NamedTuple):
    """What one layer keeps of a kind, item by item, on both tiers."""

    layer: int  # of the model
    device: Tensor  # [item, ...]
    host: Tensor  # [item, ...], as many bytes an item


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """What the pools of all ranks of an engine hold, and how copies go between them."""

    model: ModelConfig
    page_size: int
    device_counts: Counts
    host_counts: Counts
    device: torch.device
    tp: int = 1
    layer_groups: Sequence[range] = ()  # layers whose load-back is one launch, from the first
    link_programs: int | None = None  # of a copy across the link; none: as the kernel has it


class RankPools:
    """The pools of one rank.

    `kv[kind]` is [layer, kv, page, token, head, dim]; `taps` and `states` are lists by layer of
    [slot, ...]. `host[kind]` is [item, bytes]; `layout` names the pieces of every item in order.
    """

    def __init__(self, spec: PoolSpec, rank: int) -> None:
        config = spec.model
        self._spec = spec
        self.kv: dict[int, Tensor] = {}
        self.taps: list[Tensor] = []
        self.states: list[Tensor] = []
        self.host: dict[int, Tensor] = {}
        self.heads = {kind: _heads(config, kind, rank, spec.tp) for kind in (FULL, SWA)}
        share = config.recurrent_heads // spec.tp
        self.recurrent_heads = slice(rank * share, (rank + 1) * share)
        buffers: dict[int, list[Buffer]] = {}
        for kind, letter in KV_LETTERS.items():
            layers = [layer for layer, word in enumerate(config.layer_words) if letter in word]
            if layers:
                buffers[kind] = self._make_pages(kind, layers)
        if config.num_mamba_layers:
            buffers[MAMBA] = self._make_states()
        self.layout = tuple(
            f"{chr(KEY_TAGS[kind])}{each.layer} {each.device.dtype} {tuple(each.device.shape[1:])}"
            for kind, pieces in buffers.items()
            for each in pieces
        )
        self.loads = [
            {kind: _table(each, group, "host", "device") for kind, each in buffers.items()}
            for group in spec.layer_groups
        ]
        everything = range(len(config.layer_words))
        self.saves = {
            kind: _table(each, everything, "device", "host") for kind, each in buffers.items()
        }
        self.copies = [
            _table(buffers.get(MAMBA, ()), group, "device", "device")
            for group in (*spec.layer_groups, everything)
        ]
        # checksum of each host item, taken when it was copied or read there
        self._sums = {
            kind: torch.zeros(len(host), dtype=torch.int64, device=spec.device)
            for kind, host in self.host.items()
        }
        self._sum_stream: torch.cuda.Stream | None = None
        if spec.device.type == "cuda":
            self._sum_stream = torch.cuda.Stream(spec.device)  # type: ignore[no-untyped-call]

    def _make_pages(self, kind: int, layers: Sequence[int]) -> list[Buffer]:
        spec = self._spec
        dtype = DTYPES[spec.model.kv_dtype_bytes]
        page_shape = (spec.page_size, *_head_shape(spec.model, kind, self.heads[kind]))
        shape = (len(layers), 2, count_of(spec.device_counts, kind), *page_shape)
        self.kv[kind] = kv = torch.zeros(shape, dtype=dtype, device=spec.device)
        slab = self._make_host(kind, kv[:, :, 0].numel() * dtype.itemsize)
        host = slab.view(dtype).view(len(slab), len(layers), 2, *page_shape)
        pairs = zip(layer_first_buffers(kv), page_first_buffers(host), strict=True)
        return [Buffer(layers[place // 2], *pair) for place, pair in enumerate(pairs)]

    def _make_states(self) -> list[Buffer]:
        spec, config = self._spec, self._spec.model
        layers = [layer for layer, word in enumerate(config.layer_words) if set("MD") & set(word)]
        num_slots = count_of(spec.device_counts, MAMBA)
        for layer in layers:
            taps, state = _state_shapes(config, config.layer_words[layer], spec.tp)
            dtype = DTYPES[config.conv_dtype_bytes]
            self.taps.append(torch.zeros(num_slots, *taps, dtype=dtype, device=spec.device))
            dtype = DTYPES[config.state_dtype_bytes]
            self.states.append(torch.zeros(num_slots, *state, dtype=dtype, device=spec.device))
        parts = [
            (layer, part)
            for layer, pair in zip(layers, zip(self.taps, self.states, strict=True), strict=True)
            for part in pair
            if part[:1].numel()
        ]
        sizes = [part[:1].numel() * part.element_size() for _, part in parts]
        pieces = torch.split(self._make_host(MAMBA, sum(sizes)), sizes, dim=1)
        return [
            Buffer(layer, part, piece) for (layer, part), piece in zip(parts, pieces, strict=True)
        ]

    def _make_host(self, kind: int, item_bytes: int) -> Tensor:
        count = count_of(self._spec.host_counts, kind)
        on_gpu = self._spec.device.type == "cuda"
        slab = (pinned_bytes if on_gpu else _zeros)(count * item_bytes).view(count, item_bytes)
        self.host[kind] = slab
        return slab

    def save(self, kind: int, sources: Tensor, targets: Tensor) -> None:
        """Device to host, all layers in one launch; ids are those of `send_ids`."""
        table, programs = there(self.saves[kind]), self._spec.link_programs
        self._sums[kind][targets.long()] = copy_pages_with_checksum(
            table, sources, targets, num_programs=programs, trusted=True
        )

    def sums(self, items: Sequence[tuple[int, int]]) -> list[int]:
        """Checksums of host items (kind, id), as they were when they came there."""
        found: dict[tuple[int, int], int] = {}
        for kind, sums in self._sums.items():
            its = [item for item in items if item[0] == kind]
            found.update(zip(its, sums[[page for _, page in its]].tolist(), strict=True))
        return [found[item] for item in items]

    def new_sums(self, items: Sequence[tuple[int, int]]) -> list[int]:
        """Checksums of host items (kind, id) that storage has just written.

        They are computed by the calling thread on the host: the pages themselves stay there.
        """
        for kind, slab in self.host.items():
            ids = [page for its_kind, page in items if its_kind == kind]
            sums = [checksums(slab[page].view(torch.int64)[None]) for page in ids]
            if sums:
                with torch.cuda.stream(self._sum_stream):  # changes nothing where there is none
                    device = self._sums[kind].device
                    self._sums[kind][torch.tensor(ids).to(device)] = torch.cat(sums).to(device)
        with torch.cuda.stream(self._sum_stream):
            return self.sums(items)

    def payload(self, kind: int, page_id: int) -> memoryview:
        """The bytes of a host item, in place."""
        item = self.host[kind][page_id].numpy()
        return memoryview(item)  # type: ignore[arg-type]  # numpy's stubs before 3.12 buffers


def there(table: CopyTable | None) -> CopyTable:
    """A table that there must be."""
    assert table is not None, "nothing moves between pools that hold nothing"
    return table


def _table(buffers: Sequence[Buffer], layers: range, src: str, dst: str) -> CopyTable | None:
    """From one tier to another, or within one; None if there is nothing to move."""
    chosen = [buffer for buffer in buffers if buffer.layer in layers]
    sides = [[getattr(buffer, tier) for buffer in chosen] for tier in (src, dst)]
    if not chosen or not all(len(each) for side in sides for each in side):
        return None
    return copy_table(*sides)


def _zeros(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def count_of(counts: Counts, kind: int) -> int:
    """Items of a kind."""
    count = counts[kind]
    if count is None:
        raise ValueError(
            "cache.unlimited=true needs executor.kind=simulated: real memory is limited"
        )
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
    heads, dim = config.recurrent_heads // tp, config.recurrent_head_dim
    state_dim = config.recurrent_state_dim
    state = (heads, state_dim, dim)
    if groups == config.recurrent_heads:
        return (heads, config.conv_taps - 1, dim + 2 * state_dim), state
    # groups that several heads share are on every rank that has one of these heads
    shared = max(groups // tp, min(groups, 1))
    return (config.conv_taps - 1, heads * dim + 2 * shared * state_dim), state
