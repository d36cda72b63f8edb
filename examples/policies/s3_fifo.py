"""Eviction by three queues (S3-FIFO): new data must be hit before it enters the main queue.

hicache run cache.policy=examples.policies.s3_fifo:S3Fifo
"""

from collections import OrderedDict, defaultdict


class S3Fifo:
    """Chooses the victims of full KV. What may not be evicted goes round as if it had been hit."""

    def __init__(self, world, *, small: float = 0.1):
        self.world, self.share = world, small
        self.small, self.main, self.ghost = (defaultdict(OrderedDict) for _ in range(3))
        self.hit = set()

    def on_insert(self, entry, tier):
        if entry.kind == "full":
            known = self.ghost[tier].pop(entry.key, False)
            (self.main if known else self.small)[tier][entry] = None

    def on_hit(self, entry, request):
        self.hit.add(entry)

    def on_split(self, entry, first):
        for queues in (self.small, self.main):
            for tier in entry.tiers:
                if entry in queues[tier]:
                    queues[tier][first] = None

    def on_evict(self, entry, tier, why):
        if entry.kind == "full" and self.small[tier].pop(entry, entry) is None:
            self.ghost[tier][entry.key] = True
            while len(self.ghost[tier]) > len(self.main[tier]) + 100:
                self.ghost[tier].popitem(last=False)
        self.main[tier].pop(entry, None)
        if not entry.tiers:
            self.hit.discard(entry)

    def victim(self, tier, kind, need, queue):
        small, main = self.small[tier], self.main[tier]
        for _ in range(2 * (len(small) + len(main)) if kind == "full" else 0):
            is_small = len(small) > self.share * (len(small) + len(main))
            entry = next(iter(small if is_small else main))
            if entry in queue and entry not in self.hit:
                return entry
            self.hit.discard(entry)
            (small if is_small else main).pop(entry)
            main[entry] = None
        return None
