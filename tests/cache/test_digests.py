"""Digests: of trees, which ranks compare, and of pages, which storage is asked for."""

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.node import DEVICE
from hicache.cache.tree.sequence import Sequence
from hicache.config import PrefetchConfig
from hicache.engine.ranks.agreement import (
    RankAgreement,
    RanksDivergedError,
    minimum_of,
    tree_digest,
)
from tests.cache.small import (
    PAGE,
    make_cache,
    node_at,
    prefetcher_of,
    tokens_of,
)

ROOMY = (99, 99, 99)


def cache_of(first: int = 0, namespace: str = "", num_tokens: int = 16) -> PrefixCache:
    cache = make_cache(device=ROOMY)
    cache.serve(num_tokens, first, namespace=namespace)
    return cache


def changed(how: str) -> PrefixCache:
    cache = cache_of()
    node = cache.node_at(4)
    if how == "hits":
        node.uses += 1
    elif how == "locks":
        cache.tree.lock(node)
    elif how == "pages":
        node.held[DEVICE][FULL] = (node.held[DEVICE][FULL] or [])[::-1]
    elif how == "split":
        cache.tree.match(tokens_of(8), 8)
    return cache


def test_a_tree_digest_of_62_bits_tells_apart_trees_that_differ_in_anything():
    caches = [cache_of(namespace="tenant"), cache_of(num_tokens=12)]
    caches += [changed(how) for how in ("nothing", "hits", "locks", "pages", "split")]
    caches += [cache_of(first=100 * number) for number in range(1, 40)]
    digests = [tree_digest(cache.tree) for cache in caches]
    assert len(set(digests)) == len(digests)
    assert 2**61 <= max(digests) < 2**62
    assert tree_digest(cache_of().tree) == tree_digest(changed("nothing").tree)


def test_ranks_compare_whole_trees_in_the_first_step_and_in_every_third_after_it():
    caches = cache_of(), cache_of()
    agreements = [
        RankAgreement(cache, prefetcher_of(cache, PrefetchConfig()), whole_digest_every=3)
        for cache in caches
    ]

    def step() -> None:
        minimum = minimum_of([each.pack(0) for each in agreements])
        for each in agreements:
            each.apply(minimum, 0)

    step()
    node_at(caches[0], 4).uses += 1  # the digests of the actions of the ranks stay equal
    step()
    step()
    with pytest.raises(RanksDivergedError, match="after step 3"):
        step()


@pytest.mark.parametrize(
    ("start", "end", "known"),
    [(2, 5, "abc"), (3, 4, "b"), (3, 5, "bc"), (2, 2, ""), (1, 3, None), (3, 6, None)],
)
def test_a_sequence_knows_the_digests_of_the_pages_that_storage_was_asked_for(start, end, known):
    sequence = Sequence(tokens_of(24))
    sequence.digests, sequence.digests_start = [b"a", b"b", b"c"], 2
    wanted = None if known is None else [letter.encode() for letter in known]
    assert sequence.known_digests(start, end) == wanted


def test_the_digests_that_storage_was_asked_for_become_those_of_nodes():
    cache = make_cache(device=ROOMY, host=ROOMY, storage_queue_bytes=0)
    prefetcher = prefetcher_of(cache, PrefetchConfig(threshold=PAGE))
    sequence = Sequence(tokens_of(17))
    prefetch = prefetcher.prefetch_from_storage(0, sequence, cache.match(sequence, 17), 17, 0)
    assert prefetch is not None
    assert cache.acquire(sequence, cache.match(sequence, 17)) is not None
    assert cache.extend(sequence, 17)
    cache.publish(sequence, 4)
    assert cache.node_at(4).digests == prefetch.names
    assert len(prefetch.names) == 4
