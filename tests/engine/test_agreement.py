"""What ranks offer, what they take from it, and what happens to one that does as it likes."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.prefix_cache import PrefixCache
from hicache.cache.tiers.transfer import BackUp, LoadBack
from hicache.cache.tree.node import DEVICE, HOST, Node
from hicache.cache.tree.radix_tree import RadixTree
from hicache.cache.tree.sequence import Sequence
from hicache.config import HitAgreement, PrefetchConfig
from hicache.engine.ranks.agreement import (
    RankAgreement,
    RanksDivergedError,
    ReadProgress,
    TracedAllocator,
    minimum_of,
    offer,
    taken,
    traffic_digest,
    tree_digest,
)
from hicache.policies.policy import presets
from tests.cache.small import named_kinds, prefetcher_of, world_of

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
        num_pages: int = 32,
        whole_digest_every: int = 1,
    ) -> None:
        kinds = named_kinds(PAGE, window_len=window_len, has_states=has_states)
        tree = RadixTree(kinds=kinds)
        pools = tuple([TracedAllocator(num_pages) for _ in range(kinds.size)] for _ in range(2))
        self.cache = PrefixCache(
            tree,
            pools,  # type: ignore[arg-type]
            presets(world_of(kinds)).writes,
            storage_queue_bytes=1000,
        )
        config = PrefetchConfig(
            stop=stop, threshold=PAGE, timeout_base_s=1.0, timeout_per_ki_token_s=0
        )
        self.prefetcher = prefetcher_of(self.cache, config)
        self.agreement = RankAgreement(
            self.cache, self.prefetcher, whole_digest_every=whole_digest_every
        )

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


def step(*ranks: Rank, now_ns: int | tuple[int, ...] = 0) -> None:
    clocks = now_ns if isinstance(now_ns, tuple) else (now_ns,) * len(ranks)
    minimum = minimum_of(
        [rank.agreement.pack(clock) for rank, clock in zip(ranks, clocks, strict=True)]
    )
    for rank in ranks:
        rank.agreement.apply(minimum, 0)


def test_only_news_that_every_rank_has_is_acted_on() -> None:
    ahead, behind = Rank(), Rank()
    first, second = ahead.start(), behind.start()
    ahead.agreement.answers.append(ReadProgress(first, restorable=[4]))
    step(ahead, behind)
    assert first.restorable is None
    behind.agreement.answers.append(ReadProgress(second, restorable=[4]))
    step(ahead, behind)
    assert first.restorable == second.restorable == [4]


def test_answers_and_news_of_reads_may_arrive_in_either_order() -> None:
    ranks = Rank(), Rank()
    reading = [rank.start_reading() for rank in ranks]
    asking = [rank.start(request_id=1) for rank in ranks]
    read = [ReadProgress(each, completed_pages=4, is_read=True) for each in reading]
    answered = [ReadProgress(each, restorable=[]) for each in asking]
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


def test_best_effort_does_not_wait_for_a_vote() -> None:
    rank = Rank(stop="best_effort")
    rank.start_reading()
    assert rank.prefetcher.check(0, 0)


def test_complete_pages_wait_for_sidecars_that_another_rank_has_not_read() -> None:
    ranks = tuple(Rank(stop="timeout", has_states=True) for _ in range(2))
    late = 10 * SECOND
    for rank in ranks:
        prefetch = rank.start_reading()
        rank.agreement.progress.append(ReadProgress(prefetch, completed_pages=4))
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
            ReadProgress(prefetch, completed_pages=4, restored_pages=4 * is_found, is_read=True)
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


@pytest.mark.parametrize("num_prefetches", [0, 1, 65])
def test_every_prefetch_has_a_vote(num_prefetches: int) -> None:
    rank = Rank(stop="timeout", num_pages=200)
    for number in range(num_prefetches):
        rank.start(request_id=number, num_pages=1)
    packed = rank.agreement.pack(0)
    assert packed[5:-2] == [0] * num_prefetches
    assert packed[-2] == -packed[-1]
    assert 0 <= packed[-2] < 2**62


def test_trees_are_compared_whole_every_so_many_steps() -> None:
    ranks = Rank(whole_digest_every=3), Rank(whole_digest_every=3)
    for rank in ranks:
        two_back_ups(rank)
    step(*ranks)
    next(iter(ranks[0].cache.tree.nodes())).uses += 1  # which moves no page
    step(*ranks)
    step(*ranks)
    with pytest.raises(RanksDivergedError, match="differ after step 3"):
        step(*ranks)


def test_what_a_page_is_moved_for_tells_trees_apart() -> None:
    taken_alike, given_back, refused = (TracedAllocator(4) for _ in range(3))
    for pool in (taken_alike, given_back, refused):
        assert pool.traffic == 0
        pool.allocate(2)
    first = taken_alike.traffic
    assert first == given_back.traffic == refused.traffic != 0
    page_ids = given_back.allocate(1)
    assert page_ids is not None
    before = given_back.traffic
    given_back.free(page_ids)
    assert given_back.traffic not in (before, first)
    assert refused.allocate(9) is None
    assert refused.traffic != first


def test_news_of_a_prefetch_that_is_settled_leaves_its_pages_alone() -> None:
    rank = Rank(stop="timeout")
    prefetch = rank.start_reading()
    rank.prefetcher.abort(0)
    for news in (
        ReadProgress(prefetch, completed_pages=2),
        ReadProgress(prefetch, completed_pages=3, is_read=True),
    ):
        rank.agreement.progress.append(news)
        step(rank)
        assert prefetch.completed_pages == 0
    assert prefetch.is_read
    assert rank.prefetcher.lingering == set()


def test_what_was_read_and_when_is_passed_on() -> None:
    rank = Rank()
    prefetch = rank.start_reading()
    rank.agreement.progress.append(ReadProgress(prefetch, completed_pages=3))
    step(rank)
    assert (prefetch.completed_pages, prefetch.is_read, prefetch.read_ns) == (3, False, None)
    rank.agreement.progress.append(
        ReadProgress(prefetch, completed_pages=4, restored_pages=4, is_read=True, read_ns=(5, 9))
    )
    step(rank)
    assert (prefetch.completed_pages, prefetch.read_ns) == (4, (5, 9))
    assert prefetch.restored_pages == 4
    assert prefetch.published_pages == 4


def test_copies_of_each_sort_are_counted_apart() -> None:
    rank, other = Rank(), Rank()
    early, late = two_back_ups(rank)
    two_back_ups(other)
    assert not rank.agreement.has_copied(BackUp)
    rank.agreement.copied(late)  # type: ignore[arg-type]
    assert not rank.agreement.has_copied(BackUp)  # the one before it is not done
    assert rank.agreement.pack(0)[2:5] == [0, 0, 0]
    rank.agreement.copied(early)  # type: ignore[arg-type]
    assert rank.agreement.has_copied(BackUp)
    assert not rank.agreement.has_copied(LoadBack)
    assert rank.agreement.pack(0)[2:5] == [0, 2, 0]
    minimum = minimum_of([each.agreement.pack(0) for each in (rank, other)])
    assert minimum[2:5] == [0, 0, 0]
    alone = rank.agreement.pack(0)
    rank.agreement.apply(alone, 0)
    assert {early, late} & set(rank.cache.in_flight) == set()
    assert rank.agreement.pack(0)[2:5] == [0, 0, 0]


def test_a_digest_tells_of_everything_that_a_tree_holds() -> None:
    def changed(change: Callable[[Node], None]) -> bool:
        ranks = Rank(), Rank()
        for rank in ranks:
            two_back_ups(rank)
        change(next(iter(ranks[0].cache.tree.nodes())))
        return tree_digest(ranks[0].cache.tree) != tree_digest(ranks[1].cache.tree)

    def hit(node: Node) -> None:
        node.uses += 1

    def lock(node: Node) -> None:
        node.locks[HOST][FULL] += 1

    def move(node: Node) -> None:
        node.start += 1

    def swap(node: Node) -> None:
        page_ids = node.held[DEVICE][FULL]
        assert page_ids is not None
        node.held[DEVICE][FULL] = page_ids[::-1]

    def drop(node: Node) -> None:
        node.held[HOST][FULL] = None

    def rename(node: Node) -> None:
        node.edge = node.edge[::-1]

    assert not changed(lambda node: None)
    assert all(changed(change) for change in (hit, lock, move, swap, drop, rename))
