"""What is written to storage: everything while the queue is short, then only what was hit.

hicache run storage=memory cache.policy=examples.policies.writes:Bounded
"""


class Bounded:
    """Writes copies as they reach the host; `share` of the queue is open to data without a hit."""

    def __init__(self, world, *, share: float = 0.1, first_tokens: float = 4096):
        self.share, self.first_tokens = share, first_tokens

    def admit(self, entry, source, target, load):
        if target == "host":
            return None  # as cache.write_policy says
        if load.moment != "copied":
            return False
        limit = load.queued_bytes + load.target_free_bytes
        is_short = load.queued_bytes <= self.share * limit
        return is_short or entry.hits > 0 or entry.start < self.first_tokens
