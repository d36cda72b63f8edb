"""Eviction by FLOPs saved per byte and use, with a clock that ages what is not used (GDSF).

hicache run cache.policy=examples.policies.gdsf:Gdsf
"""


class Gdsf:
    """Ranks every kind on both tiers; `entry.state` holds an entry's value on each tier."""

    def __init__(self, world):
        self.world = world
        self.clock = {"device": 0.0, "host": 0.0}

    def value(self, entry, tier):
        """Return what the entry is worth there from now on."""
        start = entry.start
        if entry.kind == "mamba":  # a state saves all that follows the one before it
            start = entry.parent.end if entry.parent else 0
        saved = self.world.flops(start, entry.end) / entry.bytes
        return self.clock[tier] + (1 + entry.hits) * saved

    def on_insert(self, entry, tier):
        entry.state = {**(entry.state or {}), tier: self.value(entry, tier)}

    def on_hit(self, entry, request):
        entry.state = {tier: self.value(entry, tier) for tier in entry.tiers}

    def on_split(self, entry, first):
        first.state = dict(entry.state)

    def on_evict(self, entry, tier, why):
        self.clock[tier] = max(self.clock[tier], entry.state.pop(tier))

    def rank(self, entry, tier, kind):
        return entry.state[tier], entry.used
