"""Estimates how long a prefetch will take and how much computing it saves, from recent rates."""

from typing import NamedTuple

from hicache.cache.prefetch.prefetch import Phase, Prefetch

# some dozens of reads and some dozens of full steps, enough for a steady rate; chosen, not tuned
PAGES_REMEMBERED = 4_096
TOKENS_REMEMBERED = 262_144


class RecentRate:
    """Measures the mean time in nanoseconds per unit of recent work, such as one page.

    The mean covers about the last `num_remembered` units. Older units count less.
    """

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._units = 0.0
        self._ns = 0.0

    def add(self, units: int, ns: int) -> None:
        # each `num_remembered / 2` units halve older weights
        kept = 0.25 ** (units / self._num_remembered)
        self._units = kept * self._units + units
        self._ns = kept * self._ns + ns

    @property
    def ns(self) -> float | None:
        return self._ns / self._units if self._units else None


class ReadLoad(NamedTuple):
    """The load of an engine at the time when a policy decides how much to read from storage.

    `queued_tokens` counts the tokens that other requests have yet to read from storage.
    `num_waiting` counts the requests in the queue. `read_ns` and `compute_ns` are the nanoseconds
    to read and to compute one token. They are None before the first measurement.
    """

    queued_tokens: int
    num_waiting: int
    read_ns: float | None  # per token
    compute_ns: float | None  # per token


class RateEstimator:
    """Measures how fast an engine reads pages from storage and computes prompts.

    Attributes:
        num_waiting: number of requests in the queue.
        num_engines: number of engines that read from the same storage, including this one.
        active: the unfinished reads from storage, by request id.
    """

    def __init__(self, num_engines: int = 1) -> None:
        self.num_engines = num_engines
        self.active: dict[int, Prefetch] = {}
        self._reading = RecentRate(PAGES_REMEMBERED)
        self._computing = RecentRate(TOKENS_REMEMBERED)
        self._read_until_ns = 0
        self.num_waiting = 0

    def was_read(self, prefetch: Prefetch) -> None:
        """Record how long a finished read from storage took.

        If several engines share the storage, the time spent waiting for reads of other engines is
        included. Time before the end of this engine's previous read is excluded.
        """
        if prefetch.read_ns is None or not prefetch.completed_pages:
            return
        began_ns, ended_ns = prefetch.read_ns
        if self.num_engines > 1 and prefetch.answered_ns is not None:
            began_ns = prefetch.answered_ns  # includes the wait for reads of other engines
        began_ns = max(began_ns, self._read_until_ns)  # parallel readers share the time
        self._read_until_ns = max(ended_ns, self._read_until_ns)
        self._reading.add(prefetch.completed_pages, max(ended_ns - began_ns, 0))

    def was_computed(self, num_tokens: int, ns: int) -> None:
        self._computing.add(num_tokens, ns)

    def load_ns(self, prefetch: Prefetch) -> float | None:
        """Return the expected time in nanoseconds until all pages of a prefetch are read.

        Prefetches that started earlier are read first, and their time is included. Return None
        before the first read was measured.
        """
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

    def read_load(self, page_size: int) -> ReadLoad:
        reading = [each for each in self.active.values() if each.phase is Phase.reading]
        page_ns = self._reading.ns
        return ReadLoad(
            queued_tokens=page_size * sum(p.num_pages - p.completed_pages for p in reading),
            num_waiting=self.num_waiting,
            read_ns=None if page_ns is None else page_ns / page_size,
            compute_ns=self.compute_ns(1),
        )

    def compute_ns(self, num_tokens: int) -> float | None:
        token_ns = self._computing.ns
        return None if token_ns is None else num_tokens * token_ns
