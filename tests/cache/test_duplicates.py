"""Pages that are on both tiers: under write_back the host's copy may go when room is short."""

from hicache.cache.kinds import FULL
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.sequence import Sequence
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
