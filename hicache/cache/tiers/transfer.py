"""Copies between tiers, as the cache queues them and the executor carries them out.

A transfer names the kinds, the source and target ids, and the locks that protect both ends until
`PrefixCache.complete`.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hicache.cache.kinds import Kinds
from hicache.cache.pages import FreePages, PageIds, Pools
from hicache.cache.tree.keys import Key
from hicache.cache.tree.node import HOST, TIER_NAMES, Lock, Node

FATES = ("used", "unused_at_end", "evicted_unused", "duplicate", "late", "not_restorable")


class Move(NamedTuple):
    """Pages or slots of one kind; `sources[i]` is copied to `targets[i]`."""

    kind: int
    sources: PageIds
    targets: PageIds
    is_own: bool = False  # the request, not the tree, owns the targets


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    moves: list[Move]
    num_bytes: int
    node: Node  # the deepest node it copies
    locks: list[Lock] = field(default_factory=list)
    host_locks: list[Lock] = field(default_factory=list)

    @property
    def counts(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for move in self.moves:
            counts[move.kind] += len(move.targets)
        return counts


@dataclass(slots=True, kw_only=True, eq=False)
class LoadBack(Transfer):
    """Host to device, for a request that is about to run; its forward pass waits for the copy."""


@dataclass(slots=True, kw_only=True, eq=False)
class BackUp(Transfer):
    """Device to host. `is_fence`: the source pages are already free, so the next step waits."""

    starts: dict[int, int]  # by kind: pages [start, node.end) have a new host copy
    points: list[tuple[int, Node]]  # (kind, node): states with a new host copy
    is_fence: bool


@dataclass(slots=True, kw_only=True, eq=False)
class CopyState:
    """Copy of a state slot within the device: a request's own copy of a shared state."""

    source: PageIds
    target: PageIds


@dataclass(slots=True, kw_only=True, eq=False)
class StorageWrite:
    """Host pages to storage; `keys[i]` names the i-th page of `pages`.

    `parts`: (kind, host page ids). `is_given_away`: the pages are already freed, so the executor
    must read their bytes before `submit` returns.
    """

    keys: list[Key]
    parts: list[tuple[int, PageIds]]
    num_bytes: int
    host_locks: list[Lock] = field(default_factory=list)
    is_given_away: bool = False

    @property
    def pages(self) -> list[tuple[int, int]]:
        """(kind, host page id) of each key."""
        return [(kind, int(page_id)) for kind, page_ids in self.parts for page_id in page_ids]


@dataclass(slots=True, kw_only=True, eq=False)
class StorageDelete:
    """Pages that storage may delete; done at once, without a report."""

    keys: list[Key]


Reported = LoadBack | BackUp | StorageWrite  # works whose end is reported
Work = Reported | CopyState | StorageDelete


class PrefetchFates:
    """What happens to the full pages that prefetches have read from storage, one fate per page.

    - `used`: loaded back to the device for any request;
    - `duplicate`: already on the host;
    - `late`: read after the request had started without it, or was aborted;
    - `not_restorable`: read without the window or state that it needs, and freed at once;
    - `evicted_unused`, `unused_at_end`: inserted in the tree, but not used before it left the host
      or the run ended.

    Invariant: each page that was read has a fate or is in `unused`, the host pages in the tree that
    a prefetch has read and no request has used.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self.unused: set[int] = set()
        self._counters = counters

    def count(self, num_pages: int, fate: str) -> None:
        self._counters["prefetch/read_pages"] += num_pages
        self._counters[f"prefetch/{fate}_pages"] += num_pages

    def publish(self, page_ids: Iterable[int]) -> None:
        new = set(page_ids)
        self._counters["prefetch/read_pages"] += len(new)
        self.unused |= new

    def use(self, page_ids: Iterable[int]) -> None:
        self._close(page_ids, "used")

    def evict(self, page_ids: Iterable[int]) -> None:
        self._close(page_ids, "evicted_unused")

    def fates_now(self) -> Counter[str]:
        return Counter({"prefetch/unused_at_end_pages": len(self.unused)})

    def _close(self, page_ids: Iterable[int], fate: str) -> None:
        if not self.unused:
            return
        closed = self.unused.intersection(page_ids)
        self.unused -= closed
        self._counters[f"prefetch/{fate}_pages"] += len(closed)


class Bookings:
    """The work that the cache has queued, its pools and its counters.

    `outbox` is work to start, in order; the engine empties it. `in_flight` are transfers whose end
    was not reported yet.
    """

    def __init__(self, kinds: Kinds, pools: Pools, counters: Counter[str]) -> None:
        self.pools = pools
        self.counters = counters
        self.fates = PrefetchFates(counters)
        self.page_bytes = kinds.page_bytes
        self._aux = kinds.aux
        self._evicted = [
            [f"evict/{tier}_{name}_pages" for name in kinds.names] for tier in TIER_NAMES
        ]
        self.outbox: list[Work] = []
        self.in_flight: set[Reported] = set()

    def book(self, transfer: Reported) -> None:
        self.in_flight.add(transfer)
        self.outbox.append(transfer)

    def bytes_of(self, moves: Iterable[Move]) -> int:
        return sum([len(move.targets) * self.page_bytes[move.kind] for move in moves])

    def free_evicted(self, actions: list[FreePages]) -> None:
        for tier, kind, page_ids in actions:
            if tier == HOST and kind not in self._aux:
                self.fates.evict(page_ids)
            self.counters[self._evicted[tier][kind]] += len(page_ids)
            self.pools[tier][kind].free(page_ids)
