"""Eviction by recency and FLOPs saved per byte, for full KV alone.

hicache run cache.policy=examples.policies.flop_aware:FlopAware cache.policy_args.alpha=2
"""


class FlopAware:
    """Later pages of a prompt cost more to compute, so they stay longer."""

    def __init__(self, world, *, alpha: float = 1.0):
        self.world = world
        page_bytes = world.unit_bytes["host"]["full"]
        # `alpha` x 1,000 uses of the cache are worth as much as the FLOPs per byte of a first page
        self.scale = alpha * 1000 * page_bytes / world.flops(0, world.page_size)

    def rank(self, entry, tier, kind):
        if kind != "full":
            return None
        return entry.used + self.scale * self.world.flops(entry.start, entry.end) / entry.bytes
