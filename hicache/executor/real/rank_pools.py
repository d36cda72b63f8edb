"""The pools of one rank: pages and slots on the device and in pinned host memory, and their tables.

A pool is one slab. The device slab is layer-first, because attention reads one layer at a time. On
the host each item (a page, a slot) is contiguous, because storage reads and writes whole items.

Axes: layer (that keeps this kind), kv (keys and values), page or slot, token, head, dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hicache.cache.kinds import FULL, KEY_TAGS, MAMBA, SWA
from hicache.executor.real.pinned import pinned_bytes
from hicache.executor.real.plane import REFERENCE, Plane
from hicache.executor.real.stored_pages import StoredPages, bytes_of, checksum_of, smaller_format
from hicache.executor.real.transfers import Buffer, Transfer
from hicache.kernels import CopyTable, copy_table, layer_first_buffers
from hicache.kernels.load import LoadBuffer, LoadTable, load_table
from hicache.models import PLAIN, LayerKind, ModelConfig
from hicache.models.shapes import Part

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Counts = Sequence[int | None]  # items by kind
Table = TypeVar("Table", Transfer, LoadTable, CopyTable)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """Sizes and number formats of an engine's memory pools, and how copies run.

    `device_counts` and `host_counts` give the number of pages or states of each kind.
    """

    model: ModelConfig
    page_size: int
    device_counts: Counts
    host_counts: Counts
    device: torch.device
    tp: int = 1
    stage_layers: Sequence[int] = ()  # of each pipeline stage; none means one stage
    link_programs: int | None = None  # of a load-back; None means the kernel's default
    plane: Plane = REFERENCE  # the functions that copy
    host_format: str = PLAIN
    storage_format: str = PLAIN


class RankPools:
    """The memory of one rank, for KV pages and Mamba states: a share of the heads of some layers.

    The ranks of the first pipeline stage come first, each with all layers of the stage.

    On the device, `kv[kind]` is [layer, kv, page, token, head, dim]. `index` holds the keys of
    indexers, which share the pages of full-attention KV: by layer, [page, token, dim]. Its pages
    are copied to `index_read` to be read. `taps`
    (convolution inputs) and `states` (Mamba states) are lists of one tensor [slot, ...] per
    recurrent layer. On the host, `host[kind]` is [page or slot, bytes]. `layout` describes the
    bytes of a stored page. `stored` converts pages between the formats of host and storage.
    """

    def __init__(self, spec: PoolSpec, rank: int) -> None:
        config = spec.model
        self._spec = spec
        self.kv: dict[int, Tensor] = {}
        self.index: dict[int, Tensor] = {}
        self.taps: list[Tensor] = []
        self.states: list[Tensor] = []
        self.host: dict[int, Tensor] = {}
        stage, part = divmod(rank, spec.tp)
        self.heads = _heads(config, part, spec.tp)
        share = config.recurrent_heads // spec.tp
        self.recurrent_heads = slice(part * share, (part + 1) * share)
        first = sum(spec.stage_layers[:stage])
        count = spec.stage_layers[stage] if spec.stage_layers else len(config.layer_words)
        self._words = list(enumerate(config.layer_words))[first : first + count]
        self._buffers = buffers = dict[int, list[Buffer]]()
        for kind, (letter, _) in paged_kinds(config).items():
            layers = [layer for layer, word in self._words if letter in word]
            if layers:
                buffers[kind] = self._make_pages(kind, layers)
        if config.num_mamba_layers:
            buffers[MAMBA] = self._make_states()
        own = PLAIN if spec.storage_format == spec.host_format else spec.storage_format
        self.stored = StoredPages(buffers, own)
        self.layout = tuple(
            f"{chr(KEY_TAGS[kind])}{line}" for kind in buffers for line in self.stored.layout(kind)
        )
        self.saves = {kind: self._save(its) for kind, its in buffers.items()}
        self.loads = self.table("host")  # of all kinds
        self.copies = self.table("device")  # of states, to other slots
        self._bytes = {kind: slab.numpy() for kind, slab in self.host.items()}
        # checksum of each host item, computed by the copy or read that wrote it; for a kind that is
        # coded on the way, the host computes it on demand
        self._sums = {
            kind: torch.zeros(len(host), dtype=torch.int64, device=spec.device)
            for kind, host in self.host.items()
            if all(each.form is None for each in buffers[kind])
        }
        self.layers = {kind: kv.unbind(0) for kind, kv in self.kv.items()}
        # pools as kernels take them: pages of one token, and keys as both keys and values
        self.token_layers = [each.flatten(1, 2).unsqueeze(2) for each in self.layers.get(FULL, ())]
        self.index_layers = {
            layer: keys.unsqueeze(2).expand(2, -1, -1, 1, -1) for layer, keys in self.index.items()
        }
        self.index_read = torch.zeros_like(next(iter(self.index.values()), torch.empty(0)))
        self.index_reads = {
            layer: copy_table([keys], [self.index_read]) if len(keys) else None
            for layer, keys in self.index.items()
        }
        parts = [part for part in (*self.taps, *self.states) if part[:1].numel()]
        self.clears: CopyTable | None = None
        if parts:
            self.clears = copy_table([torch.zeros_like(part[:1]) for part in parts], parts)
        self._sum_stream: torch.cuda.Stream | None = None
        if spec.device.type == "cuda":
            self._sum_stream = torch.cuda.Stream(spec.device)  # type: ignore[no-untyped-call]

    def _make_pages(self, kind: int, layers: Sequence[int]) -> list[Buffer]:
        spec = self._spec
        dtype = DTYPES[spec.model.kv_dtype_bytes]
        num_kv, num_heads, dim = 2, self.heads.stop - self.heads.start, spec.model.head_dim
        dims = spec.model.row_dims(LayerKind.swa if kind == SWA else LayerKind.full)
        if dims != [dim] * 2 * spec.model.num_kv_heads:  # a row of a token, as one head
            num_kv, num_heads, dim = 1, 1, sum(dims)
        shape = (
            len(layers),
            num_kv,
            count_of(spec.device_counts, kind),
            spec.page_size,
            num_heads,
            dim,
        )
        self.kv[kind] = kv = torch.zeros(shape, dtype=dtype, device=spec.device)
        parts = [
            (layers[place // num_kv], each, True)
            for place, each in enumerate(layer_first_buffers(kv))
        ]
        part = index_part(spec.model)
        for layer in layers if kind == FULL else ():
            if part is not None and part.is_in(spec.model.layer_words[layer]):
                keys = kv.new_zeros(shape[2], spec.page_size, part.dim)
                self.index[layer] = keys
                parts.append((layer, keys, False))
        return self._make_host(kind, parts)

    def _make_states(self) -> list[Buffer]:
        spec, config = self._spec, self._spec.model
        layers = [layer for layer, word in self._words if set("MD") & set(word)]
        num_slots = count_of(spec.device_counts, MAMBA)
        heads, dim = config.recurrent_heads // spec.tp, config.recurrent_head_dim
        state_dim = config.recurrent_state_dim
        state = num_slots, heads, state_dim, dim
        for layer in layers:
            is_mamba = "M" in config.layer_words[layer]
            groups = config.recurrent_groups if is_mamba else config.recurrent_key_heads
            split = heads if groups == config.recurrent_heads else 1  # or channels of no head
            channels = heads * dim + 2 * (groups // spec.tp) * state_dim
            taps = num_slots, split, config.conv_taps - 1, channels // split
            dtype = DTYPES[config.conv_dtype_bytes]
            self.taps.append(torch.zeros(taps, dtype=dtype, device=spec.device))
            dtype = DTYPES[config.state_dtype_bytes]
            self.states.append(torch.zeros(state, dtype=dtype, device=spec.device))
        parts = [
            (layer, part, may_code)
            for layer, *pair in zip(layers, self.taps, self.states, strict=True)
            for part, may_code in zip(pair, (False, True), strict=True)  # taps are never coded
            if part[:1].numel()
        ]
        return self._make_host(MAMBA, parts)

    def _make_host(self, kind: int, parts: Sequence[tuple[int, Tensor, bool]]) -> list[Buffer]:
        # `parts`: layer, tensor [item, ...] on the device, and whether its numbers may be coded
        count, name = count_of(self._spec.host_counts, kind), self._spec.host_format
        forms = [smaller_format(name, part.dtype) if code else None for _, part, code in parts]
        sizes = [
            bytes_of(part.shape[1:], part.dtype, form)
            for (_, part, _), form in zip(parts, forms, strict=True)
        ]
        num_bytes, on_gpu = count * sum(sizes), self._spec.device.type == "cuda"
        slab = pinned_bytes(num_bytes) if on_gpu else torch.zeros(num_bytes, dtype=torch.uint8)
        self.host[kind] = slab = slab.view(count, sum(sizes))
        pieces = torch.split(slab, sizes, dim=1)
        return [
            Buffer(layer, part, piece, form, may_code)
            for (layer, part, may_code), piece, form in zip(parts, pieces, forms, strict=True)
        ]

    def _save(self, buffers: Sequence[Buffer]) -> Transfer | None:
        if not all(len(each.device) and len(each.host) for each in buffers):
            return None
        return Transfer(buffers, self._spec.plane)

    def table(self, source: str, peer: "RankPools | None" = None) -> LoadTable | None:
        """Return the table of copies to the device from the memory `source`, ours or a peer's."""
        pairs = [
            (kind, ours, theirs)
            for kind, buffers in self._buffers.items()
            for ours, theirs in zip(buffers, (peer or self)._buffers[kind], strict=True)
            if peer is not None or source == "host" or kind == MAMBA
        ]
        chosen = [
            LoadBuffer(
                ours.layer, kind, origin, ours.device, ours.form if source == "host" else None
            )
            for kind, ours, theirs in pairs
            if len(origin := getattr(theirs, source)) and len(ours.device)
        ]
        return load_table(chosen, len(self._spec.model.layer_words)) if chosen else None

    def save(self, kind: int, sources: Tensor, targets: Tensor) -> None:
        sums = there(self.saves[kind]).run_with_checksum((sources, targets))
        if sums is not None:
            self._sums[kind][targets.long()] = sums

    def sums(self, items: Sequence[tuple[int, int]]) -> list[int]:
        """Return the checksums of pages, or Mamba states, in host memory.

        Each of the `items` is a kind of page and a host page id.
        """
        found: dict[tuple[int, int], int] = {}
        for kind, slab in self.host.items():
            ids = [page for its_kind, page in items if its_kind == kind]
            if kind in self._sums:
                sums = self._sums[kind][ids].tolist()
            else:
                sums = [checksum_of(slab[page]) for page in ids]
            found.update(zip([(kind, page) for page in ids], sums, strict=True))
        return [found[item] for item in items]

    def new_sums(self, items: Sequence[tuple[int, int]]) -> list[int]:
        for kind, its_sums in self._sums.items():
            ids = [page for its_kind, page in items if its_kind == kind]
            if ids:
                sums = torch.tensor([checksum_of(self.host[kind][page]) for page in ids])
                with torch.cuda.stream(self._sum_stream):  # no effect without a stream
                    device = its_sums.device
                    its_sums[torch.tensor(ids).to(device)] = sums.to(device)
        with torch.cuda.stream(self._sum_stream):
            return self.sums(items)

    def landing(self, kind: int, page_id: int) -> memoryview:
        if not self.stored.is_own:
            return self.payload(kind, page_id)
        return memoryview(bytearray(self.stored.page_bytes(kind)))

    def landed(self, items: Sequence[tuple[int, int]], buffers: Sequence[memoryview]) -> list[int]:
        """Store pages that were read from storage in the host pool; return their checksums.

        Each of the `items` is a kind of page and a host page id. `buffers` holds the bytes as read,
        and the checksums are those of the buffers. Pages are converted if storage has another
        number format.
        """
        if not self.stored.is_own:
            return self.new_sums(items)
        for item, buffer in zip(items, buffers, strict=True):
            self.stored.unpack(item[0], buffer, self.payload(*item))
        self.new_sums(items)
        return [checksum_of(torch.frombuffer(buffer, dtype=torch.uint8)) for buffer in buffers]

    def payload(self, kind: int, page_id: int) -> memoryview:
        return memoryview(self._bytes[kind][page_id])


def index_part(config: ModelConfig) -> Part | None:
    """Return the model's index keys; None if it has none.

    They lie in the pages of full-attention KV. Every rank keeps a copy of them.
    """
    return next((part for part in config.parts if not part.window_len), None)


def paged_kinds(config: ModelConfig) -> dict[int, tuple[str, int]]:
    """Return for each kind of cached data that has pages its letter and its window in tokens.

    `ModelConfig.pattern` has a letter for each layer, for example "F" for full attention. The
    number of a kind is its place in `ModelConfig.kind_names`. A window of 0 means none.
    """
    windows = {
        config.kind_names.index(part.name): (part.letter, part.window_len)
        for part in config.parts
        if part.window_len
    }
    return {FULL: ("F", 0), SWA: ("S", config.window_len), **windows}


def there(table: Table | None) -> Table:
    assert table is not None, "nothing moves between pools that hold nothing"
    return table


def count_of(counts: Counts, kind: int) -> int:
    count = counts[kind]
    if count is None:
        raise ValueError(
            "cache.unlimited=true needs executor.kind=simulated: real memory is limited"
        )
    return count


def _heads(config: ModelConfig, rank: int, tp: int) -> slice:
    first = rank * config.num_kv_heads // tp
    return slice(first, first + max(config.num_kv_heads // tp, 1))
