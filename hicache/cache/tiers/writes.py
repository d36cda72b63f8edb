"""Which data is copied from a tier to the tier below.

A policy is called at four moments. `inserted`: a request has published a path on the device.
`copied`: a copy has reached the host. `hit`: a request starts from data of the host. `evicted`: the
data is about to leave its tier. Device data may be copied when it is inserted or evicted; host data
may be written to storage when it is copied, hit or evicted.
"""

from typing import NamedTuple

from hicache.cache.tiers.transfer import BackUp, Bookings
from hicache.cache.tree.node import HOST, Node
from hicache.cache.tree.radix_tree import RadixTree

INSERTED, COPIED, HIT, EVICTED = MOMENTS = ("inserted", "copied", "hit", "evicted")
PATHS = (("device", "host"), ("host", "storage"))  # by source


class Load(NamedTuple):
    """The state of source and target at the moment of a decision.

    `moment`: one of `MOMENTS`. `is_answer`: True if the inserted data belongs to an answer.
    """

    moment: str
    bookings: Bookings
    kind: int
    source: int
    writes: tuple[int, int] | None = None  # storage only: bytes queued, and the limit
    is_answer: bool = False

    @property
    def source_free(self) -> float:
        """Free share of the source's pool of this kind; 1 if the pool is unlimited."""
        pool = self.bookings.pools[self.source][self.kind]
        return 1.0 if pool.capacity is None else pool.num_free / max(pool.capacity, 1)

    @property
    def target_free_bytes(self) -> int:
        """Bytes that the target can take before it must evict or drop something."""
        if self.writes is not None:
            return self.writes[1] - self.writes[0]
        return self.bookings.pools[HOST][self.kind].num_free * self.bookings.page_bytes[self.kind]

    @property
    def queued_bytes(self) -> int:
        """Bytes of unfinished copies to the target."""
        if self.writes is not None:
            return self.writes[0]
        copies = [each for each in self.bookings.in_flight if isinstance(each, BackUp)]
        return sum(each.num_bytes for each in copies)


def admits(tree: RadixTree, node: Node, load: Load) -> bool:
    """True if the policy copies the node's data of `load.kind` to the tier below `load.source`."""
    entry = node.entries.get(load.kind, node)  # a run without entries shows the node
    return bool(tree.policy.admit(entry, *PATHS[load.source], load))
