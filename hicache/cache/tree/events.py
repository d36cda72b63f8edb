"""Events of the cache, for a listener that records them.

A cache has at most one listener. The listener must not change what it is passed.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from enum import IntEnum
from typing import NamedTuple, Protocol

from hicache.cache.kinds import Extents
from hicache.cache.tree.keys import Key
from hicache.cache.tree.node import Node
from hicache.cache.tree.sequence import Sequence


class Purpose(IntEnum):
    none = 0
    prefill = 1
    decode = 2
    load_back = 3
    slot = 4  # a request's working states, or a checkpoint
    back_up = 5
    prefetch = 6


class Demand(NamedTuple):
    """The purpose for which room is made, and the request that needs it; None means no request."""

    purpose: Purpose = Purpose.none
    request_id: int | None = None


NO_DEMAND = Demand()


class CacheListener(Protocol):
    """Receives the events of one cache. Page intervals are half-open."""

    def at(self, now_ns: int) -> None: ...

    def put(self, node: Node, tier: int, kind: int) -> None: ...

    def evicted(self, node: Node, tier: int, kind: int, demand: Demand) -> None:
        """The node has lost its data of this kind on this tier; `demand` needed the space."""
        ...

    def not_copied(self, node: Node, kind: int) -> None: ...

    def published(self, sequence: Sequence, first: int, end: int) -> None: ...

    def abandoned(self, sequence: Sequence, first: int, end: int) -> None: ...

    def found(self, sequence: Sequence, start: int, restorable: Items[int], needs: Extents) -> None:
        """Storage has reported what it can restore of the sequence after page `start`.

        `restorable`: prefix lengths in pages, ascending, at least one. `needs`: the last pages of
        each kind that a prefix includes.
        """
        ...

    def write_queued(self, keys: Iterable[Key]) -> None: ...

    def write_dropped(self, keys: Iterable[Key]) -> None: ...

    def write_ended(self, keys: Iterable[Key]) -> None: ...

    def taken_out(self, keys: Iterable[Key]) -> None:
        """An exclusive storage has dropped these keys after they were read."""
        ...
