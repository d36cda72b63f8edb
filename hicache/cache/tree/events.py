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

    def write_queued(self, keys: Iterable[Key]) -> None: ...

    def write_dropped(self, keys: Iterable[Key]) -> None: ...

    def write_ended(self, keys: Iterable[Key]) -> None: ...

    def taken_out(self, keys: Iterable[Key]) -> None:
        """Called when storage has deleted pages because they were read to the host.

        `keys` are the storage keys of these pages.
        """
