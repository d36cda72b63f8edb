"""How long a request waits: while reading the rest is expected to end before computing it.

hicache run storage=memory cache.policy=examples.policies.stop:Slack
"""


class Slack:
    """Waits while reading takes less than `share` of computing, and at most `cap_s` seconds."""

    def __init__(self, world, *, share: float = 1.0, cap_s: float = 2.0):
        self.rates, self.page_size = world.rates, world.page_size
        self.share, self.cap_ns = share, round(cap_s * 1e9)

    def may_stop(self, prefetch, now_ns):
        if prefetch.is_complete or now_ns > self.deadline_ns(prefetch):
            return True
        done = 0 if prefetch.has_sidecars else prefetch.completed_pages
        read_ns = self.rates.load_ns(prefetch)
        compute_ns = self.rates.compute_ns((prefetch.num_pages - done) * self.page_size)
        if read_ns is None or compute_ns is None:
            return False
        return read_ns > self.share * compute_ns

    def deadline_ns(self, prefetch):
        return prefetch.enqueued_ns + self.cap_ns
