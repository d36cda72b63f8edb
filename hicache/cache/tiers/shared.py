"""Pools of several kinds of data that share the bytes of a tier (`cache.pools`)."""

from collections.abc import Sequence

from hicache.cache.pages import PageAllocator


class SharedBytes:
    """A number of free bytes that the pools of several kinds of data share."""

    def __init__(self, free: int) -> None:
        self.free = free


class SharedAllocator(PageAllocator):
    """Allocates the page ids of one of several pools that share their bytes.

    `capacity` is the number of pages that the bytes hold if no other pool takes any.
    """

    def __init__(self, room: SharedBytes, page_bytes: int, *, is_checked: bool = True) -> None:
        self._room, self._page_bytes = room, page_bytes
        super().__init__(room.free // page_bytes, is_checked=is_checked)

    @property
    def num_free(self) -> int:
        return self._room.free // self._page_bytes

    @num_free.setter
    def num_free(self, count: int) -> None:
        self._room.free += (count - self.num_free) * self._page_bytes


def shared_pools(
    counts: Sequence[int | None], page_bytes: Sequence[int], total_bytes: int, *, is_checked: bool
) -> list[PageAllocator]:
    """Return the allocators of a tier, which share `total_bytes`.

    `counts` holds the pages or states that each pool may take if it takes all bytes. Pools of
    unlimited size share nothing. If `is_checked` is True, the pools detect double frees.
    """
    room = SharedBytes(total_bytes)
    return [
        SharedAllocator(room, size, is_checked=is_checked)
        if count
        else PageAllocator(count, is_checked=is_checked)
        for count, size in zip(counts, page_bytes, strict=True)
    ]
