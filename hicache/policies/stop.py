"""Stop policies: when a request stops waiting for its prefetch from storage.

Even when all pages are read, the request waits for their window and state, unless the policy never
waits.
"""

from collections.abc import Callable
from functools import cache

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.prefetcher import ReadPolicy
from hicache.clock import to_ns
from hicache.policies.world import World
from hicache.rules import DeadlineFrom


def best_effort(world: World) -> ReadPolicy:
    """Return a policy by which no request waits: each runs with the pages read so far."""
    return ReadPolicy(lambda prefetch, now_ns: True, waits=False)


def wait_complete(world: World) -> ReadPolicy:
    return ReadPolicy(lambda prefetch, now_ns: prefetch.is_complete)


def timeout(world: World) -> ReadPolicy:
    rule = Timeout(world)
    return ReadPolicy(rule.may_stop, deadline_ns=rule.deadline_ns)


def marginal(world: World) -> ReadPolicy:
    rule = Marginal(world)
    return ReadPolicy(rule.may_stop, deadline_ns=rule.deadline_ns)


class Timeout:
    """Lets a request wait until its prefetch from storage is complete or a time limit ends.

    The limit is a base time plus a time per 1,024 tokens of the prefetch.
    """

    def __init__(self, world: World) -> None:
        config = world.config.prefetch
        self._page = world.page_size
        self._base_s = config.timeout_base_s
        self._per_ki_token_s = config.timeout_per_ki_token_s
        self._deadline_from = world.config.compat.rules.deadline_from
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
    """Lets a request wait for its prefetch from storage while reading costs less than computing.

    The costs are the expected times to read and to compute the missing pages, from recent rates.
    The time to compute counts once per waiting request, because computing delays all of them. A
    request stops waiting when the wait has cost as much as computing the whole prefetch.
    """

    def __init__(self, world: World) -> None:
        self._page = world.page_size
        self._rates = world.rates
        # seconds of waiting for a second of computing while no other request waits. With its own
        # storage, the saved GPU time is worth as much again; with shared storage, a longer read
        # delays the reads of the other engines
        self._patience = 2.0 if world.rates.num_engines == 1 else 1.0

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
        """Return the time in nanoseconds at which a request should stop waiting for its prefetch.

        Waiting has then cost as much as computing the whole prefetch. Return None before the first
        compute rate was measured.
        """
        worth_ns = self._worth_ns(prefetch, 0)
        return None if worth_ns is None else prefetch.enqueued_ns + round(worth_ns)

    def _worth_ns(self, prefetch: Prefetch, first_page: int) -> float | None:
        # value (ns) of not computing the pages from `first_page` on: those after the longest
        # restorable prefix so far, so all of a hybrid prefetch without `prefetch.commit=usable`
        compute_ns = self._rates.compute_ns((prefetch.num_pages - first_page) * self._page)
        if compute_ns is None:
            return None
        return self._patience * compute_ns * max(self._rates.num_waiting, 1)


STOPS: dict[str, Callable[[World], ReadPolicy]] = {
    "best_effort": best_effort,
    "wait_complete": wait_complete,
    "timeout": timeout,
    "marginal": marginal,
}
