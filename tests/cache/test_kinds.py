"""Kinds of one test: the usual three, a rider of full, a window of another length, and chunks.

A kind is data, so that the cache takes both without a change. Random walks, with splits, aborts and
three tiers, are compared with the naive cache, which reads each kind's extent page by page.
"""

from dataclasses import replace
from itertools import chain, combinations
from random import Random

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA, Extent, Kind, Kinds
from hicache.cache.pages import FreePages, free
from hicache.cache.tree.node import DEVICE
from hicache.cache.tree.sequence import Sequence
from hicache.memory import refuse_unless_possible
from tests.cache.oracle import flatten
from tests.cache.small import complete_all, make_cache, node_at, run_request, tokens_of
from tests.cache.walk import Setting, Walk, random_setting

WIDE = 3  # the number of the second window
FULL_KV = Kind(name="full", number=FULL, page_bytes=11)
KEYS = Kind(name="index keys", rider_of="full", page_bytes=5)
OTHERS = (
    Kind(name="swa", number=SWA, extent=Extent.window, window_len=6, page_bytes=3),
    Kind(name="mamba", number=MAMBA, extent=Extent.point, page_bytes=70),
    Kind(name="wide", number=WIDE, extent=Extent.window, window_len=13, page_bytes=2),
    KEYS,
)
CHUNKS = Kind(name="chunk", number=4, extent=Extent.chunk, window_len=12, page_bytes=4)
REPLAYED = tuple(replace(kind, is_replayed=True) for kind in (OTHERS[0], OTHERS[2], CHUNKS))
SUBSETS = list(chain.from_iterable(combinations(OTHERS, size) for size in range(5)))
SUBSETS += [(CHUNKS, *some) for some in SUBSETS if KEYS not in some]
SUBSETS += [REPLAYED[:1], REPLAYED[1:], REPLAYED]


def kinds_of(others: tuple[Kind, ...], page_size: int = 4) -> Kinds:
    return Kinds((FULL_KV, *others), page_size)


def setting_of(seed: int, others: tuple[Kind, ...]) -> Setting:
    """A walk in small pools of these kinds; the write queue is often full."""
    drawn = random_setting(seed)
    rng = Random(f"kinds {seed}")
    kinds = kinds_of(others)
    windows = {kind: window.num_pages for kind, window in (*kinds.windows, *kinds.replayed)}
    sizes = []
    for kind in range(kinds.size):
        least = {FULL: 8, MAMBA: 4}.get(kind, windows.get(kind, 0) + 2)
        device = rng.randint(least, least + 12) if kind in kinds.numbers else 0
        host = rng.randint(0, least + 18) if kind in kinds.numbers else 0
        sizes.append((device, host))
    device, host = zip(*sizes, strict=True)
    unused = ("window_len", "has_states", "page_size")
    cache = {name: value for name, value in drawn.cache.items() if name not in unused}
    cache |= {"kinds": kinds, "device": device, "host": host}
    cache["storage_queue_bytes"] = rng.choice([None, 200, 100_000, 100_000])
    return replace(drawn, cache=cache)


@pytest.mark.parametrize("others", SUBSETS, ids=lambda each: "+".join(k.name for k in each))
def test_a_walk_of_any_kinds_says_what_the_naive_cache_says(others: tuple[Kind, ...]) -> None:
    Walk(setting_of(len(others), others)).run(150)


@pytest.mark.soak
@pytest.mark.parametrize("others", SUBSETS, ids=lambda each: "+".join(k.name for k in each))
def test_many_walks_of_any_kinds_say_what_the_naive_cache_says(others: tuple[Kind, ...]) -> None:
    for seed in range(25):  # of 27 subsets: 170,000 operations
        Walk(setting_of(seed, others)).run(250)


def test_a_tree_that_forgets_the_second_window_is_found_out() -> None:
    def forgetful(seed: int) -> Walk:
        walk = Walk(setting_of(seed, OTHERS))
        walk.tree._windows = walk.tree._windows[:1]
        return walk

    with pytest.raises((AssertionError, ValueError)):  # noqa: PT012 - whichever walk meets it
        for seed in range(10):
            forgetful(seed).run(100)


def test_a_hit_needs_both_windows() -> None:
    cache = make_cache(kinds=kinds_of(OTHERS), device=(20, 20, 6, 20), host=(0, 0, 0, 0))
    run_request(cache, tokens_of(32), 32)
    again = Sequence(tokens_of(33))
    assert cache.match(again, 33).usable_len == 32
    assert cache.device.evict(WIDE, 5)
    assert cache.match(again, 33).usable_len == 0
    assert any(flatten(cache.tree)[DEVICE][SWA])


def test_a_window_that_is_not_kept_is_computed_again_before_the_end_of_any_hit() -> None:
    cache = make_cache(kinds=kinds_of(REPLAYED[:1]), device=(20, 20), host=(20, 0))
    run_request(cache, tokens_of(32), 32)
    assert cache.available_size(SWA) == 20 * 4
    for tokens, started in ((33, 24), (18, 8), (7, 0)):
        sequence = Sequence(tokens_of(tokens))
        match = cache.match(sequence, tokens)
        assert match.usable_len == (tokens - 1) // 4 * 4
        acquired = cache.acquire(sequence, match)
        assert acquired is not None
        assert (acquired.cached_len, acquired.device_len) == (started, started)
        assert len(sequence.pages[SWA]) == match.usable_len // 4
        assert cache.available_size(SWA) == 20 * 4 - (match.usable_len - started)
        cache.abandon(sequence)


def test_a_second_window_is_loaded_back_by_itself() -> None:
    cache = make_cache(kinds=kinds_of(OTHERS), device=(20, 20, 6, 20), host=(20, 20, 6, 20))
    run_request(cache, tokens_of(32), 32)
    complete_all(cache)
    actions: list[FreePages] = []
    cache.tree.residency.drop(node_at(cache, 6), DEVICE, WIDE, actions)
    free(actions, cache.pools)
    again = Sequence(tokens_of(33))
    match = cache.match(again, 33)
    assert match.host_hits == (0, 0, 0, 8)
    acquired = cache.acquire(again, match)
    assert acquired is not None
    assert acquired.load_back is not None
    assert acquired.load_back.counts == {WIDE: 2}
    assert cache.counters["transfer/load_back_bytes"] == 2 * 2


def test_a_rider_moves_with_the_pages_of_its_kind_and_has_no_pool() -> None:
    cache = make_cache(kinds=kinds_of((KEYS,)), device=(20, 0, 0), host=(20, 0, 0))
    assert cache.tree.kinds.numbers == (FULL,)
    run_request(cache, tokens_of(32), 32)
    assert cache.counters["transfer/back_up_bytes"] == 8 * (11 + 5)


@pytest.mark.parametrize(
    ("others", "refusal"),
    [
        ((replace(KEYS, rider_of="draft"),), "index keys rides on draft"),
        ((replace(OTHERS[0], extent=Extent.path),), "full must be the only path"),
        ((OTHERS[1], replace(OTHERS[1], name="other", number=WIDE)), "a second point must ride"),
        ((OTHERS[0], replace(OTHERS[0], window_len=9)), "one name or number"),
        ((OTHERS[0], replace(OTHERS[2], number=SWA)), "one name or number"),
        ((replace(OTHERS[0], window_len=0),), "a window must have tokens"),
        ((REPLAYED[0], OTHERS[1]), "replay needs a model without states"),
        ((replace(CHUNKS, window_len=10),), "divide the chunks of chunk, 10 tokens, got 4"),
        ((replace(OTHERS[2], number=8),), r"numbers must lie in \[0, 8\), got \[0, 8\]"),
    ],
)
def test_kinds_that_no_cache_can_hold_together_are_refused(
    others: tuple[Kind, ...], refusal: str
) -> None:
    with pytest.raises(ValueError, match=refusal):
        refuse_unless_possible((FULL_KV, *others), page_size=4)
