"""Models with more kinds of data: index keys in full pages, a second window, attention chunks.

Random walks, with splits, aborts and three tiers, are compared with the naive cache, which reads
the extent of each kind page by page.
"""

from dataclasses import replace
from itertools import chain, combinations
from random import Random

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA, Extent, Kind, Kinds
from hicache.memory import refuse_unless_possible
from tests.cache.small import make_cache
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
    """Settings of a walk in small pools of these kinds; the write queue is often full."""
    drawn = random_setting(seed)
    rng = Random(f"kinds {seed}")
    kinds = kinds_of(others)
    windows = {kind: window.num_pages for kind, window in (*kinds.windows, *kinds.replayed)}
    sizes = [(0, 0)] * kinds.size
    for kind in kinds.numbers:
        least = {FULL: 8, MAMBA: 4}.get(kind, windows.get(kind, 0) + 2)
        sizes[kind] = rng.randint(least, least + 12), rng.randint(0, least + 18)
    device, host = zip(*sizes, strict=True)
    unused = ("window_len", "has_states", "page_size")
    cache = {name: value for name, value in drawn.cache.items() if name not in unused}
    cache |= {"kinds": kinds, "device": device, "host": host}
    cache["storage_queue_bytes"] = rng.choice([None, 200, 100_000, 100_000])
    return replace(drawn, cache=cache)


@pytest.mark.parametrize("others", SUBSETS, ids=lambda each: "+".join(k.name for k in each))
def test_a_cache_of_any_mix_of_kinds_agrees_with_the_naive_cache(others: tuple[Kind, ...]) -> None:
    Walk(setting_of(len(others), others)).run(150)


@pytest.mark.soak
@pytest.mark.parametrize("others", SUBSETS, ids=lambda each: "+".join(k.name for k in each))
def test_a_cache_of_any_mix_of_kinds_agrees_with_the_naive_cache_on_long_walks(
    others: tuple[Kind, ...],
) -> None:
    for seed in range(25):  # of 27 subsets: 170,000 operations
        Walk(setting_of(seed, others)).run(250)


@pytest.mark.parametrize(("num_tokens", "start"), [(33, 24), (18, 8), (7, 0)])
def test_a_window_that_is_not_cached_is_recomputed_from_the_last_tokens_of_a_hit(num_tokens, start):
    cache = make_cache(kinds=kinds_of(REPLAYED[:1]), device=(20, 20), host=(20, 0))
    cache.serve(32)
    assert cache.available_size(SWA) == 20 * 4
    sequence, acquired = cache.begin(num_tokens)
    hit_len = (num_tokens - 1) // 4 * 4
    assert (acquired.cached_len, acquired.device_len) == (start, start)
    assert len(sequence.pages[SWA]) == hit_len // 4
    assert cache.available_size(SWA) == 20 * 4 - (hit_len - start)


def test_index_keys_add_their_bytes_to_full_pages_and_have_no_pool() -> None:
    kinds = kinds_of((KEYS,))
    assert kinds.numbers == (FULL,)
    assert kinds.page_bytes[FULL] == 11 + 5


@pytest.mark.parametrize(
    ("others", "message"),
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
def test_kinds_that_no_cache_can_hold_together_are_rejected(
    others: tuple[Kind, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_unless_possible((FULL_KV, *others), page_size=4)
