"""Copies between tiers, as the cache queues them and the executor carries them out.

A copy names the kinds of data, the ids of source and target, and the locks that protect both. The
locks are released by `PrefixCache.complete`. A write policy decides what is copied to the tier
below: device data may be copied when it is inserted or evicted, host data when it is copied, hit or
evicted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hicache.cache.kinds import FULL, Kinds
from hicache.cache.pages import FreePages, PageIds, Pools
from hicache.cache.tree.entry import Entry
from hicache.cache.tree.keys import Key
from hicache.cache.tree.node import HOST, TIER_NAMES, Lock, Node
from hicache.cache.tree.radix_tree import RadixTree

INSERTED, COPIED, HIT, EVICTED = MOMENTS = ("inserted", "copied", "hit", "evicted")
PATHS = (("device", "host"), ("host", "storage"))  # by source
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

    The forward pass of the request waits for the copy. `own` lists windows and states, as (kind,
    first page, ids), that the request owns, and not the radix tree. `starts` is the first page that
    the copy brings, by kind.
    """

    starts: dict[int, int] = field(default_factory=dict)
    own: list[tuple[int, int, PageIds]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class BackUp(Transfer):
    """A copy of cached data from device to host.

    If `is_fence` is True, the source pages are already free. The next step of the engine must then
    wait for the copy. The work `then` begins when the copy has ended.
    """

    # by kind: pages [start, node.end) have a new host copy
    starts: dict[int, int] = field(default_factory=dict)
    # (kind, node): states with a new host copy
    points: list[tuple[int, Node]] = field(default_factory=list)
    is_fence: bool
    then: "StorageWrite | None" = None

    @property
    def first_page(self) -> int:
        return min([*self.starts.values(), *[node.start for _, node in self.points]])


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

    def publish(self, page_ids: set[int]) -> None:
        self._counters["prefetch/read_pages"] += len(page_ids)
        self.unused |= page_ids

    def close(self, page_ids: Iterable[int], fate: str) -> None:
        if self.unused:
            closed = self.unused.intersection(page_ids)
            self.unused -= closed
            self._counters[f"prefetch/{fate}_pages"] += len(closed)

    def fates_now(self) -> Counter[str]:
        return Counter({"prefetch/unused_at_end_pages": len(self.unused)})


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
            if tier == HOST and kind == FULL:
                self.fates.close(page_ids, "evicted_unused")
            self.counters[self._evicted[tier][kind]] += len(page_ids)
            self.pools[tier][kind].free(page_ids)


class Load(NamedTuple):
    """Holds the facts on which a write policy decides whether data is copied to the tier below.

    `moment` is "inserted", "copied", "hit" or "evicted": what happens to the data. `kind` is the
    kind of data. `source` is the tier that holds it: 0 for the device, 1 for the host. `writes` is
    given for copies to storage: the bytes that wait to be written, and their limit. `is_answer` is
    known at the moment "inserted" only: it is True if the pages that were just inserted hold
    generated tokens. If the policy refuses them, it is asked about the nodes before them with the
    same value.
    """

    moment: str
    bookings: Bookings
    kind: int
    source: int
    writes: tuple[int, int] | None = None  # storage only: bytes queued, and the limit
    is_answer: bool = False

    @property
    def source_free(self) -> float:
        """Return the free share of the page pool from which data would be copied, from 0 to 1.

        The share of an unlimited pool is 1.
        """
        pool = self.bookings.pools[self.source][self.kind]
        return 1.0 if pool.capacity is None else pool.num_free / max(pool.capacity, 1)

    @property
    def target_free_bytes(self) -> int:
        """Return how many bytes the target tier can take without evicting or dropping data."""
        if self.writes is not None:
            return self.writes[1] - self.writes[0]
        return self.bookings.pools[HOST][self.kind].num_free * self.bookings.page_bytes[self.kind]

    @property
    def queued_bytes(self) -> int:
        """Return the bytes of all unfinished copies to the target tier."""
        if self.writes is not None:
            return self.writes[0]
        copies = [each for each in self.bookings.in_flight if isinstance(each, BackUp)]
        return sum(each.num_bytes for each in copies)


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """Decides which data is copied from the device to the host, and from the host to storage.

    Attributes:
        admit: (entry, source, target, load): True to copy the entry's data from `source` to
            `target`: from "device" to "host", or from "host" to "storage". In a run without
            entries, it gets a node of the radix tree. Example: `return entry.uses >= 2`.
        moments: by target, the values of `load.moment` at which the cache asks.
    """

    admit: Callable[[Entry | Node, str, str, Load], bool]
    moments: Mapping[str, frozenset[str]]

    @property
    def demotes(self) -> bool:
        """Return whether the device asks about data that it is about to evict."""
        return EVICTED in self.moments["host"]

    def admits(self, tree: RadixTree, node: Node, load: Load) -> bool:
        """Return True if the policy wants a node's data copied to the next slower tier.

        `load` names the kind of data and the tier that holds the data now.
        """
        entry = node if tree.entries is None else tree.entries.of(node, load.kind)
        return bool(self.admit(entry, *PATHS[load.source], load))
