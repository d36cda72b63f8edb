"""Events of the cache, for a listener that records them.

A cache has at most one listener. The listener must not change what it is passed.
"""

from collections.abc import Sequence as Items
from enum import IntEnum
from typing import NamedTuple, Protocol

from hicache.cache.kinds import Extents
from hicache.cache.tree.node import Node
from hicache.cache.tree.sequence import Sequence

Data = Items[tuple[Node, int]]  # pairs (node, kind of data)


class Purpose(IntEnum):
    none = 0
    prefill = 1
    decode = 2
    load_back = 3
    slot = 4  # a request's working states, or a checkpoint
    back_up = 5
    prefetch = 6
    outage = 7


class Demand(NamedTuple):
    """States why data is evicted: the purpose that needs the space, and the request.

    `request_id` is None if no request needs the space.
    """

    purpose: Purpose = Purpose.none
    request_id: int | None = None


NO_DEMAND = Demand()


class CacheListener(Protocol):
    """Interface of an object that is told about the events of one KV cache, such as evictions.

    Page ranges include `first` and exclude `end`.
    """

    def at(self, now_ns: int) -> None: ...

    def put(self, node: Node, tier: int, kind: int) -> None: ...

    def evicted(self, node: Node, tier: int, kind: int, demand: Demand) -> None:
        """Called when a radix-tree node has lost its data of one kind on one tier.

        `demand` says what the freed space is for.
        """

    def not_copied(self, node: Node, kind: int) -> None: ...

    def published(self, sequence: Sequence, first: int, end: int) -> None: ...

    def abandoned(self, sequence: Sequence, first: int, end: int) -> None: ...

    def found(self, sequence: Sequence, start: int, restorable: Items[int], needs: Extents) -> None:
        """Called when storage has answered which further pages of a prompt it can restore.

        `restorable` holds the possible numbers of pages after page `start`, ascending; there is at
        least one. `needs` lists, by kind of data, the window pages or state at the end of a
        restorable prefix.
        """

    def write_queued(self, write: object, items: Data) -> None:
        """Called when a write of `items` to storage was queued. `write` identifies it."""

    def write_dropped(self, items: Data) -> None: ...

    def write_ended(self, write: object) -> None: ...

    def taken_out(self, items: Data) -> None:
        """Called when storage has deleted data because it was read to the host."""
