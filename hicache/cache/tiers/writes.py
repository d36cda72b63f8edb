"""Write policies: which data is copied from a tier to the tier below.

A policy is called at four moments. `inserted`: a request has published a path on the device.
`copied`: a copy has reached the host. `hit`: a request starts from data of the host. `evicted`: the
data is about to leave its tier. Device data may be copied when it is inserted or evicted; host data
may be written to storage when it is copied, hit or evicted.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from hicache.cache.tiers.transfer import BackUp, Bookings
from hicache.cache.tree.entry import Entry
from hicache.cache.tree.node import HOST, Node
from hicache.config import CacheConfig, StorageConfig

INSERTED, COPIED, HIT, EVICTED = MOMENTS = ("inserted", "copied", "hit", "evicted")


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


Admit = Callable[[Entry | Node, str, str, Load], bool]


class WritePolicy(Protocol):
    """Decides which data is copied to the tier below.

    `moments`: when it is called; at other moments nothing is copied.
    """

    moments: frozenset[str]

    def admit(self, entry: Entry | Node, source: str, target: str, load: Load) -> bool:
        """True to copy an entry; a built-in policy in a run without entries gets its node."""
        ...


class WriteThrough:
    """Copies to the host what is inserted; answers only with `cache.backs_up_answers`."""

    moments = frozenset({INSERTED})
    least_uses = 0

    def __init__(self, config: CacheConfig) -> None:
        self._copies_answers = config.backs_up_answers

    def admit(self, entry: Entry | Node, source: str, target: str, load: Load) -> bool:
        may_copy = self._copies_answers or not load.is_answer
        return may_copy and entry.uses >= self.least_uses


class WriteThroughSelective(WriteThrough):
    """Copies to the host what is inserted for the second time or was hit."""

    least_uses = 2


class WriteBack:
    moments = frozenset({EVICTED})

    def __init__(self, config: CacheConfig) -> None:
        pass

    def admit(self, entry: Entry | Node, source: str, target: str, load: Load) -> bool:
        return True


class WriteBackWatermark(WriteBack):
    """Write-back that also copies insertions while the free share is below the watermark."""

    moments = frozenset({INSERTED, EVICTED})

    def __init__(self, config: CacheConfig) -> None:
        self._watermark = config.write_watermark

    def admit(self, entry: Entry | Node, source: str, target: str, load: Load) -> bool:
        return load.moment == EVICTED or load.source_free < self._watermark


class OnBackUp:
    moments = frozenset({COPIED})

    def __init__(self, config: StorageConfig) -> None:
        self._least_uses = config.write_hits + 1  # insertion is a use

    def admit(self, entry: Entry | Node, source: str, target: str, load: Load) -> bool:
        return True


class Selective(OnBackUp):
    moments = frozenset({COPIED, HIT})

    def admit(self, entry: Entry | Node, source: str, target: str, load: Load) -> bool:
        return entry.uses >= self._least_uses


class OnHostEviction(OnBackUp):
    moments = frozenset({EVICTED})


COPIES: dict[str, Callable[[CacheConfig], WritePolicy]] = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
    "write_back_watermark": WriteBackWatermark,
}
WRITES: dict[str, Callable[[StorageConfig], WritePolicy]] = {
    "on_back_up": OnBackUp,
    "selective": Selective,
    "on_host_eviction": OnHostEviction,
}


class Writes:
    """One downward path: asks the user's policy first, then the built-in one.

    `own` is the method of the user's policy; where it returns None, `policy` decides. `moments`:
    when either policy is called.
    """

    def __init__(
        self,
        policy: WritePolicy,
        own: Callable[..., bool | None] | None,
        source: str,
        target: str,
    ) -> None:
        self.moments = policy.moments if own is None else frozenset(MOMENTS)
        self._policy = policy
        self._own = own
        self._tiers = (source, target)

    def admits(self, node: Node, kind: int, load: Load) -> bool:
        entry: Entry | Node = node.entries.get(kind, node)
        if self._own is not None:
            given = self._own(entry, *self._tiers, load)
            if given is not None:
                return bool(given)
        is_asked = load.moment in self._policy.moments
        return is_asked and self._policy.admit(entry, *self._tiers, load)
