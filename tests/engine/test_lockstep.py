"""Two ranks bound together, one move at a time: what each is told, and when it acts on it."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from hicache.cache.kinds import FULL
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import BackUp, CopyState, StorageDelete, StorageWrite, Work
from hicache.cache.tree.node import DEVICE, HOST
from hicache.clock import NEVER
from hicache.config import HitAgreement, ParallelConfig, PrefetchConfig, QuirksConfig, StorageConfig
from hicache.engine.loop import Engine
from hicache.engine.ranks.agreement import RanksDivergedError
from hicache.engine.ranks.lockstep import RankedEngine
from hicache.executor.completions import StepEnds, StepRun
from hicache.scheduler.batch import Batch, Outcome
from tests.engine.test_decode_run import ends_left
from tests.scheduler.world import Plot, engine_of, plot_of, request_of

STEP_NS = 100
COLLECTIVE_NS = 7
PROMPT = range(1000, 1041)  # 41 tokens: 5 pages of 8 can be read


@dataclass
class Hand:
    """An executor whose work is done when a test says so."""

    is_fenced: bool = False
    submitted: list[Work] = field(default_factory=list)
    queries: list[Prefetch] = field(default_factory=list)
    reads: list[Prefetch] = field(default_factory=list)
    num_forwards: int = 0

    def submit(self, work: Work, now_ns: int) -> None:
        self.submitted.append(work)

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        self.queries.append(prefetch)

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        self.reads.append(prefetch)

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        self.num_forwards += 1
        return StepRun(StepEnds([now_ns + STEP_NS * (n + 1) for n in range(batch.num_steps)]), 5)


def ends_of(engine: Engine) -> list[int]:
    """When the steps of the run at hand end."""
    (run,) = engine._runs
    return ends_left(run)


class Pair:
    """Ranks in lockstep, each with hands of its own."""

    def __init__(
        self,
        *,
        stop: str = "wait_complete",
        rule: HitAgreement = HitAgreement.restorable,
        kind: str = "full",
        batch_pages: int = 2,
        num_ranks: int = 2,
        has_storage: bool = True,
        timeout_s: float = 1.0,
    ) -> None:
        plot = plot_of(
            kind,
            num_ranks=num_ranks,
            quirks=QuirksConfig(hit_agreement=rule),
            prefetch=PrefetchConfig(
                stop=stop,
                threshold=16 if has_storage else 10**6,
                timeout_base_s=timeout_s,
                timeout_per_ki_token_s=0,
            ),
        )
        self.plot: Plot = plot
        self.hands = [Hand() for _ in range(num_ranks)]
        self.ranks = [engine_of(plot, hand, checks=False) for hand in self.hands]
        parallel = ParallelConfig(ranks=num_ranks, collective_s=COLLECTIVE_NS * 1e-9)
        storage = StorageConfig(kind="memory", batch_pages=batch_pages)
        self.engine = RankedEngine(self.ranks, parallel, storage)

    def ask(self, *answers: list[int]) -> list[bool]:
        """A request comes, and each rank's storage answers; which of them was news."""
        self.engine.submit(request_of(0, PROMPT, [1, 2, 3]), 0)
        self.engine.wake(0)
        news = []
        for hand, lengths in zip(self.hands, answers, strict=True):
            hand.queries[-1].restorable = lengths
            news.append(self.engine.deliver(hand.queries[-1], 1))
        return news

    def own(self) -> list[Prefetch]:
        return [each.prefetcher.active[0] for each in self.all()]  # type: ignore[union-attr]

    def all(self) -> list:
        return [self.engine, *self.engine.followers]

    def count(self, name: str) -> int:
        return self.engine.cache.counters[f"agreement/{name}"]

    def advance(self, rank: int, completed: int, *, is_read: bool = False, found=False) -> bool:
        """One rank's reader gets so far; whether that is news."""
        prefetch = self.hands[rank].reads[-1]
        prefetch.completed_pages = completed
        if is_read:
            prefetch.is_read = True
            prefetch.restored_pages = completed * found
            prefetch.read_ns = (1, 2 + rank)
        return self.engine.deliver(prefetch, 2)


def test_an_answer_is_news_when_the_last_rank_has_it() -> None:
    pair = Pair(num_ranks=3)
    assert pair.ask([5], [5], [5]) == [False, False, True]
    assert [each.restorable for each in pair.own()] == [None] * 3  # nobody acts between steps
    pair.engine.wake(1)
    assert [each.restorable for each in pair.own()] == [[5]] * 3
    assert pair.count("query_collectives_count") == 1


@pytest.mark.parametrize(
    ("answers", "rule", "agreed", "unequal", "given_up", "illegal"),
    [
        (([5], [5]), HitAgreement.restorable, [5], 0, 0, 0),
        (([1, 2, 4], [1, 4, 5]), HitAgreement.restorable, [1, 4], 1, 1, 0),
        (([2], [1]), HitAgreement.restorable, [], 1, 2, 0),
        (([2], [3]), HitAgreement.min_of_maxima, [2], 1, 1, 1),
        (([3], [2, 3]), HitAgreement.min_of_maxima, [3], 0, 0, 0),
        (([], []), HitAgreement.min_of_maxima, [], 0, 0, 0),
        (([], [4]), HitAgreement.restorable, [], 1, 4, 0),
    ],
)
def test_what_the_ranks_agree_on_is_counted(
    answers: tuple[list[int], list[int]],
    rule: HitAgreement,
    agreed: list[int],
    unequal: int,
    given_up: int,
    illegal: int,
) -> None:
    pair = Pair(rule=rule)
    pair.ask(*answers)
    own = pair.own()
    pair.engine.wake(1)
    assert [each.restorable for each in own] == [agreed] * 2
    assert pair.count("unequal_hits_count") == unequal
    assert pair.count("given_up_pages") == given_up
    assert pair.count("illegal_lengths_count") == illegal


def test_readers_write_into_prefetches_of_their_own() -> None:
    pair = Pair()
    pair.ask([5], [5])
    pair.engine.wake(1)
    for own, hand in zip(pair.own(), pair.hands, strict=True):
        (local,) = hand.reads
        assert local is not own
        assert local.num_pages == own.num_pages == 5
        assert [list(ids) for ids in local.staged] == [list(ids) for ids in own.staged]
    pair.advance(0, 2)
    assert pair.own()[0].completed_pages == 0


def test_less_is_read_than_was_asked_for_where_less_was_agreed_on() -> None:
    pair = Pair()
    pair.ask([2, 3, 5], [3])
    pair.engine.wake(1)
    assert [hand.reads[0].num_pages for hand in pair.hands] == [3, 3]
    assert [len(hand.reads[0].staged[FULL]) for hand in pair.hands] == [3, 3]


@pytest.mark.parametrize(("batch_pages", "collectives"), [(1, 6), (2, 4), (4, 3), (5, 2), (9, 2)])
def test_a_read_takes_a_collective_a_batch_and_one_for_the_sidecars(
    batch_pages: int, collectives: int
) -> None:
    pair = Pair(batch_pages=batch_pages)
    pair.ask([5], [5])
    assert pair.count("completion_collectives_count") == 0
    pair.engine.wake(1)
    assert pair.count("completion_collectives_count") == collectives


def test_partial_reads_of_two_ranks_are_news_as_far_as_both_have_come() -> None:
    pair = Pair()
    pair.ask([5], [5])
    pair.engine.wake(1)
    assert not pair.advance(0, 4)
    assert pair.advance(1, 2)
    assert not pair.advance(1, 2)  # which all know
    pair.engine.wake(2)
    assert [each.completed_pages for each in pair.own()] == [2, 2]
    assert pair.advance(1, 3)
    assert not pair.advance(0, 5)
    pair.engine.wake(3)
    assert [each.completed_pages for each in pair.own()] == [3, 3]
    assert pair.count("unequal_reads_count") == 0  # which is not known yet


@pytest.mark.parametrize(("ends", "published", "unequal"), [((5, 5), 5, 0), ((5, 3), 3, 1)])
def test_what_both_ranks_have_read_is_published_by_both(
    ends: tuple[int, int], published: int, unequal: int
) -> None:
    pair = Pair()
    pair.ask([5], [5])
    pair.engine.wake(1)
    own = pair.own()
    pair.advance(0, ends[0], is_read=True)
    assert pair.advance(1, ends[1], is_read=True)
    pair.engine.wake(2)
    assert [each.published_pages for each in own] == [published] * 2
    assert [each.read_ns for each in own] == [(1, 2), (1, 3)]
    assert pair.count("unequal_reads_count") == unequal
    assert pair.count("unequal_sidecars_count") == 0
    for each in pair.all():
        assert each.cache.tree.residency.resident[HOST][FULL] == published


@pytest.mark.parametrize("found", [(True, True), (True, False), (False, True), (False, False)])
def test_a_state_that_one_rank_lacks_is_used_by_none(found: tuple[bool, bool]) -> None:
    pair = Pair(kind="full_mamba")
    pair.ask([5], [5])
    pair.engine.wake(1)
    own = pair.own()
    for rank in (0, 1):
        pair.advance(rank, 5, is_read=True, found=found[rank])
    pair.engine.wake(2)
    assert [each.restored_pages for each in own] == [5 * all(found)] * 2
    assert [each.published_pages for each in own] == [5 * all(found)] * 2
    assert pair.count("unequal_sidecars_count") == int(len(set(found)) > 1)


def test_the_last_word_of_a_read_is_heard_once() -> None:
    pair = Pair()
    pair.ask([5], [5])
    pair.engine.wake(1)
    for rank in (0, 1):
        pair.advance(rank, 5, is_read=True)
    assert not pair.advance(1, 5, is_read=True)


def test_a_reader_is_told_that_its_request_waits_no_longer() -> None:
    pair = Pair(stop="timeout", timeout_s=1e-6)
    pair.ask([5], [5])
    pair.engine.wake(1)
    assert not any(hand.reads[0].is_settled for hand in pair.hands)
    pair.engine.wake(1001)
    assert all(hand.reads[0].is_settled for hand in pair.hands)


def test_a_prefetch_that_is_not_worth_reading_is_forgotten() -> None:
    pair = Pair()
    pair.ask([1], [1])  # 8 tokens are fewer than the threshold
    pair.engine.wake(1)
    assert [hand.reads for hand in pair.hands] == [[], []]
    assert pair.engine._reads == {}


def copies(pair: Pair, kind: type) -> list[Work]:
    """The first copy of a sort that each rank has begun."""
    return [next(work for work in hand.submitted if isinstance(work, kind)) for hand in pair.hands]


def served(pair: Pair) -> None:
    """A request that nobody has to read for, to its end."""
    pair.engine.submit(request_of(0, range(20), [1, 2, 3]), 0)
    outcome = pair.engine.wake(0)
    while not outcome.finished:
        end_ns = pair.engine.step_end_ns
        assert end_ns is not None
        outcome = pair.engine.wake(end_ns)


def test_a_copy_is_done_when_every_rank_has_made_it_and_the_next_step_begins() -> None:
    pair = Pair(has_storage=False)
    served(pair)
    first, second = copies(pair, BackUp)
    assert not pair.engine.deliver(first, 900)
    pair.engine.wake(900)
    assert all(len(each.cache.in_flight) == 1 for each in pair.all())
    assert pair.engine.deliver(second, 901)
    assert all(len(each.cache.in_flight) == 1 for each in pair.all())
    pair.engine.wake(901)
    assert [type(work) for hand in pair.hands for work in hand.submitted] == [
        BackUp,
        StorageWrite,
        BackUp,
        StorageWrite,
    ]


def test_what_nobody_reports_is_no_news() -> None:
    pair = Pair()
    slot = np.zeros(1, np.int32)
    assert not pair.engine.deliver(CopyState(source=slot, target=slot), 0)
    assert not pair.engine.deliver(StorageDelete(keys=[]), 0)


def test_every_news_wakes_those_who_are_held_by_a_copy() -> None:
    pair = Pair()
    pair.ask([5], [5])
    pair.engine.wake(1)
    pair.hands[1].is_fenced = True  # of one rank: all wait
    pair.engine.submit(request_of(1, range(10), [1]), 2)
    pair.engine.wake(2)
    assert pair.engine.step_end_ns is None
    assert pair.advance(0, 2)
    pair.hands[1].is_fenced = False
    pair.engine.wake(3)
    assert pair.engine.step_end_ns is not None
    assert not pair.advance(0, 4)


def test_a_step_takes_as_long_as_the_first_rank_s_and_a_collective() -> None:
    pair = Pair(has_storage=False)
    pair.engine.submit(request_of(0, range(20), [1] * 9), 1000)
    pair.engine.wake(1000)
    assert pair.engine.step_end_ns == 1000 + STEP_NS + COLLECTIVE_NS
    pair.engine.wake(1107)
    ends = ends_of(pair.engine)
    assert len(ends) > 2
    assert ends == [1107 + 107 * step for step in range(1, len(ends) + 1)]
    assert [hand.num_forwards for hand in pair.hands] == [2, 0]
    assert ends_of(pair.engine.followers[0]) == ends


def test_there_is_a_collective_a_step_and_one_for_each_other_wake() -> None:
    pair = Pair(has_storage=False)
    pair.engine.wake(0)
    pair.engine.wake(1)
    assert pair.count("step_collectives_count") == 2
    pair.engine.submit(request_of(0, range(20), [1] * 9), 2)
    pair.engine.wake(2)
    assert pair.count("step_collectives_count") == 3
    pair.engine.wake(109)
    assert pair.count("step_collectives_count") == 4
    pair.engine.catch_up(109 + 3 * 107)  # not the step that ends just then
    assert [each.num_steps for each in pair.all()] == [3, 3]
    assert pair.count("step_collectives_count") == 6
    end_ns = pair.engine.step_end_ns
    assert end_ns is not None
    pair.engine.wake(end_ns)
    assert pair.engine.num_steps == 9
    assert pair.count("step_collectives_count") == 12


def test_a_run_of_steps_is_cut_short_on_every_rank() -> None:
    pair = Pair(has_storage=False)
    pair.engine.submit(request_of(0, range(20), [1] * 9), 0)
    pair.engine.wake(0)
    pair.engine.wake(107)
    pair.engine.wake(107 + 150)  # in the second of its steps
    assert [each.step_end_ns for each in pair.all()] == [107 * 3] * 2
    pair.engine.submit(request_of(1, range(9), [1]), 107 + 10)
    assert [each.step_end_ns for each in pair.all()] == [107 * 2] * 2


def test_who_gives_up_is_dropped_by_every_rank_in_one_step() -> None:
    pair = Pair(num_ranks=3)
    pair.ask([5], [5], [5])
    pair.engine.wake(1)
    pair.engine.abort(0, 2)
    outcome = pair.engine.wake(2)
    assert [req.request.id for req in outcome.aborted] == [0]
    assert all(each.scheduler.is_idle for each in pair.all())
    assert all(hand.reads[0].is_settled for hand in pair.hands)


def test_the_ranks_wake_when_the_first_of_them_has_waited_for_long_enough() -> None:
    pair = Pair(stop="timeout", timeout_s=1e-6)
    pair.ask([5], [5])
    pair.engine.wake(1)
    assert pair.engine.next_wake_ns(1) == 1001
    pair.own()[0].enqueued_ns = 500
    assert pair.engine.next_wake_ns(1) == 1001
    pair.own()[1].enqueued_ns = 200
    assert pair.engine.next_wake_ns(1) == 1201
    assert pair.engine.next_wake_ns(1201) == 1501
    assert pair.engine.next_wake_ns(1501) == NEVER


def test_a_vote_that_would_change_at_the_next_boundary_ends_the_run_there() -> None:
    pair = Pair(stop="timeout", batch_pages=5)
    pair.ask([5], [5])
    pair.engine.wake(1)
    pair.engine.submit(request_of(1, range(10), [1] * 50), 2)
    pair.engine.wake(2)
    pair.engine.wake(109)
    assert len(ends_of(pair.engine)) > 2  # nothing is to be expected
    for rank in (0, 1):  # all has come, and the readers have not let go
        pair.advance(rank, 5)
    assert pair.engine.step_end_ns == 216
    pair.engine.wake(216)  # at which all had voted before they knew
    assert pair.engine.step_end_ns == 323
    outcome = pair.engine.wake(323)
    assert not outcome.finished
    assert [extend.req.request.id for extend in pair.engine.extending] == [0]


def test_ranks_that_plan_other_batches_are_found() -> None:
    pair = Pair(has_storage=False)
    pair.engine.submit(request_of(0, range(20), [1]), 0)
    prefill = pair.engine.followers[0].scheduler.prefill
    prefill.config = replace(prefill.config, max_running=1)
    pair.engine.submit(request_of(1, range(50, 60), [1, 2]), 0)
    with pytest.raises(RanksDivergedError):  # noqa: PT012 - in whichever step it shows
        for now_ns in (0, 107, 214, 321):
            pair.engine.wake(now_ns)


def test_ranks_whose_requests_end_otherwise_are_found() -> None:
    pair = Pair(has_storage=False)
    pair.engine.followers[0].abort(0, 0)
    pair.engine.submit(request_of(0, range(20), [1]), 0)
    with pytest.raises(RanksDivergedError, match="batches differ at 0 ns"):
        pair.engine.wake(0)


def test_ranks_that_end_with_other_trees_are_told_apart() -> None:
    pair = Pair(has_storage=False, num_ranks=3)
    served(pair)
    pair.engine.check_equal()
    next(iter(pair.engine.followers[1].cache.tree.nodes())).uses += 1
    with pytest.raises(RanksDivergedError, match="the tree of rank 2 differs"):
        pair.engine.check_equal()


def test_a_page_that_one_rank_takes_is_found_by_the_next_step() -> None:
    pair = Pair(has_storage=False)
    pair.engine.wake(0)
    pair.engine.followers[0].cache.pools[DEVICE][FULL].allocate(1)
    with pytest.raises(RanksDivergedError, match="differ after step 1"):
        pair.engine.wake(1)


def test_who_never_waits_is_not_outvoted() -> None:
    pair = Pair(stop="best_effort")
    pair.engine.submit(request_of(1, range(10), [1] * 50), 0)
    pair.engine.wake(0)
    pair.engine.wake(107)
    assert len(ends_of(pair.engine)) > 2


def test_to_be_woken_within_a_step_is_no_outcome() -> None:
    pair = Pair(has_storage=False)
    pair.engine.submit(request_of(0, range(20), [1] * 9), 0)
    pair.engine.wake(0)
    assert pair.engine.wake(50) == Outcome()


@pytest.mark.parametrize("fate", ["finished", "rejected", "aborted"])
def test_a_rank_whose_request_ends_otherwise_is_found_though_steps_are_alike(fate: str) -> None:
    pair = Pair(has_storage=False)
    pair.engine.submit(request_of(0, range(20), [1]), 0)
    pair.engine.wake(0)
    (extend,) = pair.engine.extending
    ended = (extend.req, "too long") if fate == "rejected" else extend.req
    follower = pair.engine.followers[0]
    wake = follower.wake

    def end_one_more(now_ns: int) -> Outcome:
        outcome = wake(now_ns)
        getattr(outcome, fate).append(ended)
        return outcome

    follower.wake = end_one_more  # type: ignore[method-assign]
    with pytest.raises(RanksDivergedError, match="batches differ at 107 ns"):
        pair.engine.wake(107)


def test_each_rank_is_checked_by_its_own_check() -> None:
    pair = Pair(has_storage=False)
    checked: list[str] = []
    ranks = [engine_of(pair.plot, Hand(), checks=False) for _ in range(2)]
    ranks[0].check = lambda engine: checked.append("first")
    ranks[1].check = lambda engine: checked.append("second")
    engine = RankedEngine(ranks, ParallelConfig(ranks=2), StorageConfig(kind="memory"))
    engine.wake(0)
    assert checked == ["first", "second"]
