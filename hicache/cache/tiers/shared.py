"""Pools of several kinds of data that share a tier's bytes (`cache.pools`): what fits in them."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from hicache.cache.kinds import FULL, Kinds
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


def fitting(kinds: Kinds, kind: int, counts: Iterable[int]) -> int:
    """Return how many pages or states of `kind` take the bytes of `counts` pages, by kind."""
    sizes = kinds.page_bytes
    return sum([size * count for size, count in zip(sizes, counts, strict=True)]) // sizes[kind]


def taken(kinds: Kinds, kind: int, claims: Mapping[int, float]) -> int:
    """Return how many tokens (or states) of `kind` the `claims` take: tokens (or states) by kind.

    The result is a multiple of a page.
    """
    sizes, units = kinds.page_bytes, kinds.units
    num_bytes = sum([sizes[each] * count / units[each] for each, count in claims.items()])
    return ceil(num_bytes / sizes[kind]) * units[kind]


def growth_pages(kinds: Kinds, kind: int, pages: int) -> int:
    """Return how many pages of each paged kind take the bytes of `pages` pages of `kind`."""
    sizes = kinds.page_bytes
    return pages * sizes[kind] // sum([sizes[each] for each in kinds.paged])


def growth_in_full_pages(kinds: Kinds, count: int) -> int:
    """Return how many pages of full KV take the bytes of `count` pages of each paged kind."""
    num_bytes = count * sum([kinds.page_bytes[each] for each in kinds.paged])
    return -(-num_bytes // kinds.page_bytes[FULL])
