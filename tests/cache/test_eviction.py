"""Who goes first, whatever the policy says."""

from collections import Counter

import pytest

from hicache.cache.tree.eviction import POLICIES, Random
from hicache.cache.tree.node import Node
from hicache.cache.tree.victims import VictimQueue
from tests.cache.small import make_cache, run_request, tokens_of


def leaves(count: int) -> list[Node]:
    cache = make_cache(device=(200, 0, 0), host=(0, 0, 0))
    for number in range(count):
        run_request(cache, tokens_of(8, 1000 * number), 8)
    return list(cache.tree.root("").children.values())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_leaf_goes_once(policy: str) -> None:
    queue = VictimQueue(POLICIES[policy]().priority)
    nodes = leaves(30)
    for node in nodes:
        queue.add(node)
    gone = []
    while (victim := queue.best()) is not None:
        queue.discard(victim)
        gone.append(victim)
    assert set(gone) == set(nodes)
    assert len(gone) == 30


def test_random_takes_all_alike() -> None:
    nodes = leaves(10)
    firsts: Counter[Node] = Counter()
    for seed in range(2_000):
        queue = VictimQueue(Random(seed).priority)
        for node in nodes:
            queue.add(node)
        victim = queue.best()
        assert victim is not None
        firsts[victim] += 1
    assert min(firsts[node] for node in nodes) > 150  # of 200; the deviation of each is 13
    assert max(firsts.values()) < 250


def test_the_lots_of_random_are_of_48_bits() -> None:
    lots = [Random(seed).priority(node)[0] for seed in range(20) for node in leaves(10)]
    assert len(set(lots)) == 200
    assert 2**47 < max(lots) < 2**48


def test_a_priority_that_falls_ends_all_the_same() -> None:
    ranks = iter(range(1_000, 0, -1))
    queue = VictimQueue(lambda node: (float(next(ranks)),))
    for node in leaves(5):
        queue.add(node)
    assert queue.best() is not None


def test_one_that_was_touched_goes_later() -> None:
    old, new = leaves(2)
    queue = VictimQueue(POLICIES["lru"]().priority)
    queue.add(old)
    queue.add(new)
    assert queue.best() is old
    old.tick = new.tick + 1
    assert queue.best() is new
