"""Who goes first, whatever the policy says."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tree.digests import Digests
from hicache.cache.tree.entry import Entries, EntryPolicy
from hicache.cache.tree.eviction import VictimQueue
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.residency import by_last_use
from hicache.cache.tree.sequence import Sequence
from hicache.config import QuirksConfig
from hicache.observe.invariants import check
from hicache.policies.eviction import Random
from hicache.runs.schema import config_of
from tests.cache.small import (
    PAGE,
    RANKED,
    complete_all,
    evict_all,
    make_cache,
    named_kinds,
    ranking_of,
    run_request,
    tokens_of,
)


def leaves(count: int) -> list[Node]:
    cache = make_cache(device=(200, 0, 0), host=(0, 0, 0), eviction="fifo")
    for number in range(count):
        run_request(cache, tokens_of(8, 1000 * number), 8)
    return list(cache.tree.root("").children.values())


@pytest.mark.parametrize("policy", sorted(RANKED))
def test_every_leaf_goes_once(policy: str) -> None:
    queue = VictimQueue(ranking_of(policy))
    nodes = leaves(30)
    for node in nodes:
        queue.add(node)
    gone = []
    while (victim := queue.best()) is not None:
        queue.pop(victim, None)
        gone.append(victim)
    assert set(gone) == set(nodes)
    assert len(gone) == 30


def test_random_takes_all_alike() -> None:
    nodes = leaves(10)
    firsts: Counter[Node] = Counter()
    for seed in range(2_000):
        queue = VictimQueue(ranking_of("random", seed=seed))
        for node in nodes:
            queue.add(node)
        victim = queue.best()
        assert victim is not None
        firsts[victim] += 1
    assert min(firsts[node] for node in nodes) > 150  # of 200; the deviation of each is 13
    assert max(firsts.values()) < 250


def test_the_lots_of_random_are_of_48_bits() -> None:
    made = Entries(EntryPolicy(), named_kinds(PAGE), Digests(PAGE))
    entries = [made.of(node, FULL) for node in leaves(10)]
    worlds: list[Any] = [SimpleNamespace(seed=seed) for seed in range(20)]
    ranks = [Random(world).rank(each, "host", "full") for world in worlds for each in entries]
    lots = [rank[0] for rank in ranks if rank is not None]
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
    queue = VictimQueue(by_last_use(FULL))
    queue.add(old)
    queue.add(new)
    assert queue.best() is old
    old.tick = new.tick + 1
    assert queue.best() is new


@pytest.mark.parametrize(
    ("trims_leaves", "left"), [(False, [(100, 0), (200, 4)]), (True, [(100, 1), (200, 4)])]
)
@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_a_leaf_goes_whole_or_loses_the_pages_that_are_missing(
    tier: int, *, trims_leaves: bool, left: list[tuple[int, int]]
) -> None:
    host = (8, 0, 0) if tier == HOST else (0, 0, 0)
    cache = make_cache(device=(8, 0, 0), host=host, trims_leaves=trims_leaves)
    for first, _ in left:
        run_request(cache, tokens_of(16, first), 16)
        complete_all(cache)
    allocators = (cache.device, cache.host)
    for above in range(tier + 1):  # what is on the device as well does not leave the host
        assert allocators[above].allocate(FULL, 8 if above < tier else 3) is not None
    for first, num_pages in left:
        root = cache.tree.root("")
        held = [
            node.held[tier][FULL]
            for node in cache.tree.nodes()
            if node.edge.startswith(tokens_of(1, first)) and node.parent is root
        ]
        assert sum(len(page_ids or []) for page_ids in held) == num_pages


@pytest.mark.parametrize("name", ["vllm_0_33", "hicache", "sglang_0_5_23"])
def test_a_host_smaller_than_the_device_keeps_what_was_used_last(name: str) -> None:
    evicts_mirrors = config_of(f"compat={name}").cache.evicts_mirrors
    assert evicts_mirrors is (name != "sglang_0_5_23")
    cache = make_cache(device=(16, 0, 0), host=(5, 0, 0), evicts_mirrors=evicts_mirrors)
    for first in (100, 200, 300):
        run_request(cache, tokens_of(16, first), 16)
        complete_all(cache)
    held = {node.edge: node.held[HOST][FULL] is not None for node in cache.tree.nodes()}
    assert held[tokens_of(16, 100)] is not evicts_mirrors
    assert held[tokens_of(16, 300)] is evicts_mirrors
    check(cache, None, [])
    # a path that is longer than the host's room is copied from its beginning
    run_request(cache, tokens_of(16, 300) + tokens_of(16, 400), 32)
    complete_all(cache)
    check(cache, None, [])
    assert cache.tree.residency.resident[HOST][FULL] == 4


@pytest.mark.parametrize(("trims_leaves", "num_left"), [(False, 0), (True, 2)])
def test_a_state_leaves_a_leaf_alone_where_single_pages_leave(
    *, trims_leaves: bool, num_left: int
) -> None:
    cache = make_cache(device=(8, 0, 3), host=(0, 0, 0), has_states=True, trims_leaves=trims_leaves)
    run_request(cache, tokens_of(8), 8)
    assert cache.device.allocate(MAMBA, 3) is not None
    resident = cache.tree.residency.resident[DEVICE]
    assert (resident[FULL], resident[MAMBA]) == (num_left, 0)


def test_the_pages_that_are_left_of_a_leaf_go_before_a_leaf_that_was_used_later() -> None:
    cache = make_cache(device=(8, 0, 0), host=(0, 0, 0), trims_leaves=True)
    for first in (100, 200):
        run_request(cache, tokens_of(16, first), 16)
    for missing in (1, 2, 1):
        assert cache.device.allocate(FULL, missing) is not None
    (node,) = cache.tree.nodes()
    assert node.edge == tokens_of(16, 200)


def test_where_single_pages_leave_a_window_leaves_the_host_by_its_own_last_use() -> None:
    cache = make_cache(device=(9, 9, 0), host=(9, 9, 0), window_len=8, trims_leaves=True)
    for first in (100, 200):
        run_request(cache, tokens_of(8, first), 8)
        complete_all(cache)
        for kind in (SWA, FULL):
            evict_all(cache, DEVICE, kind)
    old, new = sorted(cache.tree.nodes(), key=lambda node: node.tick)
    old.host_ticks[FULL] = new.tick + 1  # a request used the pages of full KV, and not the window
    queues = cache.tree.residency.queues[HOST]
    assert (queues[SWA].best(), queues[FULL].best()) == (old, new)
    sequence = Sequence(tokens_of(9, 100))
    match = cache.match(sequence, 9, refreshes=False)
    assert cache.acquire(sequence, match, prompt_len=9) is not None
    assert old.host_ticks[SWA] > new.host_ticks[SWA]  # it reads the window
    cache.abandon(sequence)
    complete_all(cache)
    for kind in (SWA, FULL):
        evict_all(cache, DEVICE, kind)
    assert queues[SWA].best() is new


@pytest.mark.parametrize(("backs_up_answers", "copied"), [(True, 4), (False, 2)])
def test_an_answer_is_copied_to_the_host_if_it_is_to_be(
    *, backs_up_answers: bool, copied: int
) -> None:
    cache = make_cache(device=(8, 0, 0), host=(8, 0, 0), backs_up_answers=backs_up_answers)
    sequence = Sequence(tokens_of(16))
    assert cache.acquire(sequence, cache.match(sequence, 8)) is not None
    assert cache.extend(sequence, 8)
    cache.publish(sequence, 2)
    assert cache.extend(sequence, 16)
    cache.finish(sequence, 4)
    assert cache.tree.residency.resident[HOST][FULL] == copied
    later = Sequence(tokens_of(20))  # whose prompt begins with all of it
    assert cache.acquire(later, cache.match(later, 20)) is not None
    assert cache.extend(later, 20)
    cache.publish(later, 5)
    assert cache.tree.residency.resident[HOST][FULL] == 5


@pytest.mark.parametrize(("evicts_whole", "left"), [(False, 2), (True, 1)])
def test_a_copied_window_evicts_what_is_missing_on_the_host_or_as_much_as_it_takes(
    *, evicts_whole: bool, left: int
) -> None:
    cache = make_cache(
        device=(40, 40, 0),
        host=(40, 4, 0),
        window_len=8,
        quirks=QuirksConfig(evicts_whole=evicts_whole),
    )
    for first in (100, 200, 300, 400):
        num_tokens = 8 if first == 400 else 4
        run_request(cache, tokens_of(num_tokens, first), num_tokens)
        complete_all(cache)
        evict_all(cache, DEVICE, FULL)
    assert cache.tree.residency.resident[HOST][SWA] == 2 + left


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize(
    ("loads_last_page", "prompt_len", "cached_len"),
    [(False, 16, 12), (True, 16, 15), (True, 17, 16)],
)
def test_the_last_page_of_a_prompt_of_whole_pages_is_loaded_if_it_is_to_be(
    *, is_on_device: bool, loads_last_page: bool, prompt_len: int, cached_len: int
) -> None:
    cache = make_cache(
        device=(8, 0, 0), host=(8, 0, 0), load_back_threshold=1, loads_last_page=loads_last_page
    )
    run_request(cache, tokens_of(16), 16)
    complete_all(cache)
    if not is_on_device:
        evict_all(cache, DEVICE, FULL)
    sequence = Sequence(tokens_of(prompt_len))
    match = cache.match(sequence, prompt_len)
    acquired = cache.acquire(sequence, match, prompt_len=prompt_len)
    assert acquired is not None
    assert acquired.cached_len == cached_len
    assert acquired.device_len == (cached_len // 4 * 4 if is_on_device else 0)
    assert acquired.host_len == cached_len - acquired.device_len
    loaded = 0 if acquired.load_back is None else acquired.load_back.counts[FULL]
    assert loaded == -(-acquired.host_len // 4)
    assert cache.extend(sequence, prompt_len)
    complete_all(cache)
    cache.finish(sequence, prompt_len // 4)
    check(cache, None, [])
    assert cache.available_size(FULL) == 16


def test_those_that_left_for_good_are_swept_out_and_the_others_stay() -> None:
    queue = VictimQueue(by_last_use(FULL))
    nodes = [Node(None, b"", 0, 1) for _ in range(500)]
    for tick, node in enumerate(nodes):
        node.tick = tick
        queue.add(node)
        if tick % 100:
            queue.pop(node, None)
    kept = nodes[::100]
    came = []
    while (node := queue.best()) is not None:
        came.append(node)
        queue.pop(node, None)
    assert came == kept


def test_a_lock_of_windows_ends_where_it_is_told_to() -> None:
    cache = make_cache(device=(8, 8, 0), host=(0, 0, 0), window_len=16)
    tokens = tokens_of(32)
    run_request(cache, tokens, 32)
    tree, protected = cache.tree, cache.tree.residency.protected[DEVICE]
    (leaf,) = [node for node in tree.nodes() if not node.children]
    assert (leaf.start, leaf.end) == (4, 8)
    tree.ancestor(leaf, tokens, 6)
    lock = tree.lock(leaf, [4] * tree.kinds.size, 6)
    tree.ancestor(leaf, tokens, 7)  # a later split changes nothing
    assert (protected[FULL], protected[SWA]) == (8, 2)
    tree.release(lock)
    assert (protected[FULL], protected[SWA]) == (0, 0)
