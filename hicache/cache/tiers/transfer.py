"""Copies between tiers, as the cache queues them and the executor carries them out.

A copy names the kinds of data, the ids of source and target, and the locks that protect both. The
locks are released by `PrefixCache.complete`.
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
    """A copy of pages or state slots between tiers: `sources[i]` is copied to `targets[i]`.

    `kind` is the number of the kind of data, such as full-attention KV or Mamba states. `is_own` is
    True if the targets belong to one request, and not to the shared radix tree.
    """

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
    """A copy of cached data from host to device, for a request that is about to run.

    The forward pass of the request waits for the copy.
    """


@dataclass(slots=True, kw_only=True, eq=False)
class BackUp(Transfer):
    """A copy of cached data from device to host.

    If `is_fence` is True, the source pages are already free. The next step of the engine must then
    wait for the copy.
    """

    starts: dict[int, int]  # by kind: pages [start, node.end) have a new host copy
    points: list[tuple[int, Node]]  # (kind, node): states with a new host copy
    is_fence: bool


@dataclass(slots=True, kw_only=True, eq=False)
class CopyState:
    """A copy of a Mamba state from one device slot to another.

    A request that resumes from a cached state works on such a copy, because the state may be
    shared.
    """

    source: PageIds
    target: PageIds


@dataclass(slots=True, kw_only=True, eq=False)
class StorageWrite:
    """A write of cached pages from host to storage.

    `parts` holds pairs (kind of data, host page ids). `pages` lists the same pages one by one, and
    `keys[i]` is the storage key of `pages[i]`. `is_given_away` is True if the host pages are
    already free. The executor must then copy their bytes before its `submit` method returns.
    """

    keys: list[Key]
    parts: list[tuple[int, PageIds]]
    num_bytes: int
    host_locks: list[Lock] = field(default_factory=list)
    is_given_away: bool = False

    @property
    def pages(self) -> list[tuple[int, int]]:
        # (kind, host page id) of each key
        return [(kind, int(page_id)) for kind, page_ids in self.parts for page_id in page_ids]


@dataclass(slots=True, kw_only=True, eq=False)
class StorageDelete:
    # storage deletes these pages at once and reports nothing

    keys: list[Key]


Reported = LoadBack | BackUp | StorageWrite  # works whose end is reported
Work = Reported | CopyState | StorageDelete


class PrefetchFates:
    """Counts what becomes of the full-attention pages that prefetches read from storage to host.

    Each page has one of these outcomes:

    - `used`: a request loaded the page to the device.
    - `duplicate`: the host held the page already.
    - `late`: the page arrived after its request had started or was aborted.
    - `not_restorable`: the sliding window or Mamba state that the page needs was not read.
    - `evicted_unused`: the page was evicted from the host before any use.
    - `unused_at_end`: the page was still on the host when the run ended.

    `unused` holds the host pages whose outcome is still open.
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
    """Collects the copies that the cache has queued.

    `outbox` holds the work to start, in order; the engine empties the list. `in_flight` holds the
    copies that are not finished. `pools` are the page allocators. `counters` count events such as
    evicted pages.
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
