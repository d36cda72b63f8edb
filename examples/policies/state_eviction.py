"""Eviction of Mamba states by recency and FLOPs saved per byte, as Marconi does.

hicache run model=qwen3_next_80b cache.policy=examples.policies.state_eviction:Marconi
"""


class Marconi:
    """A state is worth the tokens since the state before it; full KV and windows keep LRU."""

    def __init__(self, world, *, alpha: float = 1.0):
        self.world = world
        page_bytes = world.unit_bytes["host"]["full"]
        self.scale = alpha * 1000 * page_bytes / world.flops(0, world.page_size)

    def rank(self, entry, tier, kind):
        if kind != "mamba":
            return None
        start = entry.parent.end if entry.parent else 0
        # the pages of these tokens are needed as well
        num_bytes = entry.bytes + self.page_bytes(entry.end - start)
        return entry.used + self.scale * self.world.flops(start, entry.end) / num_bytes

    def page_bytes(self, num_tokens):
        """Return the bytes of the full KV of so many tokens."""
        return num_tokens // self.world.page_size * self.world.unit_bytes["host"]["full"]
