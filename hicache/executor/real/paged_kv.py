"""One sequence as the model sees it: its pages and its working slot in the pools."""

from collections.abc import Iterator, Sequence

import torch
from einops import rearrange
from torch import Tensor

from hicache.cache.kinds import FULL
from hicache.cache.pages import PageIds
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import RankPools
from hicache.executor.real.tables import Row
from hicache.kernels.scan import ScanWeights


class HoleError(RuntimeError):
    pass


class PagedKvView:
    """Reads and writes the KV pages and the Mamba state of one sequence.

    Heads are divided among tensor-parallel ranks. Reads concatenate the heads of all ranks.

    Args:
        pools: memory of all ranks.
        words: for each layer, the letters of the kinds of data that it caches, such as "F" for
            full attention (`ModelConfig.layer_words`).
        tables: by kind, page ids of the sequence in order. -1 means that the page is missing.
        slot: slot of the sequence's Mamba state. -1 means that the model has no such state.
        rows: the page ids on the device, by kind of attention. None means that they are copied to
            the device now.
        captures: lengths in tokens, ascending, at which a forward pass copies the Mamba state into
            another slot.
    """

    def __init__(
        self,
        pools: TorchPools,
        words: tuple[str, ...],
        tables: Sequence[PageIds],
        slot: int,
        rows: dict[int, Row] | None = None,
        captures: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._pools = pools
        kinds = pools.ranks[0].letters.items()
        self._kinds = [
            next((kind for kind, letter in kinds if letter in word), FULL) for word in words
        ]
        self._index_layers = [layer for layer, word in enumerate(words) if "I" in word]
        self._tables = tables
        self._rows = {
            kind: Row(torch.tensor(tables[kind], dtype=torch.int32).to(pools.device).clamp(0), 0)
            for kind in set(self._kinds) - (rows or {}).keys()
        } | (rows or {})
        self._slot = slot
        self._captures = captures

    def write_tokens(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [token, head, dim] of one layer into the pages of the sequence.

        The first token has position `start`.
        """
        end = start + len(keys)
        table, tiles = self._tile(layer, start, start // self._pools.page_size, end)
        for rank, pool in self._layers(layer):
            both = keys[None, :, rank.heads], values[None, :, rank.heads]
            self._pools.plane.append(pool, table, tiles, *both)

    def attend(
        self, layer: int, queries: Tensor, start: int, end: int, *, window_len: int, sinks: Tensor
    ) -> Tensor:
        """Compute attention from `queries` to the cached keys and values of a layer.

        `queries` is [row, head, dim]. The first row has position `start`. Rows at position `end` or
        later are padding, and their results are undefined. `window_len` is in tokens; 0 means no
        sliding window. `sinks` holds the score of an attention sink for each head.
        """
        seen = max(start - window_len + 1, 0) if window_len else 0
        table, tiles = self._tile(layer, start, seen // self._pools.page_size, end)
        ranks = list(self._layers(layer))
        parts = zip(ranks, queries.chunk(len(ranks), 1), sinks.chunk(len(ranks)), strict=True)
        mixed = [
            self._pools.plane.attend(
                pool,
                table,
                tiles,
                query[None].contiguous(),
                end=end,
                window_len=window_len,
                sinks=sink,
            )[0]
            for (_, pool), query, sink in parts
        ]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)

    def write_index(self, layer: int, start: int, keys: Tensor) -> None:
        """Write the keys of the layer's indexer for the tokens from `start` on, on every rank.

        `keys` is [token, dim].
        """
        size, end = self._pools.page_size, start + len(keys)
        tokens = torch.arange(start, end, device=keys.device)
        self._page_ids(FULL, start // size, -(-end // size))
        pages = self._rows[FULL].ids[tokens // size].long()
        for rank in self._pools.ranks:
            rank.index[self._index_layers.index(layer)][pages, tokens % size] = keys

    def read_index(self, layer: int, end: int) -> Tensor:
        """Return copies of the index keys [token, dim] of pages [0, end), from the last rank."""
        self._page_ids(FULL, 0, end)
        held = self._pools.ranks[-1].index[self._index_layers.index(layer)]
        keys: Tensor = held[self._rows[FULL].ids[:end].long()].flatten(0, 1)
        return keys

    def _layers(self, layer: int) -> Iterator[tuple[RankPools, Tensor]]:
        kind, holder = self._kinds[layer], self._pools.holders[layer]
        for rank in self._pools.ranks:
            yield rank, rank.layers[kind][holder]

    def _tile(self, layer: int, start: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        kind, size = self._kinds[layer], self._pools.page_size
        self._page_ids(kind, first, -(-end // size))
        row = self._rows[kind]
        tile = torch.tensor([[start, 0, end - start, row.first]], dtype=torch.int32)
        return row.ids[None], tile.to(row.ids.device)

    def read_kv(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values [token, head, dim] of a layer, for whole pages.

        The pages are those with index `first` to `end - 1` in the sequence.
        """
        kind, holder = self._kinds[layer], self._pools.holders[layer]
        self._page_ids(kind, first, end)
        ids = self._rows[kind].pages(first, end)
        parts = [rank.kv[kind][holder].index_select(1, ids) for rank in self._pools.ranks]
        both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        keys, values = rearrange(both, "kv page token head dim -> kv (page token) head dim")
        return keys, values

    def scan(
        self, layer: int, inputs: Tensor, gates: Tensor, weights: ScanWeights, start: int
    ) -> Tensor:
        """Run a recurrent layer over the tokens from `start` on.

        The state is read from the sequence's slot (`slot`) and written back to it. After the
        lengths in `captures`, it is also copied to other slots. Arguments and result as for
        `kernels.scan.scan`, with the heads of all ranks.
        """
        captures = [(end - start, slot) for end, slot in self._captures]
        ends = torch.tensor([*captures, (len(inputs), self._slot)], dtype=torch.int32)
        ends = ends.to(self._pools.device)
        outputs = []
        for rank in self._pools.ranks:
            holder, heads = self._pools.holders[layer], rank.recurrent_heads
            outputs.append(
                self._pools.plane.scan(
                    rank.taps[holder],
                    rank.states[holder],
                    self._slot,
                    ends,
                    inputs[:, heads],
                    gates[..., heads],
                    weights.part(heads),
                    start=start,
                    block=self._pools.page_size,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _page_ids(self, kind: int, first: int, end: int) -> PageIds:
        page_ids = self._tables[kind][first:end]
        if len(page_ids) < end - first or min(page_ids) < 0:
            raise HoleError(
                f"pages [{first}, {end}) of a sequence are {page_ids}: at least one is missing"
            )
        return page_ids
