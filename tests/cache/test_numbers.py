"""Matches, locks, load-backs, inserts and evictions to the number, on trees one can draw.

The 24 scenarios of `peer_behaviour.md` §7, and where each is checked here:
1, 2, 4: below and in the walks. 5: `test_window_pages_left_during_prefill_stay_tombstones`.
6: `test_the_branch_length_*`. 7, 8: the eviction tests below. 9: lock tests below. 10: the walks.
11: unbacked leaves are dropped whole (`test_an_unbacked_leaf_*`); how many tokens that loses is
not counted. 12, 13: host hits and load-back below. 14: `test_a_load_back_*state*`; exhaustion in
the walks. 16, 17, 19, 20 (what is left of them): `test_prefetch_numbers.py` and the walks, whose
pages carry their prefix from the producer through storage to the consumer. 18: aborts in
`test_prefetch_numbers.py`. 22: `tests/scheduler/test_budget.py`. 23: the restorable lengths in
`test_prefetch_numbers.py`.

Not applicable: 3 (bigram keys: no EAGLE here), 15 (slots are taken by `acquire`, after admission,
so nothing is over-delivered), 21 (digests are computed when storage asks, so nothing is
back-filled), 24 (process-level suites; faults of storage are tested in `tests/storage`).
"""

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.pages import free
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import CopyState, LoadBack
from hicache.cache.tree.node import DEVICE, HOST, MatchResult, Node
from hicache.cache.tree.residency import Residency
from hicache.cache.tree.sequence import Sequence
from hicache.config import QuirksConfig
from hicache.observe import invariants
from tests.cache.small import (
    PAGE,
    complete_all,
    evict_all,
    make_cache,
    named_kinds,
    node_at,
    run_request,
    tokens_of,
)

NO_HOST = (0, 0, 0)


def match(cache: PrefixCache, tokens: bytes, max_len: int | None = None) -> MatchResult:
    length = len(tokens) // 4 if max_len is None else max_len
    return cache.tree.match(tokens, length)


def path_of(cache: PrefixCache, *ends: int) -> list[Node]:
    """Publish one sequence in pieces that end after these pages; the nodes of its path."""
    for end in ends:
        run_request(cache, tokens_of(end * cache.page_size), end * cache.page_size)
    return [node_at(cache, end) for end in ends]


def keep_swa(cache: PrefixCache, *kept: Node) -> None:
    """Make tombstones of all other nodes' windows."""
    actions: list = []
    for node in list(cache.tree.nodes()):
        if node not in kept:
            cache.tree.residency.drop(node, DEVICE, SWA, actions)
    free(actions, cache.pools)


# -- matching -----------------------------------------------------------------------------------


def test_a_match_is_cut_to_whole_pages() -> None:
    cache = make_cache(device=(20, 0, 0), host=NO_HOST)
    run_request(cache, tokens_of(18), 17)
    assert match(cache, tokens_of(18)).usable_len == 16
    assert match(cache, tokens_of(18), 15).usable_len == 12


def test_a_page_that_differs_in_its_last_token_does_not_match() -> None:
    cache = make_cache(device=(20, 0, 0), host=NO_HOST)
    run_request(cache, tokens_of(16), 16)
    other = tokens_of(11) + tokens_of(1, first=999) + tokens_of(4, first=12)
    assert match(cache, other).usable_len == 8


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = make_cache(device=(20, 0, 0), host=NO_HOST)
    run_request(cache, tokens_of(16), 16)
    assert cache.match(Sequence(tokens_of(16)), 16).usable_len == 12


def test_equal_tokens_of_two_namespaces_never_match() -> None:
    cache = make_cache(device=(20, 0, 0), host=NO_HOST)
    run_request(cache, tokens_of(16), 16, namespace="a")
    assert cache.match(Sequence(tokens_of(16), "b"), 16).usable_len == 0


@pytest.mark.parametrize(
    ("window_len", "kept", "wanted"),
    [(8, [0], 8), (8, [2], 24), (12, [2], 0), (12, [0, 2], 8), (8, [0, 1, 2], 24), (8, [], 0)],
)
def test_a_boundary_is_usable_when_its_window_is_held(
    window_len: int, kept: list[int], wanted: int
) -> None:
    cache = make_cache(device=(40, 40, 0), host=NO_HOST, window_len=window_len)
    nodes = path_of(cache, 2, 4, 6)
    keep_swa(cache, *(nodes[index] for index in kept))
    assert match(cache, tokens_of(24)).usable_len == wanted


def test_a_boundary_without_its_state_is_not_usable() -> None:
    cache = make_cache(device=(20, 0, 8), host=NO_HOST, has_states=True)
    run_request(cache, tokens_of(16), 16, state_ends=(2,))
    assert match(cache, tokens_of(16)).usable_len == 16
    assert match(cache, tokens_of(15)).usable_len == 8


def test_the_branch_length_is_where_a_state_would_have_helped() -> None:
    cache = make_cache(device=(20, 0, 8), host=NO_HOST, has_states=True)
    run_request(cache, tokens_of(16), 16, state_ends=(2,))
    assert match(cache, tokens_of(15)).branch_len == 12


def test_the_branch_length_is_none_when_everything_matched_is_usable() -> None:
    cache = make_cache(device=(20, 0, 8), host=NO_HOST, has_states=True)
    run_request(cache, tokens_of(16), 16)
    assert match(cache, tokens_of(16)).branch_len is None


@pytest.mark.parametrize(
    ("window_len", "has_states", "kinds"),
    [
        (0, False, (FULL,)),
        (8, False, (FULL, SWA)),
        (0, True, (FULL, MAMBA)),
        (8, True, (FULL, SWA, MAMBA)),
    ],
)
def test_a_tree_has_the_kinds_of_its_model(
    window_len: int, kinds: tuple[int, ...], *, has_states: bool
) -> None:
    cache = make_cache(device=NO_HOST, host=NO_HOST, window_len=window_len, has_states=has_states)
    assert cache.tree.kinds.numbers == kinds


# -- locking ------------------------------------------------------------------------------------


def test_a_lock_pins_nodes_until_a_window_is_covered() -> None:
    cache = make_cache(device=(40, 40, 0), host=NO_HOST, window_len=8)
    first, second, third = path_of(cache, 4, 5, 6)  # 16, 4 and 4 tokens
    lock = cache.tree.lock(third)
    assert [node.locks[DEVICE][SWA] for node in (first, second, third)] == [0, 1, 1]
    assert [node.path_locks for node in (first, second, third)] == [1, 1, 1]
    cache.tree.release(lock)


def test_a_window_longer_than_the_path_pins_all_of_it() -> None:
    cache = make_cache(device=(40, 40, 0), host=NO_HOST, window_len=100)
    nodes = path_of(cache, 4, 5, 6)
    lock = cache.tree.lock(nodes[-1])
    assert [node.locks[DEVICE][SWA] for node in nodes] == [1, 1, 1]
    cache.tree.release(lock)
    assert cache.evictable_size(SWA) == 24


def test_a_lock_pins_tombstones_as_well() -> None:
    cache = make_cache(device=(40, 40, 0), host=NO_HOST, window_len=8)
    nodes = path_of(cache, 4, 5, 6)
    keep_swa(cache, nodes[0], nodes[2])
    lock = cache.tree.lock(nodes[2])
    assert nodes[1].locks[DEVICE][SWA] == 1
    cache.tree.release(lock)


def test_a_release_after_a_split_restores_exactly_what_was_evictable() -> None:
    cache = make_cache(device=(40, 40, 0), host=NO_HOST, window_len=8, page_size=2)
    nodes = path_of(cache, 8, 10, 12)  # 16, 4 and 4 tokens
    before = [cache.evictable_size(kind) for kind in (FULL, SWA)]
    lock = cache.tree.lock(nodes[2])
    match(cache, tokens_of(18))  # cuts the second node in two
    assert node_at(cache, 9).locks[DEVICE][SWA] == 1
    cache.tree.release(lock)
    assert [cache.evictable_size(kind) for kind in (FULL, SWA)] == before
    invariants.check_drained(cache, None)


def test_a_lock_pins_the_state_of_its_node_alone() -> None:
    cache = make_cache(device=(20, 0, 8), host=NO_HOST, has_states=True)
    nodes = path_of(cache, 2, 4)
    lock = cache.tree.lock(nodes[1])
    assert [node.locks[DEVICE][MAMBA] for node in nodes] == [0, 1]
    cache.tree.release(lock)


# -- evicting -----------------------------------------------------------------------------------


def test_an_unbacked_leaf_leaves_the_tree_whole() -> None:
    cache = make_cache(device=(20, 20, 4), host=NO_HOST, window_len=4, has_states=True)
    run_request(cache, tokens_of(16), 16)
    evict_all(cache, DEVICE, FULL)
    assert cache.tree.num_nodes == 0
    assert [pool.num_taken for pool in cache.pools[DEVICE]] == [0, 0, 0]


def test_a_backed_leaf_moves_to_the_host() -> None:
    cache = make_cache(device=(20, 0, 0), host=(20, 0, 0))
    run_request(cache, tokens_of(16), 16)
    complete_all(cache)
    evict_all(cache, DEVICE, FULL)
    assert match(cache, tokens_of(16)).host_hit_length == 16


def test_evicting_an_inner_state_leaves_its_full_pages() -> None:
    cache = make_cache(device=(20, 0, 8), host=NO_HOST, has_states=True)
    nodes = path_of(cache, 2, 4)
    match(cache, tokens_of(16))  # the deeper state is the more recent
    assert cache.device.evict(MAMBA, 1)
    assert nodes[0].held[DEVICE][MAMBA] is None
    assert nodes[0].held[DEVICE][FULL] is not None
    assert match(cache, tokens_of(12)).usable_len == 0


def test_evicting_an_inner_window_takes_the_state_along() -> None:
    cache = make_cache(device=(20, 20, 8), host=NO_HOST, window_len=8, has_states=True)
    nodes = path_of(cache, 2, 4)
    match(cache, tokens_of(16))
    assert cache.device.evict(SWA, 1)
    assert nodes[0].held[DEVICE][SWA] is None
    assert nodes[0].held[DEVICE][MAMBA] is None
    assert nodes[0].held[DEVICE][FULL] is not None


def test_an_allocation_evicts_no_more_than_it_needs() -> None:
    cache = make_cache(device=(20, 4, 0), host=NO_HOST, window_len=4)
    path_of(cache, 1, 2, 3, 4)
    taken = cache.device.allocate(SWA, 1)
    assert taken is not None
    assert cache.tree.residency.resident[DEVICE][SWA] == 3
    cache.pools[DEVICE][SWA].free(taken)


def test_a_locked_leaf_is_not_evicted() -> None:
    cache = make_cache(device=(20, 0, 0), host=NO_HOST)
    (node,) = path_of(cache, 4)
    lock = cache.tree.lock(node)
    assert cache.device.allocate(FULL, 17) is None
    assert node.held[DEVICE][FULL] is not None
    cache.tree.release(lock)


def test_write_through_selective_backs_up_at_the_second_hit() -> None:
    cache = make_cache(device=(20, 0, 0), host=(20, 0, 0), write_policy="write_through_selective")
    run_request(cache, tokens_of(17), 17)
    assert not cache.in_flight
    run_request(cache, tokens_of(17), 17)
    assert len(cache.in_flight) == 1
    complete_all(cache)


def test_a_window_is_backed_up_with_every_node_it_lies_in() -> None:
    cache = make_cache(device=(20, 20, 0), host=(0, 0, 0), window_len=12, write_policy="write_back")
    nodes = path_of(cache, 1, 2, 3, 4, 5)
    plan = cache.tree.plan_back_up(nodes[-1])
    # of three pages, and the page before it, which an equal prompt needs
    assert plan == [nodes, nodes[1:], []]


def test_write_back_copies_what_it_evicts_and_nothing_before() -> None:
    cache = make_cache(device=(8, 0, 0), host=(20, 0, 0), write_policy="write_back")
    run_request(cache, tokens_of(16), 16)
    assert not cache.in_flight
    evict_all(cache, DEVICE, FULL)
    assert match(cache, tokens_of(16)).host_hit_length == 16
    complete_all(cache)
    invariants.check_drained(cache, None)


# -- inserting ----------------------------------------------------------------------------------


def test_two_requests_that_computed_the_same_keep_one_copy() -> None:
    cache = make_cache(device=(20, 20, 0), host=NO_HOST, window_len=8)
    sequences = [Sequence(tokens_of(17)) for _ in range(2)]
    for sequence in sequences:
        assert cache.acquire(sequence, cache.match(sequence, 17)) is not None
        assert cache.extend(sequence, 17)
    for sequence in sequences:
        cache.finish(sequence, 4)
    assert cache.pools[DEVICE][FULL].num_taken == 4
    invariants.check_drained(cache, None)


def test_the_unaligned_tail_of_a_request_is_freed() -> None:
    cache = make_cache(device=(20, 0, 0), host=NO_HOST)
    run_request(cache, tokens_of(18), 18)
    assert cache.pools[DEVICE][FULL].num_taken == 4


def test_a_tombstone_takes_the_window_of_whoever_computes_it_again() -> None:
    cache = make_cache(device=(20, 20, 0), host=NO_HOST, window_len=8)
    (node,) = path_of(cache, 2)
    keep_swa(cache)
    run_request(cache, tokens_of(8), 8)
    assert node.held[DEVICE][SWA] is not None
    assert cache.pools[DEVICE][FULL].num_taken == 2


def test_window_pages_left_during_prefill_stay_tombstones() -> None:
    cache = make_cache(device=(20, 20, 0), host=NO_HOST, window_len=8)
    sequence = Sequence(tokens_of(33))
    assert cache.acquire(sequence, cache.match(sequence, 33)) is not None
    assert cache.extend(sequence, 24)
    cache.leave_window(sequence, 24)
    assert cache.pools[DEVICE][SWA].num_taken == 3  # an equal prompt of 24 starts at 20
    assert cache.extend(sequence, 33)
    cache.finish(sequence, 8)
    assert cache.tree.residency.resident[DEVICE][SWA] == 5
    assert match(cache, tokens_of(32)).usable_len == 32
    assert match(cache, tokens_of(16)).usable_len == 0


# -- loading back -------------------------------------------------------------------------------


def on_host(cache: PrefixCache, num_tokens: int, **kinds: tuple[int, ...]) -> None:
    """Publish and back up, then drop all of it from the device."""
    run_request(cache, tokens_of(num_tokens), num_tokens, **kinds)  # type: ignore[arg-type]
    complete_all(cache)
    evict_all(cache, DEVICE, FULL)
    cache.outbox.clear()


def acquire(cache: PrefixCache, num_tokens: int) -> tuple[Sequence, LoadBack | None, int]:
    sequence = Sequence(tokens_of(num_tokens + 1))
    acquired = cache.acquire(sequence, cache.match(sequence, num_tokens + 1))
    assert acquired is not None
    return sequence, acquired.load_back, acquired.cached_len


@pytest.mark.parametrize(("num_tokens", "cached"), [(9, 0), (10, 10)])
def test_fewer_than_ten_full_tokens_are_not_loaded_back(num_tokens: int, cached: int) -> None:
    cache = make_cache(device=(20, 0, 0), host=(20, 0, 0), page_size=1)
    on_host(cache, num_tokens)
    _, load_back, cached_len = acquire(cache, num_tokens)
    assert cached_len == cached
    assert (load_back is not None) is (cached > 0)


def test_a_state_alone_is_loaded_back() -> None:
    cache = make_cache(device=(20, 0, 8), host=(20, 0, 8), has_states=True)
    run_request(cache, tokens_of(8), 8)
    run_request(cache, tokens_of(16), 16)
    complete_all(cache)
    match(cache, tokens_of(16))
    assert cache.device.evict(MAMBA, 1)
    found = match(cache, tokens_of(8))
    lengths = (found.host_hit_length, found.swa_host_hit_length, found.mamba_host_hit_length)
    assert lengths == (0, 0, 1)
    sequence = Sequence(tokens_of(9))
    acquired = cache.acquire(sequence, cache.match(sequence, 9))
    assert acquired is not None
    assert acquired.load_back is not None
    assert acquired.load_back.counts == {MAMBA: 1}
    assert acquired.cached_len == 8


def test_a_load_back_of_a_state_gives_the_request_its_own_copy() -> None:
    cache = make_cache(device=(20, 0, 8), host=(20, 0, 8), has_states=True)
    on_host(cache, 16)
    sequence, load_back, _ = acquire(cache, 16)
    assert load_back is not None
    (copy,) = [work for work in cache.outbox if isinstance(work, CopyState)]
    assert cache.outbox.index(copy) > cache.outbox.index(load_back)
    assert copy.target == sequence.working_slot
    (state,) = [move.targets for move in load_back.moves if move.kind == MAMBA]
    assert int(copy.source[0]) == int(state[0])


def test_window_on_the_host_is_a_hit_although_full_is_on_the_device() -> None:
    cache = make_cache(device=(20, 20, 0), host=(20, 20, 0), window_len=8)
    nodes = path_of(cache, 2, 4)
    complete_all(cache)
    keep_swa(cache, nodes[0])
    found = match(cache, tokens_of(16))
    assert found.device_prefix_len == 8
    assert (found.host_hit_length, found.swa_host_hit_length) == (0, 8)
    assert found.needs_host_load_back


def test_of_windows_on_the_host_alone_only_those_within_the_last_one_count() -> None:
    cache = make_cache(device=(20, 20, 0), host=(20, 20, 0), window_len=8)
    nodes = path_of(cache, 1, 2, 3, 4)
    complete_all(cache)
    keep_swa(cache, nodes[3])
    assert all(node.held[HOST][SWA] is not None for node in nodes)
    found = match(cache, tokens_of(16))
    assert (found.device_prefix_len, found.usable_len) == (0, 16)
    assert found.swa_host_hit_length == 4


@pytest.mark.parametrize(("tier", "length"), [("any", 16), ("host", 8), ("none", 0)])
def test_what_is_left_of_a_match_without_the_host_and_without_a_hit(tier: str, length: int) -> None:
    cache = make_cache(device=(20, 20, 8), host=(20, 20, 8), window_len=4, has_states=True)
    path_of(cache, 2, 4)
    complete_all(cache)
    assert cache.device.evict(FULL, 1)  # and all that belongs to the leaf
    found = match(cache, tokens_of(16))
    assert (found.device_prefix_len, found.host_hit_length) == (8, 4)  # a page of it is there
    assert (found.swa_host_hit_length, found.mamba_host_hit_length) == (4, 1)
    left = {"any": found, "host": found.without_host(), "none": found.without_hit()}[tier]
    assert left.usable_len == length
    assert left.best_node.end * PAGE == length
    assert left.device_node.end * PAGE == left.device_prefix_len == min(length, 8)
    assert left.full_len == length
    if tier != "any":
        hits = (left.host_hit_length, left.swa_host_hit_length, left.mamba_host_hit_length)
        assert hits == (0, 0, 0)
        assert not left.needs_host_load_back


@pytest.mark.parametrize(("window_len", "wanted"), [(4, 4), (6, 8), (8, 8)])
def test_no_more_than_the_window_is_loaded_back(window_len: int, wanted: int) -> None:
    cache = make_cache(device=(20, 20, 0), host=(20, 20, 0), window_len=window_len)
    path_of(cache, 2, 4)
    complete_all(cache)
    evict_all(cache, DEVICE, FULL)
    found = match(cache, tokens_of(16))
    assert found.swa_host_hit_length == wanted
    _, load_back, cached_len = acquire(cache, 16)
    assert load_back is not None
    assert cached_len == 16
    assert load_back.counts == {FULL: 4, SWA: wanted // 4}


def test_a_load_back_that_finds_no_pages_changes_nothing() -> None:
    cache = make_cache(device=(20, 0, 0), host=(20, 0, 0))
    on_host(cache, 16)
    taken = cache.device.allocate(FULL, 18)
    assert taken is not None
    sequence, load_back, cached_len = acquire(cache, 16)
    assert (load_back, cached_len) == (None, 0)
    assert cache.counters["load_back/failed_count"] == 1
    cache.abandon(sequence)
    cache.pools[DEVICE][FULL].free(taken)
    invariants.check_drained(cache, None)


def test_a_load_back_holds_both_tiers_until_it_is_done() -> None:
    cache = make_cache(device=(20, 0, 0), host=(20, 0, 0))
    on_host(cache, 16)
    sequence, load_back, _ = acquire(cache, 16)
    assert load_back is not None
    cache.abandon(sequence)
    (node,) = cache.tree.nodes()
    assert node.path_locks == node.locks[HOST][FULL] == 1
    evict_all(cache, DEVICE, FULL)
    evict_all(cache, HOST, FULL)
    assert node.held[DEVICE][FULL] is not None
    assert node.held[HOST][FULL] is not None
    cache.complete(load_back)
    invariants.check_drained(cache, None)


@pytest.mark.parametrize(("refreshes", "victim"), [(False, "left"), (True, "stayed")])
def test_leaving_the_device_counts_as_a_use_where_it_is_asked_for(
    *, refreshes: bool, victim: str
) -> None:
    residency = Residency(
        named_kinds(1, has_states=True),
        reclaims_duplicates=False,
        quirks=QuirksConfig(leaving_refreshes=refreshes),
    )
    root = Node(None, b"", 0, 0)
    left, stayed = Node(root, b"a" * 4, 0, 1), Node(root, b"b" * 4, 0, 1)
    for node, tiers in ((left, (DEVICE, HOST)), (stayed, (HOST,))):
        residency.next_tick()
        for tier in tiers:
            residency.put(node, tier, MAMBA, np.array([0], np.int32))
    residency.next_tick()
    residency.drop(left, DEVICE, MAMBA, [])
    wanted = {"left": left, "stayed": stayed}[victim]
    assert residency.victim(HOST, MAMBA, 1, (MAMBA,)) == (wanted, MAMBA)
