"""Runs a cache with a policy on a stream of accesses to single pages."""

from collections.abc import Sequence as Items
from types import SimpleNamespace
from typing import Any

from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.entry import Entry
from hicache.cache.tree.sequence import Sequence
from tests.cache.small import PAGE, make_cache, tokens_of
from tests.policies.streams import CAPACITY

WORLD = SimpleNamespace(
    capacity={"device": {"full": CAPACITY}, "host": {"full": 0}},
    seed=0,
    page_size=PAGE,
    flops=lambda start, end: float(end - start),
    unit_bytes={"device": {"full": 1}},
)


class Victims:
    """A policy that also records the evicted pages, in order."""

    def __init__(self, policy: Any) -> None:
        self.page = 0  # read now
        self.evicted: list[int] = []
        self._policy = policy
        self._pages: dict[Entry, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def on_insert(self, entry: Entry, tier: str) -> None:
        self._pages[entry] = self.page
        getattr(self._policy, "on_insert", lambda *_: None)(entry, tier)

    def on_evict(self, entry: Entry, tier: str, why: str) -> None:
        self.evicted.append(self._pages.pop(entry))
        getattr(self._policy, "on_evict", lambda *_: None)(entry, tier, why)


def victims_of(stream: Items[int], capacity: int, policy: Any) -> list[int]:
    """The pages that a policy evicts from a device of `capacity` pages, in order."""
    victims = Victims(policy)
    cache = make_cache(device=(capacity, 0, 0), policy=victims)
    for victims.page in stream:
        access(cache, victims.page)
    return victims.evicted


def misses_of(stream: Items[int], capacity: int, policy: Any) -> int:
    """The number of misses on a device of `capacity` pages; each access is a one-page prompt."""
    cache = make_cache(device=(capacity, 0, 0), policy=policy)
    return sum(not access(cache, page) for page in stream)


def access(cache: PrefixCache, page: int) -> bool:
    """Read one page, or compute it; True if it was there."""
    sequence = Sequence(tokens_of(PAGE, page * PAGE))
    found = cache.acquire(sequence, cache.match(sequence, PAGE + 1))
    assert found is not None
    assert cache.extend(sequence, PAGE)
    cache.finish(sequence, 1)
    return found.cached_len > 0
