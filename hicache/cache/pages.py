"""Allocators of page ids or Mamba state slots, one per pool."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PageIds = list[int]
NO_PAGES: PageIds = []  # shared; must not be changed


class PageAllocator:
    """Allocates the page ids of one pool of KV-cache pages.

    Each id from 0 to `capacity - 1` is either free or allocated. `capacity=None` means that the
    pool is unlimited. `num_free` is the number of ids that are still free; for an unlimited pool,
    it is a very large number. If `is_checked` is True, the allocator detects double frees.
    """

    def __init__(self, capacity: int | None, *, is_checked: bool = True) -> None:
        self.capacity = capacity
        self.num_free = 1 << 60 if capacity is None else capacity
        self._out: set[int] | None = set() if is_checked else None
        self._returned: list[int] = []  # stack of freed ids
        self._next_new = 0  # first id that was never allocated

    @property
    def num_taken(self) -> int:
        return self._next_new - len(self._returned)

    @property
    def taken(self) -> set[int]:
        # must not be changed; O(ids ever allocated) if ids are not checked
        if self._out is not None:
            return self._out
        return set(range(self._next_new)).difference(self._returned)

    def are_taken(self, are_owned: NDArray[np.bool_]) -> bool:
        """Return True if the allocated ids are exactly those with `are_owned[id]`."""
        if self._out is not None:
            return self._out == set(np.flatnonzero(are_owned).tolist())
        differ = np.zeros(max(self._next_new, len(are_owned)), bool)
        differ[: self._next_new] = True
        differ[self._returned] = False
        differ[: len(are_owned)] ^= are_owned
        return not differ.any()

    def allocate(self, count: int) -> PageIds | None:
        """Allocate `count` page ids; return None, and allocate nothing, if fewer ids are free."""
        if count > self.num_free:
            return None
        self.num_free -= count
        returned = self._returned
        if count == 1 and returned:  # the most frequent case
            page_ids = [returned.pop()]
        else:
            page_ids = returned[: -count - 1 : -1]  # from the top of the stack
            del returned[len(returned) - len(page_ids) :]
            if missing := count - len(page_ids):
                page_ids += range(self._next_new, self._next_new + missing)
                self._next_new += missing
        if self._out is not None:
            self._out.update(page_ids)
        return page_ids

    def free(self, page_ids: PageIds) -> None:
        """Return page ids to the pool, so that they can be allocated again.

        Raises:
            ValueError: an id is not allocated, as in a double free. An allocator that was built
                with `is_checked=False` does not detect this.
        """
        if self._out is not None:
            _take_back(self._out, page_ids)
        self.num_free += len(page_ids)
        self._returned += page_ids


def _take_back(taken: set[int], page_ids: PageIds) -> None:
    if not taken.issuperset(page_ids):
        culprit = next(page_id for page_id in page_ids if page_id not in taken)
        raise ValueError(f"page {culprit} is freed but was not allocated")
    left = len(taken) - len(page_ids)
    taken.difference_update(page_ids)
    if len(taken) != left:
        raise ValueError("the same page appears twice in one call of free")


Pools = tuple[list[PageAllocator], list[PageAllocator]]  # by tier and kind


class FreePages(NamedTuple):
    """Page ids to return to one page pool.

    `tier` and `kind` select the pool. `tier` is 0 for the device and 1 for the host. `kind` is the
    index of a kind of cached data, such as full-attention KV or Mamba states.
    """

    tier: int
    kind: int
    page_ids: PageIds


def free(actions: Iterable[FreePages], pools: Pools) -> None:
    for tier, kind, page_ids in actions:
        pools[tier][kind].free(page_ids)


def joined(parts: Sequence[PageIds]) -> PageIds:
    return parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
