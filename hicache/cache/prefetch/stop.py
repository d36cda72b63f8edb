"""When a request stops waiting for its prefetch.

A policy is any class that is built with the `prefetch` knobs, the tokens of a page and the engine's
`RateEstimator`, and has what `StopPolicy` asks for. Complete pages wait for their window and state
whatever the policy says, unless it never waits at all.
"""

from collections.abc import Callable
from functools import cache
from typing import Protocol

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.rates import RateEstimator
from hicache.clock import to_ns
from hicache.config import DeadlineFrom, PrefetchConfig


class StopPolicy(Protocol):
    """Judges the prefetches of requests that wait.

    Attributes:
        waits: whether it ever makes a request wait. If not it is not asked, and ranks do not vote.
        uses_clock: whether `may_stop` depends on `now_ns`. Clocks differ between ranks, so what a
            waiting policy says is a vote, and a request goes on when all ranks have agreed. A
            policy that uses the clock tells in `deadline_ns` when to look at it again.
    """

    waits: bool
    uses_clock: bool

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        """Whether the request may go on with what has been read so far; changes nothing."""
        ...

    def deadline_ns(self, prefetch: Prefetch) -> int | None:
        """The last moment at which the clock says wait; None if it does not (yet) say when."""
        ...


class BestEffort:
    """At once, with what is there."""

    waits = False
    uses_clock = False

    def __init__(self, config: PrefetchConfig, page_size: int, rates: RateEstimator) -> None:
        pass

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        """Always."""
        return True

    def deadline_ns(self, prefetch: Prefetch) -> None:
        """None."""


class WaitComplete:
    """When all pages are read."""

    waits = True
    uses_clock = False

    def __init__(self, config: PrefetchConfig, page_size: int, rates: RateEstimator) -> None:
        pass

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        """When all pages are read."""
        return prefetch.is_complete

    def deadline_ns(self, prefetch: Prefetch) -> None:
        """None."""


class Timeout:
    """When all pages are read, or after a base and so much per 1024 tokens asked for."""

    waits = True
    uses_clock = True

    def __init__(self, config: PrefetchConfig, page_size: int, rates: RateEstimator) -> None:
        self._page = page_size
        self._base_s = config.timeout_base_s
        self._per_ki_token_s = config.timeout_per_ki_token_s
        self._deadline_from = config.deadline_from
        self._patience_ns = cache(self._longest_ns)  # by pages asked for

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        """When all pages are read, or after the deadline."""
        if prefetch.is_complete:
            return True
        deadline = self.deadline_ns(prefetch)
        return deadline is not None and now_ns > deadline

    def deadline_ns(self, prefetch: Prefetch) -> int | None:
        """None while the clock has not started: nobody has asked about the prefetch yet."""
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
    """When reading what is still to be read would cost those who wait more than computing it.

    Reading is expected to take what it took lately, after all that is to be read first. Computing
    takes what it took lately, and keeps every other request waiting as well: it counts once for
    each. Nobody waits longer than computing would have cost, so a guess that is wrong costs no
    more than as much again. At stake are the pages behind the longest prefix that can be restored
    by now: all pages of a hybrid prefetch, unless `prefetch.commit=usable` keeps a part of it.
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
        """`patience`: seconds of waiting that a second of computing is worth if no other request
        waits for it. None means 2 for a storage of the engine's own: the GPU time saved is worth
        as much again. It means 1 for a storage that engines share, where a longer read delays
        the reads of the others."""
        self._page = page_size
        self._rates = rates
        if patience is None:
            patience = 2.0 if rates.num_engines == 1 else 1.0
        self._patience = patience

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        """When all pages are read, or those that are not are not worth waiting for."""
        if prefetch.is_complete:
            return True
        deadline = self.deadline_ns(prefetch)
        if deadline is None or now_ns > deadline:
            return True  # (none: nothing was computed yet, and the first step will tell)
        load_ns = self._rates.load_ns(prefetch)
        if prefetch.restorable is None or load_ns is None:
            return False
        worth_ns = self._worth_ns(prefetch, prefetch.usable_pages(prefetch.completed_pages))
        return worth_ns is not None and load_ns > worth_ns

    def deadline_ns(self, prefetch: Prefetch) -> int | None:
        """When it will have been waited for as long as all of it is worth."""
        worth_ns = self._worth_ns(prefetch, 0)
        return None if worth_ns is None else prefetch.enqueued_ns + round(worth_ns)

    def _worth_ns(self, prefetch: Prefetch, first_page: int) -> float | None:
        # of not having to compute the pages from `first_page` on
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
