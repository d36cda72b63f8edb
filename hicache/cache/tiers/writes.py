"""Decides which data is copied from a tier to the tier below.

A write policy is called at four moments. `inserted`: a request has inserted a prefix on the device.
`copied`: a copy has reached the host. `hit`: a request starts from data of the host. `evicted`: the
data is about to leave its tier. Device data may be copied when it is inserted or evicted. Host data
may be written to storage when it is copied, hit or evicted.
"""

from typing import NamedTuple

from hicache.cache.tiers.transfer import BackUp, Bookings
from hicache.cache.tree.node import HOST, Node
from hicache.cache.tree.radix_tree import RadixTree

INSERTED, COPIED, HIT, EVICTED = MOMENTS = ("inserted", "copied", "hit", "evicted")
PATHS = (("device", "host"), ("host", "storage"))  # by source


class Load(NamedTuple):
    """Holds the facts on which a write policy decides whether data is copied to the tier below.

    `moment` is "inserted", "copied", "hit" or "evicted": what happens to the data. `kind` is the
    kind of data. `source` is the tier that holds it: 0 for the device, 1 for the host. `writes` is
    given for copies to storage: the bytes that wait to be written, and their limit. `is_answer` is
    True if the data belongs to generated tokens.
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


def admits(tree: RadixTree, node: Node, load: Load) -> bool:
    """Return True if the write policy wants a node's data copied to the next slower tier.

    `load` names the kind of data and the tier that holds the data now.
    """
    # a run without entries shows the node
    entry = node if tree.entries is None else tree.entries.of(node, load.kind)
    return bool(tree.policy.admit(entry, *PATHS[load.source], load))
