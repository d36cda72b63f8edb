"""One sequence as the model sees it: its pages and its working slot in the pools."""

import torch
from einops import rearrange
from torch import Tensor

from hicache.cache.kinds import FULL, SWA
from hicache.cache.pages import PageIds
from hicache.executor.real.pools import TorchPools
from hicache.executor.real.tables import Row


class HoleError(RuntimeError):
    """The model would read a page that is not there."""


class PagedKvView:
    """Pages through a page table, and the state in a working slot.

    Heads lie on their ranks; what is read is put together again.

    Args:
        words: kind of every layer, as in `ModelConfig.layer_words`.
        tables: page ids by page of the sequence, of full and of swa; -1 is a hole.
        slot: the working slot, if the model has states.
        rows: the same ids on the device, by kind, if they are there already.
    """

    def __init__(
        self,
        pools: TorchPools,
        words: tuple[str, ...],
        tables: tuple[PageIds, PageIds],
        slot: int,
        rows: dict[int, Row] | None = None,
    ) -> None:
        self._pools = pools
        self._kinds = [SWA if word == "S" else FULL for word in words]
        self._tables = tables
        self._rows = rows or {
            kind: Row(torch.tensor(tables[kind], dtype=torch.int32).to(pools.device).clamp(0), 0)
            for kind in (FULL, SWA)
        }
        self._slot = slot

    def write_tokens(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [token, head, dim] of the tokens from `start` on, in one go."""
        kind, holder = self._kinds[layer], self._pools.holders[layer]
        size = self._pools.page_size
        end = start + len(keys)
        self._page_ids(kind, start // size, -(-end // size))
        place = torch.arange(start, end, device=keys.device)
        row = self._rows[kind]
        page_ids, rows = row.ids[place // size - row.first], place % size
        for rank in self._pools.ranks:
            rank.kv[kind][holder, 0, page_ids, rows] = keys[:, rank.heads[kind]]
            rank.kv[kind][holder, 1, page_ids, rows] = values[:, rank.heads[kind]]

    def read_kv(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of keys and values [token, head, dim] of pages [first, end)."""
        kind, holder = self._kinds[layer], self._pools.holders[layer]
        self._page_ids(kind, first, end)
        ids = self._rows[kind].pages(first, end)
        parts = [rank.kv[kind][holder].index_select(1, ids) for rank in self._pools.ranks]
        both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        keys, values = rearrange(both, "kv page token head dim -> kv (page token) head dim")
        return keys, values

    def read_state(self, layer: int) -> tuple[Tensor, Tensor]:
        """Taps [head, tap, channel] and state [head, state, dim] after the last token."""
        holder, slot = self._pools.holders[layer], self._slot
        taps = [rank.taps[holder][slot] for rank in self._pools.ranks]
        states = [rank.states[holder][slot] for rank in self._pools.ranks]
        return torch.cat(taps), torch.cat(states)

    def write_state(self, layer: int, taps: Tensor, state: Tensor) -> None:
        """Put the taps and the state after the last token."""
        holder, slot = self._pools.holders[layer], self._slot
        for rank in self._pools.ranks:
            rank.taps[holder][slot] = taps[rank.recurrent_heads]
            rank.states[holder][slot] = state[rank.recurrent_heads]

    def _page_ids(self, kind: int, first: int, end: int) -> PageIds:
        page_ids = self._tables[kind][first:end]
        if len(page_ids) < end - first or min(page_ids) < 0:
            raise HoleError(
                f"pages [{first}, {end}) of a sequence are {page_ids}: at least one is missing"
            )
        return page_ids
