"""Policies as a user would write them, named in scenarios as module:Class."""

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefetch.rates import RateEstimator
from hicache.config import PrefetchConfig


class FirstQuarter:
    """Goes on with a quarter of what was asked for: it looks at every page that comes."""

    waits = True
    uses_clock = False

    def __init__(self, config: PrefetchConfig, page_size: int, rates: RateEstimator) -> None:
        pass

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        return prefetch.completed_pages >= prefetch.asked_pages / 4 or prefetch.is_complete

    def deadline_ns(self, prefetch: Prefetch) -> None:
        return None


class UntilPagesCome:
    """Lets a request go while nothing has come, and keeps it once something has."""

    waits = True
    uses_clock = False

    def __init__(self, config: PrefetchConfig, page_size: int, rates: RateEstimator) -> None:
        pass

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        return prefetch.restorable is not None and prefetch.completed_pages == 0

    def deadline_ns(self, prefetch: Prefetch) -> None:
        return None
