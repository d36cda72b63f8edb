"""The queue of evictable nodes, and the ranks of the simple policies."""

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.tree.digests import Digests
from hicache.cache.tree.entry import Entries, EntryPolicy
from hicache.cache.tree.eviction import VictimQueue
from hicache.cache.tree.node import Node
from hicache.policies import eviction
from tests.cache.small import PAGE, RANKED, named_kinds, ranking_of


def nodes_of(count: int) -> list[Node]:
    nodes = [Node(None, b"", 0, 2) for _ in range(count)]
    for number, node in enumerate(nodes):
        node.created = node.tick = number
    return nodes


@pytest.mark.parametrize("num_nodes", [3, 1_000])
@pytest.mark.parametrize("policy", RANKED)
def test_the_queue_finds_the_same_victim_as_a_search_over_its_nodes(policy, num_nodes):
    rng, nodes, ranking = Random(7), nodes_of(num_nodes), ranking_of(policy)
    queue, members = VictimQueue(ranking), {}
    for step in range(1_000):
        node = rng.choice(nodes)
        queue.add(node)
        members.setdefault(node, step)
        assert len(queue._entered) < 250  # it forgets nodes that have left
        node = rng.choice(list(members))
        node.tick, node.uses = num_nodes + step, node.uses + 1  # priorities may only grow
        if rng.random() < 0.95:
            gone = rng.choice(list(members))
            members.pop(gone)
            for _ in range(2):
                queue.pop(gone, None)
        if rng.random() < 0.2:
            wanted = min(members, key=lambda each: (ranking(each), members[each]), default=None)
            assert queue.best() is wanted
        assert set(queue) == set(members)


def test_a_queue_finds_a_victim_although_the_ranks_of_all_nodes_fall():
    ranks = iter(range(1_000, 0, -1))
    queue = VictimQueue(lambda node: (float(next(ranks)),))
    for node in nodes_of(5):
        queue.add(node)
    assert queue.best() is not None


def test_the_random_policy_draws_ranks_of_48_bits_that_favor_no_node():
    made = Entries(EntryPolicy(), named_kinds(PAGE), Digests(PAGE))
    entries = [made.of(node, FULL) for node in nodes_of(10)]
    firsts: Counter[int] = Counter()
    numbers = set()
    for seed in range(1_000):
        world: Any = SimpleNamespace(seed=seed)
        ranks = [eviction.Random(world).rank(each, "host", "full") for each in entries]
        drawn = [rank[0] for rank in ranks if rank is not None]
        firsts[drawn.index(min(drawn))] += 1
        numbers.update(drawn)
    assert len(numbers) == 10_000
    assert 2**47 < max(numbers) < 2**48
    assert 60 < min(firsts.values()) <= max(firsts.values()) < 140  # 100; the deviation is 9.5
