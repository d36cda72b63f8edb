"""How the ranks of an engine agree by a minimum of offers, and how divergence is found."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import BackUp, LoadBack
from hicache.cache.tree.node import DEVICE, HOST, Node
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
    tree_digest,
)
from tests.cache.small import PAGE, make_cache, make_pools, prefetcher_of, run_request, tokens_of

SECOND = 1_000_000_000


def test_ranks_agree_on_the_longest_prefix_that_all_can_restore() -> None:
    every = [[length for length in (1, 2, 3) if bits >> length & 1] for bits in range(0, 16, 2)]
    rule = HitAgreement.restorable
    for sets in product(every, repeat=3):
        offers = [offer(lengths, 3, rule) for lengths in sets]
        assert taken(minimum_of(offers), rule) == sorted(set.intersection(*map(set, sets)))


def test_offers_of_different_lengths_are_an_error() -> None:
    with pytest.raises(RanksDivergedError, match=r"\[1, 2\]"):
        minimum_of([[1], [1, 2]])


class Rank:
    """The cache and the prefetcher of one rank, and its agreement with the other ranks."""

    def __init__(
        self, *, stop: str = "wait_complete", has_states: bool = False, digest_every: int = 1
    ) -> None:
        counts = (100, 0, 100)
        pools = make_pools(counts, counts, TracedAllocator)
        self.cache = make_cache(pools, has_states=has_states, storage_queue_bytes=1000)
        config = PrefetchConfig(
            stop=stop, threshold=PAGE, timeout_base_s=1.0, timeout_per_ki_token_s=0
        )
        self.prefetcher = prefetcher_of(self.cache, config)
        self.agreement = RankAgreement(self.cache, self.prefetcher, whole_digest_every=digest_every)

    def start(self, request_id: int = 0, num_pages: int = 4) -> Prefetch:
        """Start a prefetch that storage has not answered yet."""
        length = num_pages * PAGE + 1
        sequence = Sequence(tokens_of(length, request_id * 1000))
        match = self.cache.match(sequence, length)
        prefetch = self.prefetcher.prefetch_from_storage(request_id, sequence, match, length, 0)
        assert prefetch is not None
        return prefetch

    def start_reading(self) -> Prefetch:
        """Start a prefetch of four pages, all of which storage has."""
        prefetch = self.start()
        prefetch.restorable = [4]
        self.prefetcher.on_queried(prefetch)
        return prefetch

    def two_back_ups(self) -> list[Any]:
        """Two copies in flight, in the order in which they began."""
        for num_pages in (4, 8):
            run_request(self.cache, tokens_of(num_pages * PAGE), num_pages * PAGE)
        copies = list(self.cache.outbox)
        for copy in copies:
            self.agreement.submitted(copy)
        return copies

    def copied(self) -> list[int]:
        """The numbers of load-backs, back-ups and writes that this rank offers as complete."""
        return self.agreement.pack(0)[2:5]


def step(*ranks: Rank, now_ns: tuple[int, ...] = (0, 0)) -> None:
    packed = [rank.agreement.pack(clock) for rank, clock in zip(ranks, now_ns, strict=False)]
    for rank in ranks:
        rank.agreement.apply(minimum_of(packed), 0)


def test_rank_acts_on_an_answer_of_storage_only_when_every_rank_has_it() -> None:
    ranks = ahead, behind = Rank(), Rank()
    first, second = ahead.start(), behind.start()
    ahead.agreement.answers.append(ReadProgress(first, restorable=[4]))
    step(*ranks)
    assert first.restorable is None
    behind.agreement.answers.append(ReadProgress(second, restorable=[4]))
    step(*ranks)
    assert first.restorable == second.restorable == [4]


def test_answers_and_progress_of_reads_may_arrive_in_either_order() -> None:
    ranks = Rank(), Rank()
    reading = [rank.start_reading() for rank in ranks]
    asking = [rank.start(request_id=1) for rank in ranks]
    for first in (0, 1):  # one rank hears of the read first, the other one of the answer
        rank, other = ranks[first], ranks[1 - first]
        rank.agreement.progress.append(
            ReadProgress(reading[first], completed_pages=4, is_read=True)
        )
        other.agreement.answers.append(ReadProgress(asking[1 - first], restorable=[]))
        step(*ranks)
    step(*ranks)  # compares the trees of the step before
    assert tree_digest(ranks[0].cache.tree) == tree_digest(ranks[1].cache.tree)


def test_request_stops_waiting_when_the_deadline_has_passed_on_all_ranks() -> None:
    ranks = early, late = Rank(stop="timeout"), Rank(stop="timeout")
    for rank in ranks:
        rank.start_reading()
    past, not_yet = 2 * SECOND, SECOND // 2
    step(*ranks, now_ns=(past, not_yet))
    assert not early.prefetcher.check(0, past)
    assert not late.prefetcher.check(0, not_yet)
    step(*ranks, now_ns=(past, past))
    assert early.prefetcher.check(0, past)
    assert late.prefetcher.check(0, past)


def test_complete_pages_wait_for_states_that_another_rank_has_not_read() -> None:
    ranks = Rank(stop="timeout", has_states=True), Rank(stop="timeout", has_states=True)
    late = 10 * SECOND
    for rank in ranks:
        prefetch = rank.start_reading()
        rank.agreement.progress.append(ReadProgress(prefetch, completed_pages=4))
    # the deadline has passed for pages that were incomplete when all voted, and are complete now
    for _ in range(2):
        step(*ranks, now_ns=(late, late))
        assert not any(rank.prefetcher.check(0, late) for rank in ranks)


def test_read_progress_after_an_abort_does_not_change_the_pages_of_the_prefetch() -> None:
    rank = Rank(stop="timeout")
    prefetch = rank.start_reading()
    rank.prefetcher.abort(0)
    for progress in ({"completed_pages": 2}, {"completed_pages": 3, "is_read": True}):
        rank.agreement.progress.append(ReadProgress(prefetch, **progress))
        step(rank)
        assert prefetch.completed_pages == 0
    assert prefetch.is_read
    assert rank.prefetcher.lingering == set()


@pytest.mark.parametrize("num_prefetches", [0, 1, 65])
def test_offer_has_a_vote_on_every_prefetch_and_a_digest(num_prefetches: int) -> None:
    rank = Rank(stop="timeout")
    for number in range(num_prefetches):
        rank.start(number, num_pages=1)
    packed = rank.agreement.pack(0)
    assert packed[5:-2] == [0] * num_prefetches
    assert packed[-2] == -packed[-1]
    assert 0 <= packed[-2] < 2**62


def test_copies_are_complete_in_the_order_in_which_they_began_on_all_ranks() -> None:
    rank, other = Rank(), Rank()
    early, late = rank.two_back_ups()
    other_early, _ = other.two_back_ups()
    assert not rank.agreement.has_copied(BackUp)
    rank.agreement.copied(late)
    assert (rank.agreement.has_copied(BackUp), rank.copied()) == (False, [0, 0, 0])
    rank.agreement.copied(early)
    assert rank.agreement.has_copied(BackUp)
    assert not rank.agreement.has_copied(LoadBack)
    assert rank.copied() == [0, 2, 0]
    step(rank, other)
    assert rank.cache.in_flight == {early, late}
    other.agreement.copied(other_early)
    step(rank, other)
    assert (late in rank.cache.in_flight, early in rank.cache.in_flight) == (True, False)
    assert (rank.copied(), other.copied()) == ([0, 1, 0], [0, 0, 0])


def test_ranks_compare_whole_trees_every_so_many_steps() -> None:
    ranks = Rank(digest_every=3), Rank(digest_every=3)
    for rank in ranks:
        rank.two_back_ups()
    step(*ranks)
    next(iter(ranks[0].cache.tree.nodes())).uses += 1  # which moves no page
    step(*ranks)
    step(*ranks)
    with pytest.raises(RanksDivergedError, match="differ after step 3"):
        step(*ranks)


def test_checksum_of_an_allocator_differs_after_a_free_and_a_refusal() -> None:
    pools = [TracedAllocator(4) for _ in range(3)]
    assert [pool.traffic for pool in pools] == [0, 0, 0]
    for pool in pools:
        pool.allocate(2)
    first = pools[0].traffic
    assert [pool.traffic for pool in pools] == [first] * 3
    page_ids = pools[1].allocate(1)
    assert page_ids is not None
    before = pools[1].traffic
    pools[1].free(page_ids)
    assert pools[2].allocate(9) is None
    assert len({0, first, before, pools[1].traffic}) == 4
    assert pools[2].traffic != first


@pytest.mark.parametrize(
    "change",
    [
        lambda node: setattr(node, "uses", 7),
        lambda node: setattr(node, "start", 7),
        lambda node: setattr(node, "edge", node.edge[::-1]),
        lambda node: node.held[DEVICE][FULL].reverse(),
        lambda node: node.locks[HOST].__setitem__(FULL, 9),
        lambda node: node.held[HOST].__setitem__(FULL, None),
    ],
)
def test_digest_of_a_tree_depends_on_all_that_it_holds(change: Callable[[Node], None]) -> None:
    rank = Rank()
    rank.two_back_ups()
    before = tree_digest(rank.cache.tree)
    assert tree_digest(rank.cache.tree) == before
    change(next(iter(rank.cache.tree.nodes())))
    assert tree_digest(rank.cache.tree) != before
