"""Stop policies: when a request stops waiting for its prefetch.

Complete pages always wait for their window and state, unless the policy never waits.
"""

from collections.abc import Callable
from functools import cache

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.clock import to_ns
from hicache.config import DeadlineFrom
from hicache.policies.world import World


class BestEffort:
    """Never waits: the request runs with the pages that are read."""

    waits = False  # it is not called, and ranks do not vote

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        return True


class WaitComplete:
    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        return prefetch.is_complete


class Timeout:
    """Waits until all pages are read, or for a base time plus a time per 1024 requested tokens."""

    def __init__(self, world: World) -> None:
        config = world.config.prefetch
        self._page = world.page_size
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

    def __init__(self, world: World) -> None:
        self._page = world.page_size
        self._rates = world.rates
        patience = world.config.prefetch.patience
        if patience is None:
            # its own storage: the saved GPU time is worth as much again; shared storage: a longer
            # read delays the reads of the other engines
            patience = 2.0 if world.rates.num_engines == 1 else 1.0
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


STOPS: dict[str, Callable[..., object]] = {
    "best_effort": BestEffort,
    "wait_complete": WaitComplete,
    "timeout": Timeout,
    "marginal": Marginal,
}
