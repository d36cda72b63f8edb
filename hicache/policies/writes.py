"""Write policies: `cache.write_policy` copies to the host, `storage.write` to storage.

`moments` names the moments at which a policy is called; at others, the policy copies nothing. In a
run without entries, a policy gets a node.
"""

from collections.abc import Callable
from typing import Any

from hicache.cache.tiers.transfer import COPIED, EVICTED, HIT, INSERTED, Load
from hicache.cache.tree.entry import Entry
from hicache.policies.world import World


class WriteThrough:
    """Copies data to the host as soon as it is inserted on the device.

    Generated answers are copied only if the setting `cache.backs_up_answers` is on.
    """

    moments = frozenset({INSERTED})
    least_uses = 0

    def __init__(self, world: World) -> None:
        self._copies_answers = world.config.cache.backs_up_answers

    def admit(self, entry: Entry, source: str, target: str, load: Load) -> bool:
        may_copy = self._copies_answers or not load.is_answer
        return may_copy and entry.uses >= self.least_uses


class WriteThroughSelective(WriteThrough):
    # copies what is inserted for the second time or was hit

    least_uses = 2


class WriteBack:
    moments = frozenset({EVICTED})

    def admit(self, entry: Entry, source: str, target: str, load: Load) -> bool:
        return True


class WriteBackWatermark(WriteBack):
    """Copies data to the host before the data is evicted, and earlier if the device is nearly full.

    New data is copied at once if the free share of its device pool is below
    `cache.write_watermark`.
    """

    moments = frozenset({INSERTED, EVICTED})

    def __init__(self, world: World) -> None:
        self._watermark = world.config.cache.write_watermark

    def admit(self, entry: Entry, source: str, target: str, load: Load) -> bool:
        return load.moment == EVICTED or load.source_free < self._watermark


class OnBackUp:
    moments = frozenset({COPIED})

    def admit(self, entry: Entry, source: str, target: str, load: Load) -> bool:
        return True


class Selective:
    moments = frozenset({COPIED, HIT})

    def __init__(self, world: World) -> None:
        self._least_uses = world.config.storage.write_hits + 1  # insertion is a use

    def admit(self, entry: Entry, source: str, target: str, load: Load) -> bool:
        return entry.uses >= self._least_uses


class OnHostEviction(OnBackUp):
    moments = frozenset({EVICTED})


COPIES: dict[str, Callable[..., Any]] = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
    "write_back_watermark": WriteBackWatermark,
}
WRITES: dict[str, Callable[..., Any]] = {
    "on_back_up": OnBackUp,
    "selective": Selective,
    "on_host_eviction": OnHostEviction,
}


class Downward:
    """Combines the write policies of two tiers: `copies` for the host, and `writes` for storage."""

    def __init__(self, copies: Any, writes: Any) -> None:
        self._policies = {"host": copies, "storage": writes}
        self.moments = {target: policy.moments for target, policy in self._policies.items()}
        self.demotes = EVICTED in copies.moments

    def admit(self, entry: Entry, source: str, target: str, load: Load) -> bool:
        policy = self._policies[target]
        return load.moment in policy.moments and policy.admit(entry, source, target, load)
