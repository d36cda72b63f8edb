"""A policy for configurations that differ by chance alone."""

from hicache.policies.eviction import Random
from hicache.policies.world import World


class Drawn(Random):
    """Evicts in random order; each `draw` gives another order of the same seed."""

    def __init__(self, world: World, draw: float) -> None:
        self._seed = world.seed + (round(draw) << 32)
