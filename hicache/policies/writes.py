"""Write policies: `cache.write_policy` copies to the host, `storage.write` to storage."""

from collections.abc import Callable
from dataclasses import dataclass

from hicache.cache.tiers.transfer import COPIED, EVICTED, HIT, INSERTED, Load, WritePolicy
from hicache.cache.tree.entry import Entry
from hicache.cache.tree.node import Node
from hicache.policies.world import World

Item = Entry | Node  # a run without entries shows nodes


@dataclass(frozen=True, slots=True)
class Writes:
    """Says what one tier gets: data that `admits` accepts, at one of the `moments`.

    At other moments, nothing is copied.
    """

    moments: frozenset[str]
    admits: Callable[[Item, Load], bool]


def _all(item: Item, load: Load) -> bool:
    return True


def _write_through(world: World, least_uses: int = 0) -> Writes:
    # generated answers only with `compat.rules.backs_up_answers`
    copies_answers = world.config.compat.rules.backs_up_answers

    def admits(item: Item, load: Load) -> bool:
        return (copies_answers or not load.is_answer) and item.uses >= least_uses

    return Writes(frozenset({INSERTED}), admits)


def _write_back_watermark(world: World) -> Writes:
    watermark = world.config.cache.write_watermark

    def admits(item: Item, load: Load) -> bool:
        return load.moment == EVICTED or load.source_free < watermark

    return Writes(frozenset({INSERTED, EVICTED}), admits)


def _selective(world: World) -> Writes:
    least_uses = world.config.storage.write_hits + 1  # insertion is a use
    return Writes(frozenset({COPIED, HIT}), lambda item, load: item.uses >= least_uses)


COPIES: dict[str, Callable[[World], Writes]] = {
    "write_through": _write_through,
    # what is inserted for the second time or was hit
    "write_through_selective": lambda world: _write_through(world, least_uses=2),
    "write_back": lambda world: Writes(frozenset({EVICTED}), _all),
    "write_back_watermark": _write_back_watermark,
}
WRITES: dict[str, Callable[[World], Writes]] = {
    "on_back_up": lambda world: Writes(frozenset({COPIED}), _all),
    "selective": _selective,
    "on_host_eviction": lambda world: Writes(frozenset({EVICTED}), _all),
}


def downward(copies: Writes, writes: Writes) -> WritePolicy:
    """Combine the write policies of two tiers: `copies` for the host, and `writes` for storage."""
    tiers = {"host": copies, "storage": writes}

    def admit(item: Item, source: str, target: str, load: Load) -> bool:
        tier = tiers[target]
        return load.moment in tier.moments and tier.admits(item, load)

    return WritePolicy(admit, {target: tier.moments for target, tier in tiers.items()})
