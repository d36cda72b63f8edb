"""What ranks offer, what they take from it, and what happens to one that does as it likes."""

from itertools import product

import numpy as np
import pytest

from hicache.cache.agreement import (
    Landed,
    RankAgreement,
    RanksDivergedError,
    TracedAllocator,
    minimum_of,
    offer,
    taken,
    traffic_digest,
    tree_digest,
)
from hicache.cache.eviction import Lru
from hicache.cache.node import DEVICE, FULL, HOST, MAMBA, SWA
from hicache.cache.prefetch import Prefetch
from hicache.cache.prefetcher import Prefetcher
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.sequence import Sequence
from hicache.cache.tree import RadixTree
from hicache.config import HitAgreement, PrefetchConfig

PAGE = 4
SECOND = 1_000_000_000


def agreed(*sets: list[int], num_pages: int, rule: HitAgreement = HitAgreement.restorable) -> int:
    minimum = minimum_of([offer(lengths, num_pages, rule) for lengths in sets])
    return max(taken(minimum, rule), default=0)


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        # in pages; length 0 is always common and is not offered
        ([1, 2, 4], [1, 4], 4),
        ([2], [1], 0),
        ([8, 16], [8, 12, 16], 16),  # {512, 1024} and {512, 768, 1024} tokens at page 64
        ([8, 12], [8, 16], 8),  # {512, 768} and {512, 1024}
        ([], [1, 2], 0),
        ([3], [3], 3),
    ],
)
def test_ranks_take_the_longest_prefix_that_all_can_restore(
    first: list[int], second: list[int], wanted: int
) -> None:
    assert agreed(first, second, num_pages=16) == wanted


def test_the_min_of_maxima_names_a_prefix_that_a_rank_cannot_restore() -> None:
    rule = HitAgreement.min_of_maxima
    assert agreed([2], [1], num_pages=2, rule=rule) == 1  # which the first rank cannot


def test_what_is_agreed_is_the_longest_of_the_intersection_for_all_small_sets() -> None:
    every = [[length for length in (1, 2, 3) if bits >> length & 1] for bits in range(0, 16, 2)]
    for first, second, third in product(every, repeat=3):
        common = set(first) & set(second) & set(third)
        assert agreed(first, second, third, num_pages=3) == max(common, default=0)


def test_an_offer_is_as_long_whatever_a_rank_holds() -> None:
    lengths = {len(offer(held, 7, HitAgreement.restorable)) for held in ([], [7], [1, 2, 3])}
    assert lengths == {7}


def test_offers_of_different_lengths_are_refused() -> None:
    with pytest.raises(RanksDivergedError, match=r"\[1, 2\]"):
        minimum_of([[1], [1, 2]])


class Rank:
    """A cache of one rank and its part in the agreement."""

    def __init__(
        self,
        *,
        stop: str = "wait_complete",
        window_len: int = 0,
        has_states: bool = False,
    ) -> None:
        tree = RadixTree(page_size=PAGE, policy=Lru(), window_len=window_len, has_states=has_states)
        pools = tuple([TracedAllocator(32) for _ in range(3)] for _ in range(2))
        self.cache = PrefixCache(
            tree,
            pools,  # type: ignore[arg-type]
            page_bytes=(1, 1, 1),
            storage_queue_bytes=1000,
        )
        config = PrefetchConfig(
            stop=stop, threshold=PAGE, timeout_base_s=1.0, timeout_per_ki_token_s=0
        )
        self.prefetcher = Prefetcher(self.cache, config, host_tokens=None)
        self.agreement = RankAgreement(self.cache, self.prefetcher)

    def start(self, *, request_id: int = 0, num_pages: int = 4) -> Prefetch:
        tokens = np.arange(num_pages * PAGE + 1, dtype="<i4") + request_id * 1000
        sequence = Sequence(tokens.tobytes())
        match = self.cache.match(sequence, len(tokens))
        prefetch = self.prefetcher.prefetch_from_storage(
            request_id, sequence, match, len(tokens), 0
        )
        assert prefetch is not None
        return prefetch

    def start_reading(self, *, num_pages: int = 4) -> Prefetch:
        prefetch = self.start(num_pages=num_pages)
        prefetch.restorable = [num_pages]
        self.prefetcher.on_queried(prefetch)
        return prefetch

    def free(self) -> list[int]:
        return [pool.num_free for tier in (DEVICE, HOST) for pool in self.cache.pools[tier]]


def step(*ranks: Rank, now_ns: int | tuple[int, ...] = 0) -> list[list[int]]:
    """One step's agreement; returns what each rank is told to drop."""
    clocks = now_ns if isinstance(now_ns, tuple) else (now_ns,) * len(ranks)
    minimum = minimum_of(
        [rank.agreement.pack(clock) for rank, clock in zip(ranks, clocks, strict=True)]
    )
    return [rank.agreement.apply(minimum) for rank in ranks]


def test_only_news_that_every_rank_has_is_acted_on() -> None:
    ahead, behind = Rank(), Rank()
    first, second = ahead.start(), behind.start()
    ahead.agreement.answers.append(Landed(first, restorable=[4]))
    step(ahead, behind)
    assert first.restorable is None
    behind.agreement.answers.append(Landed(second, restorable=[4]))
    step(ahead, behind)
    assert first.restorable == second.restorable == [4]


def test_answers_and_news_of_reads_may_arrive_in_either_order() -> None:
    ranks = Rank(), Rank()
    reading = [rank.start_reading() for rank in ranks]
    asking = [rank.start(request_id=1) for rank in ranks]
    read = [Landed(each, completed_pages=4, is_read=True) for each in reading]
    answered = [Landed(each, restorable=[]) for each in asking]
    ranks[0].agreement.progress.append(read[0])
    ranks[1].agreement.answers.append(answered[1])
    step(*ranks)
    ranks[0].agreement.answers.append(answered[0])
    ranks[1].agreement.progress.append(read[1])
    step(*ranks)
    step(*ranks)  # compares what the step before has made of them
    assert tree_digest(ranks[0].cache.tree) == tree_digest(ranks[1].cache.tree)


def test_a_prefetch_stops_when_all_ranks_can() -> None:
    early, late = (Rank(stop="timeout") for _ in range(2))
    for rank in (early, late):
        rank.start_reading()
    past, not_yet = 2 * SECOND, SECOND // 2
    step(early, late, now_ns=(past, not_yet))
    assert not early.prefetcher.check(0, past)
    assert not late.prefetcher.check(0, not_yet)
    step(early, late, now_ns=(past, past))
    assert early.prefetcher.check(0, past)
    assert late.prefetcher.check(0, past)


@pytest.mark.parametrize("stop", ["wait_complete", "timeout"])
@pytest.mark.parametrize("state", ["with a state", "without"])
@pytest.mark.parametrize("completed", list(product([1, 4], repeat=2)))
def test_what_keeps_a_request_waiting_is_what_it_is_told(
    completed: tuple[int, int], state: str, stop: str
) -> None:
    ranks = tuple(Rank(stop=stop, has_states=state == "with a state") for _ in range(2))
    for rank, pages in zip(ranks, completed, strict=True):
        rank.start_reading().completed_pages = pages
    for now_ns in (0, 2 * SECOND):
        step(*ranks, now_ns=now_ns)
        for rank in ranks:
            is_blocked = rank.prefetcher.is_blocking(0, now_ns)
            assert rank.prefetcher.check(0, now_ns) is not is_blocked


def test_a_request_that_one_rank_knows_to_be_gone_is_dropped_by_all_in_one_step() -> None:
    ranks = Rank(), Rank(), Rank()
    for rank in ranks:
        rank.start_reading()
    ranks[1].agreement.ask_abort(0)
    assert step(*ranks) == [[0], [0], [0]]


def test_best_effort_does_not_wait_for_a_vote() -> None:
    rank = Rank(stop="best_effort")
    rank.start_reading()
    assert rank.prefetcher.check(0, 0)


def test_complete_pages_wait_for_sidecars_that_another_rank_has_not_read() -> None:
    ranks = tuple(Rank(stop="timeout", has_states=True) for _ in range(2))
    late = 10 * SECOND
    for rank in ranks:
        prefetch = rank.start_reading()
        rank.agreement.progress.append(Landed(prefetch, completed_pages=4))
    # the deadline has passed for pages that were incomplete when all voted, and are complete now
    step(*ranks, now_ns=late)
    assert not any(rank.prefetcher.check(0, late) for rank in ranks)
    step(*ranks, now_ns=late)
    assert not any(rank.prefetcher.check(0, late) for rank in ranks)


@pytest.mark.parametrize("missing", ["swa", "mamba"])
def test_sidecars_that_one_rank_lacks_are_published_by_none(missing: str) -> None:
    ranks = tuple(
        Rank(window_len=8 if missing == "swa" else 0, has_states=missing == "mamba")
        for _ in range(2)
    )
    free = ranks[0].free()
    for rank in ranks:
        prefetch = rank.start_reading()
        (is_found,) = minimum_of([[1], [0]])  # by the first rank and not by the second
        rank.agreement.progress.append(
            Landed(prefetch, completed_pages=4, sidecars_found=bool(is_found), is_read=True)
        )
    step(*ranks)
    kind = SWA if missing == "swa" else MAMBA
    for rank in ranks:
        assert rank.cache.tree.residency.resident[HOST][kind] == 0
        assert rank.cache.tree.residency.resident[HOST][FULL] == 0
        assert rank.free() == free


def test_a_rank_whose_tree_differs_is_found_in_the_next_step() -> None:
    ranks = Rank(), Rank()
    step(*ranks)
    for rank, num_pages in zip(ranks, (3, 4), strict=True):
        rank.start_reading(num_pages=num_pages)
    with pytest.raises(RanksDivergedError, match="differ after step 1"):
        step(*ranks)


def test_a_rank_that_takes_another_page_is_found_though_trees_are_equal() -> None:
    ranks = Rank(), Rank()
    ranks[1].cache.pools[DEVICE][FULL].allocate(1)
    assert tree_digest(ranks[0].cache.tree) == tree_digest(ranks[1].cache.tree)
    assert traffic_digest(ranks[0].cache) != traffic_digest(ranks[1].cache)
    with pytest.raises(RanksDivergedError):
        step(*ranks)


def two_back_ups(rank: Rank) -> list[object]:
    tokens = np.arange(8 * PAGE, dtype="<i4").tobytes()
    for num_pages in (4, 8):
        sequence = Sequence(tokens)
        match = rank.cache.match(sequence, num_pages * PAGE)
        rank.cache.acquire(sequence, match)
        assert rank.cache.extend(sequence, num_pages * PAGE)
        rank.cache.finish(sequence, num_pages)
    for copy in rank.cache.outbox:
        rank.agreement.submitted(copy)
    return list(rank.cache.outbox)


def test_copies_are_complete_in_the_order_in_which_they_began() -> None:
    ranks = Rank(), Rank()
    (early, late), (other_early, other_late) = (two_back_ups(rank) for rank in ranks)
    ranks[0].agreement.copied(early)  # type: ignore[arg-type]
    ranks[1].agreement.copied(other_late)  # type: ignore[arg-type]
    step(*ranks)
    assert [rank.cache.in_flight for rank in ranks] == [{early, late}, {other_early, other_late}]
    ranks[1].agreement.copied(other_early)  # type: ignore[arg-type]
    minimum = minimum_of([rank.agreement.pack(0) for rank in ranks])
    assert minimum[2:5] == [0, 1, 0]  # load-backs, back-ups, writes


def test_the_offer_of_a_step_keeps_its_length_while_prefetches_come() -> None:
    rank = Rank()
    empty = rank.agreement.pack(0)
    rank.start(request_id=1)
    rank.start(request_id=2)
    assert len(rank.agreement.pack(0)) == len(empty)
