"""Pages that are on both tiers: under write_back the host's copy may go when room is short."""

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.events import NO_DEMAND
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.sequence import Sequence
from hicache.config import QuirksConfig
from tests.cache.small import complete_all, evict_all, make_cache, node_at, run_request, tokens_of


def on_both_tiers(policy: str) -> tuple[PrefixCache, Node, Node]:
    """Four pages and four below them, on the device and on a host that has no room for more."""
    cache = make_cache(device=(20, 0, 0), host=(8, 0, 0), write_policy=policy)
    for num_tokens in (16, 32):
        run_request(cache, tokens_of(num_tokens), num_tokens)
    complete_all(cache)
    evict_all(cache, DEVICE, FULL)
    sequence = Sequence(tokens_of(33))
    assert cache.acquire(sequence, cache.match(sequence, 33)) is not None
    cache.abandon(sequence)
    complete_all(cache)
    return cache, node_at(cache, 4), node_at(cache, 8)


def test_the_copy_of_what_stays_on_the_device_goes_before_that_of_a_leaf() -> None:
    cache, upper, leaf = on_both_tiers("write_back")
    assert cache.host.allocate(FULL, 4) is not None
    assert upper.held[HOST][FULL] is None
    assert upper.held[DEVICE][FULL] is not None
    assert leaf.held[HOST][FULL] is not None


def test_the_copy_of_a_leaf_goes_where_there_is_no_other() -> None:
    cache, upper, leaf = on_both_tiers("write_back")
    assert cache.host.allocate(FULL, 8) is not None
    assert [node.held[HOST][FULL] for node in (upper, leaf)] == [None, None]
    assert cache.host.allocate(FULL, 1) is None


def test_the_copies_of_both_halves_of_a_node_that_was_split_may_go() -> None:
    cache, _, _ = on_both_tiers("write_back")
    assert cache.match(Sequence(tokens_of(25)), 25).usable_len == 24
    assert cache.tree.num_nodes == 3
    assert cache.host.allocate(FULL, 8) is not None


def test_a_copy_that_was_made_in_advance_stays() -> None:
    cache, upper, leaf = on_both_tiers("write_through")
    assert cache.host.allocate(FULL, 1) is None
    assert upper.held[HOST][FULL] is not None
    assert leaf.held[HOST][FULL] is not None


def test_a_copy_that_is_locked_stays() -> None:
    cache, _, leaf = on_both_tiers("write_back")
    lock = cache.tree.lock_host(leaf, {FULL: 0})
    assert cache.host.allocate(FULL, 1) is None
    cache.tree.release(lock)
    assert cache.host.allocate(FULL, 8) is not None


def test_in_the_preset_of_sglang_a_copy_that_the_device_holds_too_goes_before_a_leaf() -> None:
    for evicts_whole, is_kept in ((True, True), (False, False)):
        cache = make_cache(
            device=(20, 0, 0),
            host=(8, 0, 0),
            write_policy="write_back",
            quirks=QuirksConfig(evicts_whole=evicts_whole),
        )
        for first in (0, 100):
            run_request(cache, tokens_of(16, first), 16)
        evict_all(cache, DEVICE, FULL)
        sequence = Sequence(tokens_of(17, 100))
        assert cache.acquire(sequence, cache.match(sequence, 17)) is not None
        cache.abandon(sequence)
        complete_all(cache)
        assert cache.host.allocate(FULL, 4) is not None
        held = [node.held[HOST][FULL] is not None for node in cache.tree.nodes()]
        assert held.count(True) == 1
        assert (cache.match(Sequence(tokens_of(17)), 17).usable_len == 16) is is_kept


@pytest.mark.parametrize(("evicts_whole", "host_pages"), [(True, 4), (False, 0)])
def test_in_the_preset_of_sglang_a_state_that_leaves_takes_the_pages_of_its_node_along(
    *, evicts_whole: bool, host_pages: int
) -> None:
    quirks = QuirksConfig(evicts_whole=evicts_whole)
    cache = make_cache(
        device=(20, 0, 9), host=(8, 0, 9), has_states=True, write_policy="write_back", quirks=quirks
    )
    for num_tokens in (16, 32):
        run_request(cache, tokens_of(num_tokens), num_tokens)
    complete_all(cache)
    assert cache.device.evict(MAMBA, 1)
    upper = node_at(cache, 4)
    assert upper.held[DEVICE][MAMBA] is None
    assert upper.held[HOST][MAMBA] is not None
    assert len(upper.held[HOST][FULL] or []) == host_pages


def publish_a_window_from_page_1(*, has_window: bool) -> PrefixCache:
    """Four pages, twice at once: the second request holds its window from page 1 on."""
    cache = make_cache(device=(20, 20, 0), window_len=8)
    first, second = (Sequence(tokens_of(16)) for _ in range(2))
    for sequence in (first, second):
        assert cache.acquire(sequence, cache.match(sequence, 16)) is not None
        assert cache.extend(sequence, 16)
    cache.leave_window(second, 15)
    cache.finish(first, 4)
    if not has_window:
        cache.tree.evict(node_at(cache, 2), DEVICE, SWA, NO_DEMAND)
    cache.finish(second, 4)
    return cache


def test_a_node_that_has_its_window_is_not_split_where_the_window_of_a_request_begins() -> None:
    cache = publish_a_window_from_page_1(has_window=True)
    assert sorted(node.end for node in cache.tree.nodes()) == [2, 4]
    assert cache.pools[DEVICE][SWA].num_taken == 4


def test_a_node_without_a_window_is_split_where_the_window_of_a_request_begins() -> None:
    cache = publish_a_window_from_page_1(has_window=False)
    assert sorted(node.end for node in cache.tree.nodes()) == [1, 2, 4]
    assert node_at(cache, 1).held[DEVICE][SWA] is None
    assert node_at(cache, 2).held[DEVICE][SWA] is not None


def in_the_preset_of_sglang(**more: int) -> PrefixCache:
    quirks = QuirksConfig(evicts_whole=True)
    return make_cache(
        device=(20, 20, 0), host=(8, 8, 0), write_policy="write_back", quirks=quirks, **more
    )


def test_in_the_preset_of_sglang_a_locked_window_does_not_keep_a_copy_from_its_place() -> None:
    cache = in_the_preset_of_sglang(window_len=4)
    for first in (0, 100):
        run_request(cache, tokens_of(4, first), 4)
    node, other = (cache.tree.root("").children[tokens_of(4, first)] for first in (0, 100))
    lock = cache.tree.lock_host(node, {SWA: 0})
    for each in (node, other):
        page_ids = cache.pools[HOST][FULL].allocate(1)
        assert page_ids is not None
        cache.tree.residency.put(each, HOST, FULL, page_ids)
    cache.tree.release(lock)
    cache.tree.lock(node)  # neither is a leaf that may leave the device
    cache.tree.lock(other)
    assert cache.host.evict_one(FULL, 1)
    assert node.held[HOST][FULL] is None
    assert other.held[HOST][FULL] is not None


def test_in_the_preset_of_sglang_the_copy_of_the_lower_half_of_a_node_goes_first() -> None:
    cache = in_the_preset_of_sglang(window_len=8)
    page_ids = cache.pools[HOST][FULL].allocate(4)
    assert page_ids is not None
    sequence = Sequence(tokens_of(16))
    assert cache.acquire(sequence, cache.match(sequence, 1)) is not None
    assert cache.extend(sequence, 16)
    cache.leave_window(sequence, 16)  # from page 1 on
    cache.insert_host(cache.tree.root(""), sequence, [page_ids, [], []])
    cache.publish(sequence, 4)
    assert [node.end for node in cache.tree.residency.duplicates] == [4, 1]


@pytest.mark.parametrize("is_sglang", [True, False])
def test_under_write_back_sglang_gives_the_host_no_page_that_the_device_holds(
    *, is_sglang: bool
) -> None:
    quirks = QuirksConfig(evicts_whole=is_sglang)
    cache = make_cache(device=(20, 0, 0), host=(8, 0, 0), write_policy="write_back", quirks=quirks)
    run_request(cache, tokens_of(8), 8)
    page_ids = cache.pools[HOST][FULL].allocate(4)
    assert page_ids is not None
    anchor = cache.tree.root("")
    assert cache.insert_host(anchor, Sequence(tokens_of(16)), [page_ids, [], []]) == (
        2 if is_sglang else 4
    )
    assert (node_at(cache, 2).held[HOST][FULL] is None) is is_sglang
    assert node_at(cache, 4).held[HOST][FULL] is not None
    assert cache.pools[HOST][FULL].num_taken == (2 if is_sglang else 4)


def test_sglang_frees_a_window_that_it_read_for_pages_that_only_the_device_holds() -> None:
    cache = in_the_preset_of_sglang(window_len=8)
    run_request(cache, tokens_of(8), 8)
    page_ids = [cache.pools[HOST][kind].allocate(2) or [] for kind in (FULL, SWA)]
    cache.insert_host(cache.tree.root(""), Sequence(tokens_of(8)), [*page_ids, []])
    assert [pool.num_taken for pool in cache.pools[HOST]] == [0, 0, 0]
