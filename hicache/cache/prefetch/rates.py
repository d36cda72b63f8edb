"""What a prefetch that is under way will take, and what it will save, going by what was seen."""

from hicache.cache.prefetch.prefetch import Phase, Prefetch

# some dozens of reads, some dozens of full steps: long enough to be steady; chosen, and not tuned
PAGES_REMEMBERED = 4_096
TOKENS_REMEMBERED = 262_144


class RecentRate:
    """Nanoseconds a unit, over about the last `num_remembered` units."""

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._units = 0.0
        self._ns = 0.0

    def add(self, units: int, ns: int) -> None:
        """So many units took so long. What came before fades: by half for every half of memory."""
        kept = 0.25 ** (units / self._num_remembered)
        self._units = kept * self._units + units
        self._ns = kept * self._ns + ns

    @property
    def ns(self) -> float | None:
        """Nanoseconds a unit; None if nothing has been seen yet."""
        return self._ns / self._units if self._units else None


class RateEstimator:
    """Measures how fast pages come and prompts are computed, for whoever must choose between them.

    An engine measures for itself: reads of other engines from the same storage make its own slower.

    Attributes:
        num_waiting: requests in the queue as of the last plan.
        num_engines: engines that read from the same storage, this one included.
    """

    def __init__(self, active: dict[int, Prefetch] | None = None, num_engines: int = 1) -> None:
        """`active`: the prefetches of requests that wait, in the order in which they began."""
        self.num_engines = num_engines
        self.active = {} if active is None else active
        self._reading = RecentRate(PAGES_REMEMBERED)
        self._computing = RecentRate(TOKENS_REMEMBERED)
        self._read_until_ns = 0
        self.num_waiting = 0

    def was_read(self, prefetch: Prefetch) -> None:
        """A reader has let go.

        A read lasts from the storage's answer, or from the end of the read before it: waiting for
        other engines' reads counts.
        """
        if prefetch.read_ns is None or not prefetch.completed_pages:
            return
        began_ns, ended_ns = prefetch.read_ns
        if self.num_engines > 1 and prefetch.answered_ns is not None:
            began_ns = prefetch.answered_ns
        began_ns = max(began_ns, self._read_until_ns)  # readers side by side share their time
        self._read_until_ns = max(ended_ns, self._read_until_ns)
        self._reading.add(prefetch.completed_pages, max(ended_ns - began_ns, 0))

    def was_computed(self, num_tokens: int, ns: int) -> None:
        """A step that extended prompts by so many tokens has ended."""
        self._computing.add(num_tokens, ns)

    def load_ns(self, prefetch: Prefetch) -> float | None:
        """How long until all its pages are read, those of earlier prefetches first."""
        page_ns = self._reading.ns
        if page_ns is None:
            return None
        num_pages = prefetch.num_pages - prefetch.completed_pages
        for other in self.active.values():
            if prefetch == other:
                break
            if other.phase is Phase.reading:
                num_pages += other.num_pages - other.completed_pages
        return num_pages * page_ns

    @property
    def page_ns(self) -> float | None:
        """Nanoseconds to read a page, as measured; None if nothing has been read yet."""
        return self._reading.ns

    def compute_ns(self, num_tokens: int) -> float | None:
        """How long it takes to compute so many tokens of a prompt, once it is their turn."""
        token_ns = self._computing.ns
        return None if token_ns is None else num_tokens * token_ns
