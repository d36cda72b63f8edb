"""Stop policies: when a request stops waiting for its prefetch.

A policy is a class with the attributes of `StopPolicy`. Its constructor takes the `prefetch` knobs,
the tokens per page and the engine's `RateEstimator`. Complete pages always wait for their window
and state, unless the policy never waits.
"""

from collections.abc import Callable
from functools import cache
from typing import Protocol

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.rates import RateEstimator
from hicache.clock import to_ns
from hicache.config import DeadlineFrom, PrefetchConfig


class StopPolicy(Protocol):
    """Decides when waiting requests may run without the rest of their prefetch.

    Attributes:
        waits: True if a request may have to wait. If False, the policy is not called and ranks do
            not vote.
        uses_clock: True if `may_stop` depends on `now_ns`. Clocks differ between ranks, so each
            rank's answer is a vote, and a request stops waiting when all ranks agree. A policy that
            uses the clock returns in `deadline_ns` when its answer changes.
    """

    waits: bool
    uses_clock: bool

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        """True if the request may run with the pages read so far; must change nothing."""
        ...

    def deadline_ns(self, prefetch: Prefetch) -> int | None:
        """Last time (ns) at which the request still waits; None if there is no deadline (yet)."""
        ...


class BestEffort:
    """Never waits: the request runs with the pages that are read."""

    waits = False
    uses_clock = False

    def __init__(self, config: PrefetchConfig, page_size: int, rates: RateEstimator) -> None:
        pass

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        return True

    def deadline_ns(self, prefetch: Prefetch) -> None: ...


class WaitComplete:
    waits = True
    uses_clock = False

    def __init__(self, config: PrefetchConfig, page_size: int, rates: RateEstimator) -> None:
        pass

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        return prefetch.is_complete

    def deadline_ns(self, prefetch: Prefetch) -> None: ...


class Timeout:
    """Waits until all pages are read, or for a base time plus a time per 1024 requested tokens."""

    waits = True
    uses_clock = True

    def __init__(self, config: PrefetchConfig, page_size: int, rates: RateEstimator) -> None:
        self._page = page_size
        self._base_s = config.timeout_base_s
        self._per_ki_token_s = config.timeout_per_ki_token_s
        self._deadline_from = config.deadline_from
        self._patience_ns = cache(self._longest_ns)  # by pages asked for

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        if prefetch.is_complete:
            return True
        deadline = self.deadline_ns(prefetch)
        return deadline is not None and now_ns > deadline

    def deadline_ns(self, prefetch: Prefetch) -> int | None:
        start = prefetch.enqueued_ns
        if self._deadline_from is DeadlineFrom.first_poll:
            if prefetch.first_poll_ns is None:
                return None
            start = prefetch.first_poll_ns
        return start + self._patience_ns(prefetch.asked_pages)

    def _longest_ns(self, asked_pages: int) -> int:
        tokens = asked_pages * self._page
        return to_ns(self._base_s + tokens / 1024 * self._per_ki_token_s)


class Marginal:
    """Waits while reading the missing pages costs the waiting requests less than computing them.

    The expected read time comes from recent reads, after all earlier prefetches. The expected
    compute time comes from recent steps; it counts once per waiting request, because computing
    delays each of them. No request waits longer than computing would have cost, so a wrong estimate
    at most doubles the cost. The comparison covers the pages after the longest restorable prefix so
    far: all pages of a hybrid prefetch, unless `prefetch.commit=usable` keeps a part of it.
    """

    waits = True
    uses_clock = True

    def __init__(
        self,
        config: PrefetchConfig,
        page_size: int,
        rates: RateEstimator,
        *,
        patience: float | None = None,
    ) -> None:
        """`patience`: seconds of waiting per second of computing, if no other request waits.

        None means 2 if the engine has its own storage, because the saved GPU time is worth as much
        again. It means 1 if engines share the storage, because a longer read delays the reads of
        the other engines.
        """
        self._page = page_size
        self._rates = rates
        if patience is None:
            patience = 2.0 if rates.num_engines == 1 else 1.0
        self._patience = patience

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        if prefetch.is_complete:
            return True
        deadline = self.deadline_ns(prefetch)
        if deadline is None or now_ns > deadline:
            return True  # without a deadline, no step was measured yet: the first step must run
        load_ns = self._rates.load_ns(prefetch)
        if prefetch.restorable is None or load_ns is None:
            return False
        worth_ns = self._worth_ns(prefetch, prefetch.usable_pages(prefetch.completed_pages))
        return worth_ns is not None and load_ns > worth_ns

    def deadline_ns(self, prefetch: Prefetch) -> int | None:
        """Time (ns) at which waiting has cost as much as recomputing the whole prefetch."""
        worth_ns = self._worth_ns(prefetch, 0)
        return None if worth_ns is None else prefetch.enqueued_ns + round(worth_ns)

    def _worth_ns(self, prefetch: Prefetch, first_page: int) -> float | None:
        # value (ns) of not computing the pages from `first_page` on
        compute_ns = self._rates.compute_ns((prefetch.num_pages - first_page) * self._page)
        if compute_ns is None:
            return None
        return self._patience * compute_ns * max(self._rates.num_waiting, 1)


POLICIES: dict[str, Callable[[PrefetchConfig, int, RateEstimator], StopPolicy]] = {
    "best_effort": BestEffort,
    "wait_complete": WaitComplete,
    "timeout": Timeout,
    "marginal": Marginal,
}
