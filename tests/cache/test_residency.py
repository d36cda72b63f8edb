"""What counts as a use of cached data, and which data a tier evicts first."""

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tree.events import NO_DEMAND
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.sequence import Sequence
from hicache.observe.invariants import check
from hicache.rules import Rules
from tests.cache.small import PAGE, SmallCache, make_cache, run_request, tokens_of

ROOMY = (40, 40, 9)


def cache_of(*firsts: int, num_tokens: int = 8, **changes: object) -> SmallCache:
    """A cache with prompts that begin with these tokens, published in order and backed up."""
    cache = make_cache(**{"device": ROOMY, **changes})  # type: ignore[arg-type]
    for first in firsts:
        cache.serve(num_tokens, first)
        cache.complete_all()
    return cache


def node_of(cache: SmallCache, first: int) -> Node:
    """The only node whose first token is `first`."""
    start = tokens_of(1, first)
    (node,) = [node for node in cache.tree.nodes() if node.edge.startswith(start)]
    return node


def victims(cache: SmallCache, kind: int, tier: int = DEVICE) -> list[int]:
    """The first tokens of the nodes that a tier would evict, in order."""
    order = []
    while (found := cache.tree.victim(tier, kind, 1)) is not None:
        order.append(int.from_bytes(found[0].edge[:4], "little"))
        cache.tree.residency.queues[tier][kind].pop(found[0], None)
    return order


def put_on_host(cache: SmallCache, node: Node, *kinds: int) -> None:
    for kind in kinds:
        page_ids = cache.pools[HOST][kind].allocate(node.num_pages)
        assert page_ids is not None
        cache.tree.residency.put(node, HOST, kind, page_ids)


def load(cache: SmallCache, num_tokens: int, first: int = 0) -> None:
    """Load back what the host has of a prompt for a request, and drop the request."""
    cache.abandon(cache.begin(num_tokens + 1, first)[0])
    cache.complete_all()


# -- uses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "split_refreshes", "order"),
    [(8, False, [200, 100]), (4, False, [104, 200]), (4, True, [200, 104])],
)
def test_a_match_that_splits_a_node_is_a_use_of_the_matched_part_or_if_set_of_all(
    num_tokens, split_refreshes, order
):
    cache = cache_of(100, 200, rules=Rules(split_refreshes=split_refreshes))
    cache.tree.match(tokens_of(num_tokens, 100), num_tokens)
    assert victims(cache, FULL) == order


def test_nodes_are_numbered_as_they_are_created_and_both_halves_of_a_split_keep_the_number():
    cache = cache_of(100, 200, 300)
    cache.tree.match(tokens_of(4, 200), 4)
    numbers = [node_of(cache, first).created for first in (100, 200, 204, 300)]
    assert numbers == [1, 2, 2, 3]


def test_publishing_is_a_use_of_the_whole_path():
    cache = cache_of(100)
    sequence, _ = cache.begin(17, 100)
    cache.serve(8, 200)
    assert cache.extend(sequence, 17)
    cache.finish(sequence, 4)
    ticks = [node_of(cache, first).tick for first in (200, 100, 108)]
    assert sorted(set(ticks)) == ticks


def test_publishing_a_prompt_that_is_already_cached_is_a_use_of_it():
    cache = cache_of()
    sequences = [cache.begin(8, first)[0] for first in (100, 100, 200)]
    for sequence in sequences:
        assert cache.extend(sequence, 8)
    for index in (0, 2, 1):
        cache.finish(sequences[index], 2)
    assert node_of(cache, 100).uses == 2
    assert victims(cache, FULL) == [200, 100]


@pytest.mark.parametrize(
    ("prompts", "matched", "order"),
    [
        # the last window of 8 tokens, and the page before it
        ([(8, 0), (12, 0), (20, 0), (8, 100)], (20,), [0, 100, 8, 12]),
        # the first split was at 16, the window of the second match spans three nodes
        ([(20, 0)], (16, 20), [0, 4, 12, 16]),
    ],
)
def test_a_match_is_a_use_of_its_last_window_and_windows_are_evicted_from_their_start(
    prompts, matched, order
):
    cache = make_cache(device=ROOMY, window_len=8)
    for num_tokens, first in prompts:
        cache.serve(num_tokens, first)
    for num_tokens in matched:
        cache.tree.match(tokens_of(num_tokens), num_tokens)
    assert victims(cache, SWA) == order


def test_a_match_is_a_use_of_the_state_at_its_end_and_of_no_other():
    cache = make_cache(device=ROOMY, has_states=True)
    cache.serve(16, state_ends=(2,))
    cache.serve(8, 100)
    cache.tree.match(tokens_of(16), 16)
    assert victims(cache, MAMBA) == [0, 100, 8]


def test_publishing_tokens_after_a_state_is_no_use_of_that_state():
    cache = cache_of(0, has_states=True)
    sequence, _ = cache.begin(16)
    cache.serve(8, 100)
    assert cache.extend(sequence, 16)
    sequence.states[4], sequence.boundary_slot = sequence.boundary_slot, None
    cache.finish(sequence, 4)
    assert victims(cache, MAMBA) == [0, 100, 8]


def test_a_copy_to_the_host_does_not_count_as_a_use_on_the_device():
    cache = cache_of(0, 100, host=ROOMY, window_len=8, write_policy="write_back")
    put_on_host(cache, node_of(cache, 0), SWA)
    assert victims(cache, SWA) == [0, 100]


# -- single pages, mirrors and duplicates ---------------------------------------------------------


@pytest.mark.parametrize(("trims_leaves", "left"), [(False, [0, 4]), (True, [1, 4])])
@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_a_leaf_is_evicted_whole_or_if_set_trimmed_by_the_pages_needed(tier, trims_leaves, left):
    pools = {"device": (8, 0, 0), "host": (8 * tier, 0, 0)}
    cache = cache_of(100, 200, num_tokens=16, trims_leaves=trims_leaves, **pools)
    if tier == HOST:  # what is on the device as well does not leave the host
        cache.evict_all(DEVICE, FULL)
    assert (cache.device, cache.host)[tier].allocate(FULL, 3) is not None
    root = cache.tree.root("").children
    leaves = [root.get(tokens_of(PAGE, first)) for first in (100, 200)]
    assert [len((leaf and leaf.held[tier][FULL]) or []) for leaf in leaves] == left


@pytest.mark.parametrize(("trims_leaves", "num_left"), [(False, 0), (True, 2)])
def test_evicting_a_state_evicts_its_whole_leaf_unless_leaves_are_trimmed(trims_leaves, num_left):
    cache = cache_of(0, device=(8, 0, 3), has_states=True, trims_leaves=trims_leaves)
    assert cache.device.allocate(MAMBA, 3) is not None
    assert cache.resident(DEVICE) == [num_left, 0, 0]


def test_the_rest_of_a_trimmed_leaf_is_evicted_before_a_leaf_that_was_used_later():
    cache = cache_of(100, 200, num_tokens=16, device=(8, 0, 0), trims_leaves=True)
    for missing in (1, 2, 1):
        assert cache.device.allocate(FULL, missing) is not None
    (node,) = cache.tree.nodes()
    assert node.edge == tokens_of(16, 200)


def test_if_leaves_are_trimmed_windows_and_full_pages_on_the_host_have_separate_last_uses():
    cache = make_cache(device=(9, 9, 0), host=(9, 9, 0), window_len=8, trims_leaves=True)
    for first in (100, 200):
        cache.serve(8, first)
        cache.move_to_host(SWA, FULL)
    old, new = sorted(cache.tree.nodes(), key=lambda node: node.tick)
    old.host_ticks[FULL] = new.tick + 1  # a request used the pages of full KV, and not the window
    queues = cache.tree.residency.queues[HOST]
    assert (queues[SWA].best(), queues[FULL].best()) == (old, new)
    sequence = Sequence(tokens_of(9, 100))
    match = cache.match(sequence, 9, refreshes=False)
    assert cache.acquire(sequence, match, prompt_len=9) is not None
    assert old.host_ticks[SWA] > new.host_ticks[SWA]  # it reads the window
    cache.abandon(sequence)
    cache.move_to_host(SWA, FULL)
    assert queues[SWA].best() is new


@pytest.mark.parametrize("evicts_mirrors", [True, False])
def test_a_full_host_takes_new_prompts_if_it_may_evict_copies_of_device_data(*, evicts_mirrors):
    pools = {"device": (16, 0, 0), "host": (5, 0, 0)}
    cache = cache_of(100, 200, 300, num_tokens=16, evicts_mirrors=evicts_mirrors, **pools)
    on_host = [node_of(cache, first).held[HOST][FULL] is not None for first in (100, 300)]
    assert on_host == [not evicts_mirrors, evicts_mirrors]
    check(cache, None, [])
    # a path that is longer than the host's room is copied from its beginning
    run_request(cache, tokens_of(16, 300) + tokens_of(16, 400), 32)
    cache.complete_all()
    check(cache, None, [])
    assert cache.resident(HOST)[FULL] == 4


def on_both_tiers(policy: str) -> tuple[SmallCache, Node, Node]:
    """A cache and its nodes: four pages and four after them, on the device and on a full host."""
    cache = make_cache(device=(20, 0, 0), host=(8, 0, 0), write_policy=policy)
    nodes = cache.path_of(4, 8)
    cache.move_to_host()
    load(cache, 32)
    return cache, *nodes


@pytest.mark.parametrize(
    ("policy", "wanted", "on_host"),
    [
        ("write_through", 1, [True, True]),  # its copies were made in advance
        ("write_back", 4, [False, True]),
        ("write_back", 8, [False, False]),
    ],
)
def test_write_back_frees_host_copies_of_device_data_and_a_leafs_copy_last(policy, wanted, on_host):
    cache, *nodes = on_both_tiers(policy)
    assert (cache.host.allocate(FULL, wanted) is not None) is (policy == "write_back")
    assert [node.held[HOST][FULL] is not None for node in nodes] == on_host
    assert None not in [node.held[DEVICE][FULL] for node in nodes]
    assert cache.host.allocate(FULL, 8) is None


def test_host_copies_of_both_halves_of_a_split_node_can_be_dropped_unless_locked():
    cache, _, leaf = on_both_tiers("write_back")
    assert cache.match(Sequence(tokens_of(25)), 25).usable_len == 24
    assert cache.tree.num_nodes == 3
    lock = cache.tree.lock_host(leaf, {FULL: 0})
    assert cache.host.allocate(FULL, 1) is None
    cache.tree.release(lock)
    assert cache.host.allocate(FULL, 8) is not None


@pytest.mark.parametrize("has_window", [True, False])
def test_publishing_splits_a_node_only_to_give_it_a_window_that_it_lacks(*, has_window):
    cache = make_cache(device=(20, 20, 0), window_len=8)
    first, second = (cache.begin(16)[0] for _ in range(2))
    for sequence in (first, second):
        assert cache.extend(sequence, 16)
    cache.leave_window(second, 15)  # its window begins at page 1
    cache.finish(first, 4)
    if not has_window:
        cache.tree.evict(cache.node_at(2), DEVICE, SWA, NO_DEMAND)
    cache.finish(second, 4)
    windows = {node.end: node.held[DEVICE][SWA] is not None for node in cache.tree.nodes()}
    assert windows == ({2: True, 4: True} if has_window else {1: False, 2: True, 4: True})
    assert cache.pools[DEVICE][SWA].num_taken == 4 + 1 * (not has_window)


# -- the preset of SGLang -------------------------------------------------------------------------


def left_the_device(kind: int, *, refreshes: bool, firsts: tuple[int, int] = (0, 100)):
    """A cache of prompts 0 and 100; their windows or states left the device in order `firsts`."""
    rules = Rules(leaving_refreshes=refreshes)
    shape = {"window_len": 8} if kind == SWA else {"has_states": True}
    cache = cache_of(0, 100, host=ROOMY, rules=rules, **shape)
    for first in firsts:
        cache.tree.residency.drop(node_of(cache, first), DEVICE, kind, [])
    return cache


@pytest.mark.parametrize("kind", [SWA, MAMBA])
@pytest.mark.parametrize(("refreshes", "order"), [(False, [0, 100]), (True, [100, 0])])
def test_eviction_from_the_device_counts_as_a_use_on_the_host_in_sglang(kind, order, *, refreshes):
    cache = left_the_device(kind, refreshes=refreshes, firsts=(100, 0))
    assert victims(cache, kind, HOST) == order


@pytest.mark.parametrize(
    ("refreshes", "matches", "unlocked", "order"),
    [
        (False, True, [], [100, 0]),
        (True, True, [], [0, 100]),
        (True, False, [0], [100, 0]),
        (True, False, [100, 0], [100, 0]),
    ],
)
def test_a_window_on_the_host_is_used_when_a_lock_ends_and_not_when_matched_in_sglang(
    matches, unlocked, order, *, refreshes
):
    cache = left_the_device(SWA, refreshes=refreshes)
    locks = {first: cache.tree.lock_anchor(node_of(cache, first)) for first in sorted(unlocked)}
    for first in unlocked:
        cache.tree.release(locks[first])
    if matches:
        cache.match(Sequence(tokens_of(9)), 9)
    assert victims(cache, SWA, HOST) == order


def test_a_locked_window_on_the_host_ranks_by_when_its_leaf_left_the_device_in_sglang():
    cache = left_the_device(SWA, refreshes=True)
    locks = [cache.tree.lock_anchor(node_of(cache, first)) for first in (0, 100)]
    for first in (100, 0):
        cache.tree.residency.drop(node_of(cache, first), DEVICE, FULL, [])
    for lock in locks:
        cache.tree.release(lock)
    assert victims(cache, SWA, HOST) == [100, 0]


def in_sglang(*firsts: int, **more: object) -> SmallCache:
    how = {"host": (8, 8, 9), "rules": Rules(evicts_whole=True), **more}
    return cache_of(*firsts, write_policy="write_back", **how)


def test_a_window_already_on_the_host_ranks_by_its_eviction_from_the_device_in_sglang():
    rules = Rules(leaving_refreshes=True, evicts_whole=True)
    cache = in_sglang(0, 100, host=ROOMY, window_len=8, storage_queue_bytes=1000, rules=rules)
    node, whole = node_of(cache, 0), node_of(cache, 100)
    put_on_host(cache, node, SWA)
    put_on_host(cache, whole, FULL, SWA)
    assert cache.device.evict(FULL, 1)  # copies the full pages of `node`
    cache.tree.evict(whole, DEVICE, FULL, NO_DEMAND)
    cache.complete_all()
    assert cache.tree.victim(HOST, SWA, 1) == (node, SWA)


@pytest.mark.parametrize("evicts_whole", [True, False])
def test_a_load_back_of_a_state_locks_the_full_pages_on_the_host_in_sglang(*, evicts_whole):
    rules = Rules(evicts_whole=evicts_whole)
    cache = cache_of(0, host=ROOMY, has_states=True, rules=rules)
    node = node_of(cache, 0)
    cache.tree.residency.drop(node, DEVICE, MAMBA, [])
    _, acquired = cache.begin(9)
    assert acquired.load_back is not None
    assert node.locks[HOST][FULL] == evicts_whole


@pytest.mark.parametrize(("evicts_whole", "left"), [(False, 2), (True, 1)])
def test_a_window_copied_to_a_full_host_evicts_the_shortfall_or_in_sglang_its_whole_size(
    left, *, evicts_whole
):
    rules = Rules(evicts_whole=evicts_whole)
    cache = make_cache(device=(40, 40, 0), host=(40, 4, 0), window_len=8, rules=rules)
    for first, num_tokens in ((100, 4), (200, 4), (300, 4), (400, 8)):
        cache.serve(num_tokens, first)
        cache.move_to_host()
    assert cache.resident(HOST)[SWA] == 2 + left


@pytest.mark.parametrize("is_sglang", [True, False])
def test_a_host_copy_of_device_data_is_dropped_before_a_host_only_leaf_in_sglang(*, is_sglang):
    rules = Rules(evicts_whole=is_sglang)
    cache = in_sglang(0, 100, num_tokens=16, device=(20, 0, 0), rules=rules)
    cache.evict_all(DEVICE, FULL)
    load(cache, 16, 100)
    assert cache.host.allocate(FULL, 4) is not None
    (held,) = [node for node in cache.tree.nodes() if node.held[HOST][FULL] is not None]
    assert held.edge == tokens_of(16, 0 if is_sglang else 100)


@pytest.mark.parametrize(("evicts_whole", "host_pages"), [(True, 4), (False, 0)])
def test_write_back_of_an_evicted_state_copies_its_full_pages_too_in_sglang(
    host_pages, *, evicts_whole
):
    cache = in_sglang(has_states=True, rules=Rules(evicts_whole=evicts_whole))
    upper, _ = cache.path_of(4, 8)
    assert cache.device.evict(MAMBA, 1)
    assert (upper.held[DEVICE][MAMBA], upper.held[HOST][MAMBA] is None) == (None, False)
    assert len(upper.held[HOST][FULL] or []) == host_pages


def test_a_host_copy_keeps_its_eviction_order_although_its_window_is_locked_in_sglang():
    cache = in_sglang(0, 100, num_tokens=4, window_len=4)
    node, other = node_of(cache, 0), node_of(cache, 100)
    lock = cache.tree.lock_host(node, {SWA: 0})
    put_on_host(cache, node, FULL)
    put_on_host(cache, other, FULL)
    cache.tree.release(lock)
    cache.tree.lock(node)  # neither is a leaf that may leave the device
    cache.tree.lock(other)
    assert cache.host.evict_one(FULL, 1)
    assert node.held[HOST][FULL] is None
    assert other.held[HOST][FULL] is not None


def test_the_copy_of_the_lower_half_of_a_split_node_is_dropped_first_in_sglang():
    cache = in_sglang(window_len=8)
    page_ids = cache.pools[HOST][FULL].allocate(4)
    assert page_ids is not None
    sequence = Sequence(tokens_of(16))
    assert cache.acquire(sequence, cache.match(sequence, 1)) is not None
    assert cache.extend(sequence, 16)
    cache.leave_window(sequence, 16)  # its window begins at page 1
    cache.insert_host(cache.tree.root(""), sequence, [page_ids, [], []])
    cache.publish(sequence, 4)
    assert [node.end for node in cache.tree.residency.duplicates] == [4, 1]


@pytest.mark.parametrize(
    ("evicts_whole", "window_len", "num_pages", "inserted"),
    [(True, 0, 4, [2, 0]), (False, 0, 4, [4, 0]), (True, 8, 2, [0, 0])],
)
def test_under_write_back_the_host_drops_prefetched_pages_that_the_device_holds_in_sglang(
    evicts_whole, window_len, num_pages, inserted
):
    rules = Rules(evicts_whole=evicts_whole)
    cache = in_sglang(0, window_len=window_len, rules=rules)
    counts = (num_pages, 2 * (window_len > 0))
    page_ids = [cache.pools[HOST][kind].allocate(n) or [] for kind, n in enumerate(counts)]
    anchor, sequence = cache.tree.root(""), Sequence(tokens_of(num_pages * PAGE))
    assert cache.insert_host(anchor, sequence, [*page_ids, []]) == inserted[0]
    assert [pool.num_taken for pool in cache.pools[HOST]][:2] == inserted
    assert (cache.node_at(2).held[HOST][FULL] is None) is evicts_whole
