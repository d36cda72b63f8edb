"""The sequences of a step as the model sees them: their pages and their slots in the pools."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hicache.executor.real.pools import TorchPools
from hicache.executor.real.rank_pools import RankPools, there
from hicache.executor.real.tables import Group, StepTables, Stretch
from hicache.kernels.scan import ScanWeights


class PagedKvView:
    """Reads and writes the KV pages and the Mamba states of the sequences of a step.

    Tables of all sequences are sent to the device once; kernels then run on a group of tiles.
    Heads are divided among tensor-parallel ranks. Reads concatenate the heads of all ranks.

    Args:
        pools: memory of all ranks. A layer uses those of its pipeline stage.
        stretches: what the step computes, by sequence.
        together: number of tiles that are computed together.

    Raises:
        HoleError: a page that the step reads or writes is missing.
    """

    def __init__(self, pools: TorchPools, stretches: Sequence[Stretch], together: int) -> None:
        self.stretches = stretches
        self.step = StepTables(pools, stretches, together)
        self.pools = pools

    def write_tokens(self, layer: int, group: Group, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [tile, row, head, dim] of one layer into the pages."""
        tables = self._tables(layer, group)
        for rank in self.pools.of_layer(layer):
            both = keys[:, :, rank.heads], values[:, :, rank.heads]
            self.pools.plane.append(self._layer(rank, layer), *tables, *both)

    def attend(self, layer: int, group: Group, queries: Tensor, sinks: Tensor) -> Tensor:
        """Compute attention from `queries` to the cached keys and values of a layer.

        `queries` is [tile, row, head, dim]. The results of rows that are not computed in this step
        are undefined. `sinks` holds the score of an attention sink for each head.
        """
        tables, plane = self._tables(layer, group), self.pools.plane
        window_len = self.pools.windows[self.pools.kinds[layer]]

        def of_rank(rank: RankPools, its_queries: Tensor, its_sinks: Tensor) -> Tensor:
            pool, end = self._layer(rank, layer), group.end
            return plane.attend(
                pool, *tables, its_queries, end=end, window_len=window_len, sinks=its_sinks
            )

        return self._of_ranks(layer, of_rank, queries, sinks)

    def attend_chosen(
        self, layer: int, group: Group, chosen: Tensor, queries: Tensor, sinks: Tensor
    ) -> Tensor:
        """Compute attention from each of the `queries` to the tokens that are chosen for it.

        A page of one token is a page like any other: the kernel reads a table of tokens.

        Args:
            layer: index of the layer.
            group: the tiles of the queries.
            chosen: [tile, row, token] int64, positions in ascending order. A row sees the first of
                them, at most as many as there are tokens up to the row itself.
            queries: [tile, row, head, dim].
            sinks: score of an attention sink for each head.
        """
        size, (tiles, rows, count) = self.pools.page_size, chosen.shape
        page_ids, _ = self._tables(layer, group)
        page_ids = page_ids[:, None].expand(tiles, rows, -1).gather(2, chosen // size)
        table = (page_ids * size + chosen % size).int().flatten(0, 1)
        plane, choices = (
            self.pools.plane,
            self.step.choices[group.tiles.start * rows : group.tiles.stop * rows],
        )

        def of_rank(rank: RankPools, its_queries: Tensor, its_sinks: Tensor) -> Tensor:
            pool = rank.token_layers[self.pools.holders[layer]]
            by_row = its_queries.flatten(0, 1).unsqueeze(1)
            mixed = plane.attend(pool, table, choices, by_row, end=count, sinks=its_sinks)
            return mixed.view_as(its_queries)

        return self._of_ranks(layer, of_rank, queries, sinks)

    def write_index(self, layer: int, group: Group, keys: Tensor) -> None:
        """Write the keys of the layer's indexer, on every rank.

        `keys` is [tile, row, dim]. To `append`, they are the keys and the values of one head, which
        lie in the same place.
        """
        tables, keys = self._tables(layer, group), keys.unsqueeze(2)
        for rank in self.pools.of_layer(layer):
            self.pools.plane.append(rank.index_layers[layer], *tables, keys, keys)

    def read_index(self, layer: int, tile: int, num_pages: int) -> Tensor:
        """Return copies of the index keys [token, dim] of a tile's first pages, from the last rank.

        The result is valid until the next call.
        """
        rank = self.pools.of_layer(layer)[-1]
        page_ids = self.step.tables[self.pools.kinds[layer]][tile, :num_pages]
        reads = there(rank.index_reads[layer])
        self.pools.plane.copy_items(reads, page_ids, self.pools.numbers[:num_pages])
        return rank.index_read[:num_pages].flatten(0, 1)

    def scan(self, layer: int, inputs: Tensor, gates: Tensor, weights: ScanWeights) -> Tensor:
        """Run a recurrent layer over the new tokens of every sequence.

        A sequence's state is read from its slot and written back to it. After the lengths in
        `captures`, it is also copied to other slots. Arguments and result are as for
        `kernels.scan.scan`, with the rows of all tiles and the heads of all ranks. Rows that are
        not computed in this step are 0.
        """
        holder, plane, step = self.pools.holders[layer], self.pools.plane, self.step
        outputs = [
            plane.scan(
                rank.taps[holder],
                rank.states[holder],
                step.sequences,
                step.ends,
                inputs[:, heads],
                gates[:, :, heads],
                weights.part(heads),
                block=self.pools.page_size,
            )
            for rank in self.pools.of_layer(layer)
            for heads in [rank.recurrent_heads]
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _layer(self, rank: RankPools, layer: int) -> Tensor:
        return rank.layers[self.pools.kinds[layer]][self.pools.holders[layer]]

    def _tables(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        kind, step = self.pools.kinds[layer], self.step
        return step.tables[kind][group.tiles], step.tiles[kind][group.tiles]

    def _of_ranks(
        self,
        layer: int,
        attend: Callable[[RankPools, Tensor, Tensor], Tensor],
        queries: Tensor,
        sinks: Tensor,
    ) -> Tensor:
        # A rank computes all query heads of its KV heads, also those that other ranks return: with
        # as many rows of a matrix on any number of ranks, the kernel adds in the same order.
        ranks = self.pools.of_layer(layer)
        share = queries.shape[2] // len(ranks)
        copies = queries.shape[2] // self.pools.model.num_kv_heads
        mixed = []
        for number, rank in enumerate(ranks):
            heads = slice(rank.heads.start * copies, rank.heads.stop * copies)
            its = attend(rank, queries[:, :, heads].contiguous(), sinks[heads])
            first = number * share - heads.start
            mixed.append(its[:, :, first : first + share])
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)
