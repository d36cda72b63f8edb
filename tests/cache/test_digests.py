"""What ranks compare, and what a router asks: everything that matters shows, nothing changes."""

from random import Random

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tree.lookup import usable_len
from hicache.cache.tree.node import DEVICE
from hicache.cache.tree.sequence import Sequence
from hicache.config import PrefetchConfig, StageAt
from hicache.engine.ranks.agreement import (
    RankAgreement,
    RanksDivergedError,
    minimum_of,
    tree_digest,
)
from hicache.observe import invariants
from tests.cache.small import (
    PAGE,
    complete_all,
    evict_all,
    make_cache,
    prefetcher_of,
    run_request,
    tokens_of,
)

ROOMY = (99, 99, 99)


def cache_of(first: int = 0, namespace: str = "", num_tokens: int = 16) -> PrefixCache:
    cache = make_cache(device=ROOMY, host=(0, 0, 0))
    run_request(cache, tokens_of(num_tokens, first), num_tokens, namespace=namespace)
    return cache


def test_equal_trees_have_equal_digests() -> None:
    assert tree_digest(cache_of().tree) == tree_digest(cache_of().tree)


@pytest.mark.parametrize(
    "what", ["tokens", "namespace", "length", "hits", "locks", "pages", "split"]
)
def test_whatever_differs_in_a_tree_shows_in_its_digest(what: str) -> None:
    other = cache_of(
        first=100 if what == "tokens" else 0,
        namespace="tenant" if what == "namespace" else "",
        num_tokens=12 if what == "length" else 16,
    )
    (node,) = other.tree.nodes()
    if what == "hits":
        node.uses += 1
    if what == "locks":
        other.tree.lock(node)
    if what == "pages":
        page_ids = node.held[DEVICE][FULL]
        assert page_ids is not None
        node.held[DEVICE][FULL] = page_ids[::-1]
    if what == "split":
        other.tree.match(tokens_of(8), 8)
    assert tree_digest(cache_of().tree) != tree_digest(other.tree)


def test_digests_are_of_62_bits() -> None:
    digests = [tree_digest(cache_of(first=100 * number).tree) for number in range(40)]
    assert len(set(digests)) == 40
    assert 2**61 <= max(digests) < 2**62


def test_whole_trees_are_compared_in_the_first_step_and_every_so_many_after_it() -> None:
    caches = cache_of(), cache_of()
    agreements = [
        RankAgreement(cache, prefetcher_of(cache, PrefetchConfig(), None), whole_digest_every=3)
        for cache in caches
    ]

    def step() -> None:
        minimum = minimum_of([each.pack(0) for each in agreements])
        for each in agreements:
            each.apply(minimum, 0)

    step()
    (node,) = caches[0].tree.nodes()
    node.uses += 1  # what a rank has done so far does not tell
    step()
    step()
    with pytest.raises(RanksDivergedError, match="after step 3"):
        step()


@pytest.mark.parametrize(
    ("window_len", "has_states"), [(0, False), (2 * PAGE, False), (0, True), (2 * PAGE, True)]
)
def test_asking_finds_what_a_match_finds_and_changes_nothing(
    window_len: int, *, has_states: bool
) -> None:
    rng = Random(3)
    cache = make_cache(device=ROOMY, host=ROOMY, window_len=window_len, has_states=has_states)
    prompts = []
    for number in range(12):
        before = rng.choice(prompts)[: rng.randrange(60)] if prompts else []
        prompts.append([*before, *(1000 * number + each for each in range(rng.randint(4, 24)))])
        tokens = _bytes(prompts[-1])
        run_request(cache, tokens, len(prompts[-1]), namespace=("", "tenant")[number % 2])
        complete_all(cache)
    cache.device.evict(MAMBA if has_states else FULL, 3)
    if window_len:
        cache.device.evict(SWA, 9)
        while cache.host.evict_one(SWA, 1):
            pass
    asked = 0
    for prompt in prompts:
        for namespace in ("", "tenant", "nobody"):
            tokens, max_len = _bytes(prompt), rng.randint(0, len(prompt))
            before_asking = tree_digest(cache.tree), cache.tree.residency.tick
            usable = usable_len(cache.tree, tokens, max_len, namespace)
            assert (tree_digest(cache.tree), cache.tree.residency.tick) == before_asking
            assert usable == cache.tree.match(tokens, max_len, namespace).usable_len
            asked += usable > 0
    assert asked > 5


def _bytes(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def test_room_for_states_is_counted_in_slots_and_other_room_in_tokens() -> None:
    cache = make_cache(device=(20, 20, 7), host=(0, 0, 0), window_len=PAGE, has_states=True)
    assert [cache.room(kind) for kind in (FULL, SWA, MAMBA)] == [20 * PAGE, 20 * PAGE, 7]
    run_request(cache, tokens_of(16), 16)
    assert cache.evictable_size(MAMBA) == 1
    assert cache.room(MAMBA) == 7


def test_every_prefetch_that_starts_is_counted() -> None:
    cache = make_cache(device=ROOMY, host=ROOMY, storage_queue_bytes=100)
    prefetcher = prefetcher_of(cache, PrefetchConfig(threshold=PAGE), None)
    for number in range(3):
        sequence = Sequence(tokens_of(17, 100 * number))
        match = cache.match(sequence, 17)
        assert prefetcher.prefetch_from_storage(number, sequence, match, 17, 0) is not None
    assert cache.counters["prefetch/started_count"] == 3


@pytest.mark.parametrize(("held", "restorable"), [(0, []), (1, [1]), (3, [1, 2, 3])])
def test_pages_that_lead_without_a_gap_can_be_restored(held: int, restorable: list[int]) -> None:
    cache = make_cache(device=ROOMY, host=ROOMY, storage_queue_bytes=100)
    prefetcher = prefetcher_of(cache, PrefetchConfig(threshold=PAGE), None)
    sequence = Sequence(tokens_of(21))
    prefetch = prefetcher.prefetch_from_storage(0, sequence, cache.match(sequence, 21), 21, 0)
    assert prefetch is not None
    assert prefetch.ask(lambda keys: [place != held for place in range(len(keys))]) == restorable


def test_a_prompt_too_short_to_ask_for_is_counted_with_its_tokens() -> None:
    cache = make_cache(device=ROOMY, host=ROOMY, storage_queue_bytes=100)
    prefetcher = prefetcher_of(cache, PrefetchConfig(threshold=4 * PAGE), None)
    sequence = Sequence(tokens_of(13))
    match = cache.match(sequence, 13)
    assert prefetcher.prefetch_from_storage(0, sequence, match, 13, 0) is None
    assert cache.counters["prefetch/declined_count"] == 1
    assert cache.counters["prefetch/started_count"] == 0


def test_a_window_across_two_nodes_is_found_and_loaded_back_whole() -> None:
    cache = make_cache(device=(20, 20, 0), host=(20, 20, 0), window_len=3 * PAGE)
    for num_tokens in (8, 16):
        run_request(cache, tokens_of(num_tokens), num_tokens)
        complete_all(cache)
    evict_all(cache, DEVICE, FULL)
    sequence = Sequence(tokens_of(17))
    match = cache.match(sequence, 17)
    assert (match.host_hit_length, match.swa_host_hit_length) == (16, 12)
    acquired = cache.acquire(sequence, match)
    assert acquired is not None
    assert acquired.load_back is not None
    assert acquired.load_back.counts == {FULL: 4, SWA: 3}
    assert cache.match(sequence, 17).device_prefix_len == 16
    assert min(sequence.pages[SWA][1:4]) >= 0
    cache.abandon(sequence)
    complete_all(cache)
    invariants.check_drained(cache, None)


def test_what_has_drained_keeps_every_law() -> None:
    cache = cache_of()
    cache.tree.num_nodes += 1
    with pytest.raises(invariants.BrokenLawError, match="law 6"):
        invariants.check_drained(cache, None)


@pytest.mark.parametrize(
    ("start", "end", "known"),
    [(2, 5, "abc"), (3, 4, "b"), (3, 5, "bc"), (2, 2, ""), (1, 3, None), (3, 6, None)],
)
def test_digests_are_known_of_the_pages_that_storage_was_asked_for(
    start: int, end: int, known: str | None
) -> None:
    sequence = Sequence(tokens_of(24))
    sequence.digests, sequence.digests_start = [b"a", b"b", b"c"], 2
    wanted = None if known is None else [letter.encode() for letter in known]
    assert sequence.known_digests(start, end) == wanted


def test_digests_that_storage_was_asked_with_become_those_of_nodes() -> None:
    cache = make_cache(device=ROOMY, host=ROOMY, storage_queue_bytes=0)
    prefetcher = prefetcher_of(cache, PrefetchConfig(threshold=PAGE), None)
    sequence = Sequence(tokens_of(17))
    prefetch = prefetcher.prefetch_from_storage(0, sequence, cache.match(sequence, 17), 17, 0)
    assert prefetch is not None
    assert cache.acquire(sequence, cache.match(sequence, 17)) is not None
    assert cache.extend(sequence, 17)
    cache.publish(sequence, 4)
    (node,) = cache.tree.nodes()
    assert node.digests == prefetch.names
    assert len(prefetch.names) == 4


def test_a_prefetch_that_finds_all_its_room_is_not_cut() -> None:
    cache = make_cache(device=ROOMY, host=ROOMY, storage_queue_bytes=100)
    config = PrefetchConfig(threshold=PAGE, stage_at=StageAt.enqueue)
    sequence = Sequence(tokens_of(17))
    match = cache.match(sequence, 17)
    prefetcher_of(cache, config, None).prefetch_from_storage(0, sequence, match, 17, 0)
    assert cache.counters["prefetch/staged_pages"] == 4
    assert cache.counters["prefetch/cut_count"] == 0
