"""Which page ids (or state slots) of one pool are free."""

import zlib

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]
NO_PAGES: PageIds = np.empty(0, np.int32)


class PageAllocator:
    """Hands out the ids of one pool.

    Every id in [0, capacity) is free or taken, never both. `capacity=None` is a pool that never
    fills: ids are made as they are asked for.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        size = 1024 if capacity is None else capacity
        self._taken = np.zeros(size, bool)
        self._returned = np.empty(size, np.int32)  # a stack of ids that were given back
        self._num_returned = 0
        self._next_new = 0  # ids from here on were never handed out

    @property
    def num_taken(self) -> int:
        """Ids that are out."""
        return self._next_new - self._num_returned

    @property
    def taken(self) -> NDArray[np.bool_]:
        """Which ids are out, by id; not to be written."""
        return self._taken

    @property
    def num_free(self) -> int:
        """Ids that `allocate` can still give; a very large number when the pool never fills."""
        if self.capacity is None:
            return 1 << 40
        return self.capacity - self.num_taken

    def allocate(self, count: int) -> PageIds | None:
        """Take `count` ids, or none of them: None when fewer are free. O(count)."""
        if count > self.num_free:
            return None
        reused = min(count, self._num_returned)
        top = self._num_returned
        page_ids = np.empty(count, np.int32)
        page_ids[:reused] = self._returned[top - reused : top][::-1]
        self._num_returned = top - reused
        if reused < count:
            end = self._next_new + count - reused
            if end > len(self._taken):
                self._grow(end)
            page_ids[reused:] = np.arange(self._next_new, end, dtype=np.int32)
            self._next_new = end
        self._taken[page_ids] = True
        return page_ids

    def free(self, page_ids: PageIds) -> None:
        """Give ids back. O(len(page_ids)).

        Raises:
            ValueError: an id is not taken, as after a double free.
        """
        count = len(page_ids)
        if count == 0:
            return
        if not self._taken[page_ids].all():
            culprit = int(page_ids[~self._taken[page_ids]][0])
            raise ValueError(f"page {culprit} is freed but was not taken")
        self._taken[page_ids] = False
        if count > 1 and self._has_duplicates(page_ids):
            raise ValueError("a page is named twice in one free")
        top = self._num_returned
        self._returned[top : top + count] = page_ids
        self._num_returned = top + count

    @staticmethod
    def _has_duplicates(page_ids: PageIds) -> bool:
        # duplicates inside one call would be pushed twice; sorting a few hundred ids is cheap
        ordered = np.sort(page_ids)
        return bool((ordered[1:] == ordered[:-1]).any())

    def _grow(self, least: int) -> None:
        size = max(least, 2 * len(self._taken))
        taken = np.zeros(size, bool)
        taken[: len(self._taken)] = self._taken
        returned = np.empty(size, np.int32)
        returned[: self._num_returned] = self._returned[: self._num_returned]
        self._taken, self._returned = taken, returned


Pools = tuple[list[PageAllocator], list[PageAllocator]]  # by tier and component


class TracedAllocator(PageAllocator):
    """A pool's allocator that keeps a running digest of every id that went out or came back.

    Every decision of a tree moves ids, so ranks whose decisions differ have different traffic.
    """

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self.traffic = 0

    def allocate(self, count: int) -> PageIds | None:
        """Take `count` ids, or none of them."""
        page_ids = super().allocate(count)
        self.traffic = zlib.crc32(b"-" if page_ids is None else page_ids.tobytes(), self.traffic)
        return page_ids

    def free(self, page_ids: PageIds) -> None:
        """Give ids back."""
        super().free(page_ids)
        self.traffic = zlib.crc32(page_ids.tobytes(), self.traffic ^ 1)
