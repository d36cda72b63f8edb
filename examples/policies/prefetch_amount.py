"""How much to read: what arrives, behind the reads of others, before it would be computed.

hicache run storage=memory cache.policy=examples.policies.prefetch_amount:ByLoad
"""


class ByLoad:
    """Reads as much as takes `limit` of the time to compute it, and waits for all of that."""

    def __init__(self, world, *, limit: float = 1.0):
        self.limit = limit

    def prefetch(self, request, held, restorable, load):
        if load.read_ns is None or load.compute_ns is None:
            return None
        compute_ns = restorable[-1] * load.compute_ns
        return max(0, round(self.limit * compute_ns / load.read_ns) - load.queued_tokens)

    def may_stop(self, prefetch, now_ns):
        return prefetch.is_complete
