"""The cache under a policy, on a stream of single pages."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.sequence import Sequence
from tests.cache.small import PAGE, make_cache, tokens_of
from tests.policies.streams import CAPACITY


def misses_of(stream: Items[int], capacity: int, policy: Any) -> int:
    """Misses of a device with so many pages, each of which is a whole prompt."""
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


def counted(
    stream: list[int],
    hit: Callable[[int], None],
    make_room: Callable[[], int],
    insert: Callable[[int], None],
) -> int:
    """Misses of a cache whose pages are kept here."""
    held: set[int] = set()
    misses = 0
    for page in stream:
        if page in held:
            hit(page)
            continue
        misses += 1
        if len(held) == CAPACITY:
            held.remove(make_room())
        held.add(page)
        insert(page)
    return misses
