"""Ranks in lockstep: when each of them learns of reads and copies, and when it acts on them."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hicache.cache.kinds import FULL
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import BackUp, StorageWrite, Work
from hicache.cache.tree.node import DEVICE, HOST
from hicache.clock import NEVER
from hicache.config import HitAgreement, PrefetchConfig, StorageConfig
from hicache.engine.loop import Engine
from hicache.engine.ranks.agreement import RanksDivergedError
from hicache.engine.ranks.lockstep import RankedEngine
from hicache.executor.completions import StepEnds, StepRun
from hicache.scheduler.batch import Batch, Outcome
from tests.engine.test_decode_run import ends_left
from tests.scheduler.world import engine_of, fresh, ids, plot_of

STEP_NS, COLLECTIVE_NS = 100, 7
RESTORABLE, MIN_OF_MAXIMA = HitAgreement.restorable, HitAgreement.min_of_maxima


@dataclass
class ManualExecutor:
    """An executor whose steps take 100 ns, and whose copies and reads end when a test says so."""

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
    """The end times of the steps in progress."""
    (run,) = engine._runs
    return ends_left(run)


class Ranks:
    """An engine of several ranks, each with an executor of its own."""

    def __init__(
        self,
        num_ranks: int = 2,
        *,
        stop: str = "wait_complete",
        rule: HitAgreement = RESTORABLE,
        kind: str = "full",
        batch_pages: int = 2,
        timeout_s: float = 1.0,
        reads: bool = True,
    ) -> None:
        plot = plot_of(
            kind,
            num_ranks=num_ranks,
            collective_s=COLLECTIVE_NS * 1e-9,
            prefetch=PrefetchConfig(
                stop=stop,
                threshold=16 if reads else 10**6,
                timeout_base_s=timeout_s,
                timeout_per_ki_token_s=0,
            ),
        )
        self.executors = [ManualExecutor() for _ in range(num_ranks)]
        ranks = [engine_of(plot, each, checks=False) for each in self.executors]
        self.engine = RankedEngine(ranks, rule, batch_pages)
        self.all: list[Any] = [self.engine, *self.engine.followers]

    def ask(self, *answers: list[int]) -> list[bool]:
        """Submit a request, answer each rank's query; for each: whether it was the last answer."""
        self.engine.submit(fresh(0, 41, 3), 0)  # 5 pages of 8 can be read
        self.engine.wake(0)
        news = []
        for executor, lengths in zip(self.executors, answers, strict=True):
            executor.queries[-1].restorable = lengths
            news.append(self.engine.deliver(executor.queries[-1], 1))
        return news

    def begin_read(self) -> None:
        """Every rank reads the five pages of a request."""
        self.ask(*[[5]] * len(self.all))
        self.engine.wake(1)

    def start(self, *wakes: int, answer: int = 9) -> None:
        """Submit a request that storage is not asked about, and wake the engine."""
        self.engine.submit(fresh(7, 10, answer), wakes[0])
        for now_ns in wakes:
            self.engine.wake(now_ns)

    def own(self) -> list[Prefetch]:
        return [each.prefetcher.active[0] for each in self.all]

    def values(self, name: str) -> list[Any]:
        """An attribute of each rank's prefetch."""
        return [getattr(each, name) for each in self.own()]

    def count(self, name: str) -> int:
        return self.engine.cache.counters[f"agreement/{name}"]

    def advance(self, rank: int, completed: int, *, is_read: bool = False, found=False) -> bool:
        """Set the pages that one rank has read; return whether the engine has to act on it."""
        prefetch = self.executors[rank].reads[-1]
        prefetch.completed_pages = completed
        if is_read:
            prefetch.is_read = True
            prefetch.restored_pages = completed * found
            prefetch.read_ns = (1, 2 + rank)
        return self.engine.deliver(prefetch, 2)


# -- queries and reads ---------------------------------------------------------------------------


def test_storage_answer_counts_when_the_last_rank_has_it_and_applies_at_the_next_step() -> None:
    ranks = Ranks(3)
    assert ranks.ask([5], [5], [5]) == [False, False, True]
    assert ranks.values("restorable") == [None] * 3
    ranks.engine.wake(1)
    assert ranks.values("restorable") == [[5]] * 3
    assert ranks.count("query_collectives_count") == 1


@pytest.mark.parametrize(
    ("answers", "rule", "agreed", "counts"),
    [
        (([5], [5]), RESTORABLE, [5], [0, 0, 0]),
        (([1, 2, 4], [1, 4, 5]), RESTORABLE, [1, 4], [1, 1, 0]),
        (([2], [1]), RESTORABLE, [], [1, 2, 0]),
        (([2], [3]), MIN_OF_MAXIMA, [2], [1, 1, 1]),
        (([3], [2, 3]), MIN_OF_MAXIMA, [3], [0, 0, 0]),
        (([], []), MIN_OF_MAXIMA, [], [0, 0, 0]),
        (([], [4]), RESTORABLE, [], [1, 4, 0]),
    ],
)
def test_ranks_agree_on_restorable_lengths_and_count_unequal_answers(
    answers: tuple[list[int], ...], rule: HitAgreement, agreed: list[int], counts: list[int]
) -> None:
    ranks = Ranks(rule=rule)
    ranks.ask(*answers)
    own = ranks.own()
    ranks.engine.wake(1)
    assert [each.restorable for each in own] == [agreed] * 2
    names = ("unequal_hits_count", "given_up_pages", "illegal_lengths_count")
    assert [ranks.count(name) for name in names] == counts


def test_each_rank_reads_into_a_copy_of_the_prefetch_cut_to_the_agreed_length() -> None:
    ranks = Ranks()
    ranks.ask([2, 3, 5], [3])
    ranks.engine.wake(1)
    for own, executor in zip(ranks.own(), ranks.executors, strict=True):
        (local,) = executor.reads
        assert local is not own
        assert local.num_pages == own.num_pages == len(local.staged[FULL]) == 3
        assert [list(page_ids) for page_ids in local.staged] == [list(each) for each in own.staged]
    ranks.advance(0, 2)
    assert ranks.own()[0].completed_pages == 0


@pytest.mark.parametrize(("batch_pages", "collectives"), [(1, 6), (2, 4), (4, 3), (5, 2), (9, 2)])
def test_read_takes_a_collective_for_each_batch_and_one_for_window_and_state(
    batch_pages: int, collectives: int
) -> None:
    ranks = Ranks(batch_pages=batch_pages)
    ranks.begin_read()
    assert ranks.count("completion_collectives_count") == collectives


def test_partial_reads_count_up_to_the_pages_that_all_ranks_have_read() -> None:
    ranks = Ranks()
    ranks.begin_read()
    assert [ranks.advance(0, 4), ranks.advance(1, 2), ranks.advance(1, 2)] == [False, True, False]
    ranks.engine.wake(2)
    assert ranks.values("completed_pages") == [2, 2]
    assert [ranks.advance(1, 3), ranks.advance(0, 5)] == [True, False]
    ranks.engine.wake(3)
    assert ranks.values("completed_pages") == [3, 3]
    assert ranks.count("unequal_reads_count") == 0  # no read has ended


@pytest.mark.parametrize(
    ("kind", "ends", "found", "published"),
    [
        ("full", (5, 5), (False, False), 5),
        ("full", (5, 3), (False, False), 3),
        *(
            ("full_mamba", (5, 5), (first, second), 5 * (first and second))
            for first in (False, True)
            for second in (False, True)
        ),
    ],
)
def test_all_ranks_publish_the_pages_and_the_state_that_all_have_read(
    kind: str, ends: tuple[int, int], found: tuple[bool, bool], published: int
) -> None:
    ranks = Ranks(kind=kind)
    ranks.begin_read()
    own = ranks.own()
    news = [ranks.advance(rank, ends[rank], is_read=True, found=found[rank]) for rank in (0, 1)]
    assert [*news, ranks.advance(1, ends[1], is_read=True)] == [False, True, False]
    ranks.engine.wake(2)
    assert [each.published_pages for each in own] == [published] * 2
    assert [each.restored_pages for each in own] == [5 * all(found)] * 2
    assert [each.read_ns for each in own] == [(1, 2), (1, 3)]
    assert ranks.count("unequal_reads_count") == (ends[0] != ends[1])
    assert ranks.count("unequal_sidecars_count") == (found[0] != found[1])
    for each in ranks.all:
        assert each.cache.tree.residency.resident[HOST][FULL] == published


def test_readers_are_stopped_when_the_wait_of_the_request_ends() -> None:
    ranks = Ranks(stop="timeout", timeout_s=1e-6)
    ranks.begin_read()
    assert not any(executor.reads[0].is_settled for executor in ranks.executors)
    ranks.engine.wake(1001)
    assert all(executor.reads[0].is_settled for executor in ranks.executors)


def test_prefetch_too_short_to_read_is_dropped() -> None:
    ranks = Ranks()
    ranks.ask([1], [1])  # 8 tokens are fewer than the threshold
    ranks.engine.wake(1)
    assert [executor.reads for executor in ranks.executors] == [[], []]
    assert ranks.engine._reads == {}


def test_abort_drops_a_request_from_every_rank_in_one_step() -> None:
    ranks = Ranks(3)
    ranks.begin_read()
    ranks.engine.abort(0, 2)
    assert ids(ranks.engine.wake(2).aborted) == [0]
    assert all(each.scheduler.is_idle for each in ranks.all)
    assert all(executor.reads[0].is_settled for executor in ranks.executors)


# -- copies --------------------------------------------------------------------------------------


def serve_one(ranks: Ranks) -> None:
    """Serve one request that reads nothing from storage."""
    ranks.start(0, answer=3)
    while not ranks.engine.wake(ranks.engine.step_end_ns or 0).finished:
        pass


def test_copy_is_complete_in_the_step_after_every_rank_has_made_it() -> None:
    ranks = Ranks(reads=False)
    serve_one(ranks)
    first, second = (executor.submitted[0] for executor in ranks.executors)
    assert not ranks.engine.deliver(first, 900)
    ranks.engine.wake(900)
    assert all(len(each.cache.in_flight) == 1 for each in ranks.all)
    assert ranks.engine.deliver(second, 901)
    assert all(len(each.cache.in_flight) == 1 for each in ranks.all)
    ranks.engine.wake(901)
    kinds = [type(work) for executor in ranks.executors for work in executor.submitted]
    assert kinds == [BackUp, StorageWrite] * 2


def test_all_ranks_wait_for_a_copy_of_one_rank_and_any_read_progress_wakes_them() -> None:
    ranks = Ranks()
    ranks.begin_read()
    ranks.executors[1].is_fenced = True
    ranks.start(2, answer=1)
    assert ranks.engine.step_end_ns is None
    assert ranks.advance(0, 2)
    ranks.executors[1].is_fenced = False
    ranks.engine.wake(3)
    assert ranks.engine.step_end_ns is not None
    assert not ranks.advance(0, 4)


# -- steps ---------------------------------------------------------------------------------------


def test_step_takes_the_time_of_the_first_ranks_step_and_a_collective() -> None:
    ranks = Ranks(reads=False)
    ranks.start(1000)
    assert ranks.engine.step_end_ns == 1000 + STEP_NS + COLLECTIVE_NS
    assert ranks.engine.wake(1050) == Outcome()  # within a step
    ranks.engine.wake(1107)
    assert ends_of(ranks.engine) == [1107 + 107 * step for step in range(1, 9)]
    assert ends_of(ranks.engine.followers[0]) == ends_of(ranks.engine)
    assert [executor.num_forwards for executor in ranks.executors] == [2, 0]


def test_every_step_and_every_wake_without_a_step_has_a_collective() -> None:
    ranks, counts = Ranks(reads=False), []
    for now_ns in (0, 1):
        ranks.engine.wake(now_ns)
    counts.append(ranks.count("step_collectives_count"))
    ranks.start(2, 109)
    counts.append(ranks.count("step_collectives_count"))
    ranks.engine.catch_up(109 + 3 * 107)  # not the step that ends at this moment
    assert [each.num_steps for each in ranks.all] == [3, 3]
    counts.append(ranks.count("step_collectives_count"))
    ranks.engine.wake(ends_of(ranks.engine)[-1])
    assert (ranks.engine.num_steps, counts) == (9, [2, 4, 6])
    assert ranks.count("step_collectives_count") == 12


def test_a_new_request_cuts_a_run_of_steps_short_on_every_rank() -> None:
    ranks = Ranks(reads=False)
    ranks.start(0, 107, 107 + 150)  # in the second of its steps
    assert [each.step_end_ns for each in ranks.all] == [107 * 3] * 2
    ranks.engine.submit(fresh(1, 9, 1), 107 + 10)
    assert [each.step_end_ns for each in ranks.all] == [107 * 2] * 2


def test_ranks_wake_at_the_first_deadline_of_any_of_them() -> None:
    ranks = Ranks(stop="timeout", timeout_s=1e-6)
    ranks.begin_read()
    moments = [ranks.engine.next_wake_ns(1)]
    for rank, enqueued_ns in ((0, 500), (1, 200)):
        ranks.own()[rank].enqueued_ns = enqueued_ns
        moments.append(ranks.engine.next_wake_ns(1))
    assert moments == [1001, 1001, 1201]
    assert [ranks.engine.next_wake_ns(now_ns) for now_ns in (1201, 1501)] == [1501, NEVER]


# -- divergence ----------------------------------------------------------------------------------


def test_ranks_that_plan_different_batches_are_an_error() -> None:
    ranks = Ranks(reads=False)
    prefill = ranks.engine.followers[0].scheduler.prefill
    prefill.config = replace(prefill.config, max_running=1)
    ranks.engine.submit(fresh(0, 20, 1), 0)
    ranks.engine.submit(fresh(1, 10, 2), 0)
    with pytest.raises(RanksDivergedError):  # noqa: PT012 - in whichever step it shows
        for now_ns in (0, 107, 214, 321):
            ranks.engine.wake(now_ns)


@pytest.mark.parametrize("fate", ["finished", "rejected", "aborted"])
def test_ranks_whose_requests_end_differently_are_an_error(fate: str) -> None:
    ranks = Ranks(reads=False)
    ranks.start(0, answer=1)
    (extend,) = ranks.engine.extending
    ended = (extend.req, "too long") if fate == "rejected" else extend.req
    follower = ranks.engine.followers[0]
    wake = follower.wake

    def end_one_more(now_ns: int) -> Outcome:
        outcome = wake(now_ns)
        getattr(outcome, fate).append(ended)
        return outcome

    follower.wake = end_one_more
    with pytest.raises(RanksDivergedError, match="batches differ at 107 ns"):
        ranks.engine.wake(107)


def test_ranks_that_end_with_different_trees_are_an_error() -> None:
    ranks = Ranks(3, reads=False)
    serve_one(ranks)
    ranks.engine.check_equal()
    next(iter(ranks.engine.followers[1].cache.tree.nodes())).uses += 1
    with pytest.raises(RanksDivergedError, match="the tree of rank 2 differs"):
        ranks.engine.check_equal()


def test_page_that_only_one_rank_allocates_is_noticed_in_the_next_step() -> None:
    ranks = Ranks(reads=False)
    ranks.engine.wake(0)
    ranks.engine.followers[0].cache.pools[DEVICE][FULL].allocate(1)
    with pytest.raises(RanksDivergedError, match="differ after step 1"):
        ranks.engine.wake(1)


def test_the_invariant_check_of_each_rank_is_called() -> None:
    plot, checked = plot_of("full"), list[str]()
    first, second = (engine_of(plot, ManualExecutor(), checks=False) for _ in range(2))
    first.check = lambda engine: checked.append("first")
    second.check = lambda engine: checked.append("second")
    storage = StorageConfig(kind="memory")
    RankedEngine([first, second], RESTORABLE, storage.batch_pages).wake(0)
    assert checked == ["first", "second"]
