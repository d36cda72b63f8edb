"""Copies between tiers, as the cache books them and the executor carries them out.

A transfer names what moves, from which ids to which, and keeps the receipts of the locks that hold
both ends in place until `PrefixCache.complete` is told that it is done.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hicache.cache.pages import PageIds
from hicache.cache.tree.keys import Key
from hicache.cache.tree.lock import Lock
from hicache.cache.tree.node import Node
from hicache.cache.tree.page_registry import PageNumbers


class Move(NamedTuple):
    """Pages or slots of one component; `sources[i]` goes to `targets[i]`."""

    kind: int
    sources: PageIds
    targets: PageIds
    is_own: bool = False  # the targets belong to the request and not to the tree


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """A copy between device and host pools."""

    moves: list[Move]
    num_bytes: int
    node: Node  # the deepest node it concerns
    locks: list[Lock] = field(default_factory=list)
    host_locks: list[Lock] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class LoadBack(Transfer):
    """Host to device, for a request that is about to run; its forward pass waits for it."""

    num_pages: tuple[int, int, int]  # by component


@dataclass(slots=True, kw_only=True, eq=False)
class BackUp(Transfer):
    """Device to host. `is_fence`: its source is freed already, so the next step waits for it."""

    full_start: int  # pages [full_start, node.end) have a new host copy
    swa_start: int
    state_nodes: list[Node]
    is_fence: bool


@dataclass(slots=True, kw_only=True, eq=False)
class CopyState:
    """A state slot to another on the device: a request's own copy of a shared state."""

    source: PageIds
    target: PageIds


@dataclass(slots=True, kw_only=True, eq=False)
class StorageWrite:
    """Host pages to storage: `keys[i]` names the page that `pages` lists i-th.

    `parts`: the host page ids that belong together, after their component.

    `is_given_away`: the pages have been given away already, so whoever carries this out has taken
    their bytes when `submit` returns.
    """

    keys: list[Key]
    parts: list[tuple[int, PageIds]]
    num_bytes: int
    host_locks: list[Lock] = field(default_factory=list)
    is_given_away: bool = False
    numbers: list[tuple[int, PageNumbers]] = field(default_factory=list)  # as the registry has them

    @property
    def pages(self) -> list[tuple[int, int]]:
        """(component, host page id) of each, as long as `keys`."""
        return [(kind, int(page_id)) for kind, page_ids in self.parts for page_id in page_ids]


@dataclass(slots=True, kw_only=True, eq=False)
class StorageDelete:
    """Pages that storage need not keep any more; done at once and reported by nobody."""

    keys: list[Key]


Reported = LoadBack | BackUp | StorageWrite  # whose end is reported
Work = Reported | CopyState | StorageDelete


class Bookings:
    """What the cache wants carried out.

    `outbox` is to be begun, in this order, and is emptied by whoever does; `in_flight` is booked
    and not yet reported done.
    """

    def __init__(self, page_bytes: tuple[int, int, int]) -> None:
        """`page_bytes`: of one page (full, swa) or slot (mamba)."""
        self.page_bytes = page_bytes
        self.outbox: list[Work] = []
        self.in_flight: set[Reported] = set()

    def book(self, transfer: Reported) -> None:
        """A transfer whose end will be reported."""
        self.in_flight.add(transfer)
        self.outbox.append(transfer)

    def bytes_of(self, counts: Iterable[int]) -> int:
        """The bytes of this many pages (mamba: slots) of each component."""
        return sum(count * size for count, size in zip(counts, self.page_bytes, strict=True))
