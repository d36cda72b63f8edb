"""The page tables of a step on the device, for all its sequences at once, by the index kernels.

Ids, lengths and full-to-SWA pairs of a step are sent in one pinned copy. Only pages inside a window
are paired: outside of it, a sequence may still list a page that it no longer owns.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hicache.cache.kinds import FULL, SWA
from hicache.cache.pages import PageIds
from hicache.cache.tree.sequence import Sequence as TokenSequence
from hicache.executor.real.pools import TorchPools
from hicache.kernels import send


class Stretch(NamedTuple):
    sequence: TokenSequence
    start: int
    end: int


class Row(NamedTuple):
    ids: Tensor
    first: int

    def pages(self, first: int, end: int) -> Tensor:
        assert first >= self.first, f"pages from {self.first} on, got {first}"
        return self.ids[first - self.first : end - self.first]


class StepTables:
    """Builds the page tables of all sequences in an engine step, on the device."""

    def __init__(self, pools: TorchPools, window_len: int) -> None:
        self._page_size = pools.page_size
        self._device = pools.device
        self._plane = pools.plane
        self._window_len = window_len
        self._full_to_swa: Tensor | None = None
        if SWA in pools.ranks[0].kv:
            self._full_to_swa = torch.full((pools.num_full_pages,), -1, dtype=torch.int32).to(
                self._device
            )

    def rows(self, stretches: Sequence[Stretch]) -> list[dict[int, Row]]:
        if not stretches:
            return []
        size = self._page_size
        num_pages = [-(-each.end // size) for each in stretches]
        firsts = [self._first_page(each) for each in stretches]
        lengths = np.array(num_pages, np.int32)
        parts = [
            _ids(s.sequence.pages[FULL][:n] for s, n in zip(stretches, num_pages, strict=True)),
            np.stack([lengths.cumsum(dtype=np.int32) - lengths, lengths], axis=1).ravel(),
            np.arange(len(stretches) + 1, dtype=np.int32),
            np.array([each.end for each in stretches], np.int32),
        ]
        if self._full_to_swa is not None:
            for kind in (FULL, SWA):
                of_windows = (
                    each.sequence.pages[kind][first:end]
                    for each, first, end in zip(stretches, firsts, num_pages, strict=True)
                )
                parts.append(_ids(of_windows))
        page_ids, spans, bounds, ends, *pairs = send(
            [torch.from_numpy(part) for part in parts], self._device
        )
        table = self._plane.page_table(
            page_ids, spans.view(-1, 2), bounds, num_columns=max(num_pages)
        )
        rows = [{FULL: Row(ids, 0)} for ids in table]
        if self._full_to_swa is None:
            return rows
        full_ids, swa_ids = pairs
        self._full_to_swa[full_ids.long()] = swa_ids
        window = max(each.end - first * size for each, first in zip(stretches, firsts, strict=True))
        windows = self._plane.window_table(
            table, ends, self._full_to_swa, page_size=size, window_len=max(window, 1)
        )
        for row, ids, each in zip(rows, windows, stretches, strict=True):
            row[SWA] = Row(ids, max(each.end - window, 0) // size)
        return rows

    def _first_page(self, stretch: Stretch) -> int:
        start = stretch.start // self._page_size * self._page_size
        return max(start - self._window_len + 1, 0) // self._page_size


def _ids(parts: Iterable[PageIds]) -> NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(parts), np.int32)
