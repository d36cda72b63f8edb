"""Several simulated ranks that serve as one engine, each with its own tree, queue and storage.

With pipeline stages, a rank stands for its devices in all stages.

Every rank makes every decision by itself; ranks exchange only what `hicache.engine.ranks.agreement`
defines. A step begins on all ranks at the same time. It takes as long as the first rank's step and
a collective.
"""

from collections.abc import Sequence
from dataclasses import replace

from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Work
from hicache.clock import NEVER, to_ns
from hicache.config import HitAgreement
from hicache.engine.loop import Engine
from hicache.engine.pipeline import PipelineEngine
from hicache.engine.ports import Executor
from hicache.engine.ranks.agreement import (
    COPIES,
    RankAgreement,
    RanksDivergedError,
    ReadProgress,
    minimum_of,
    offer,
    taken,
    tree_digest,
)
from hicache.executor.completions import StepEnds, StepRun
from hicache.request import Request
from hicache.scheduler.batch import Batch, Outcome
from hicache.scheduler.handover import News, Sent

WHOLE_DIGEST_EVERY = 1024  # steps; in between, only traffic digests are compared


class SharedRead:
    """One prefetch that several ranks read together, each from its own storage.

    `own[i]` is the prefetch that the scheduler of rank i knows. The storage reader of rank i writes
    its progress into a copy, `local[i]`. The scheduler learns of the progress only when all ranks
    have agreed on it.
    """

    def __init__(self, own: Sequence[Prefetch]) -> None:
        self.own = own
        self.local = [replace(each, staged=list(each.staged)) for each in own]
        self.num_answers = 0
        self.is_queried = self.is_reading = False
        self.completed_pages = 0  # as last agreed

    def begin_read(self) -> None:
        self.is_reading = True
        for local, own in zip(self.local, self.own, strict=True):
            local.num_pages, local.staged = own.num_pages, list(own.staged)

    def follow(self) -> None:
        for local, own in zip(self.local, self.own, strict=True):
            local.phase, local.stop_pages = own.phase, own.stop_pages


class RankExecutor:
    """Wraps the executor of one tensor-parallel rank.

    Storage queries and reads are only collected here. The engine starts them on all ranks together.
    """

    def __init__(self, inner: Executor, ranks: "list[RankExecutor]", collective_s: float) -> None:
        self.inner = inner
        self.queries: list[Prefetch] = []
        self.reads: list[Prefetch] = []
        self.submitted: list[Sent] = []
        self._run: StepRun | None = None
        self._collective_ns = to_ns(collective_s)
        self._ranks = ranks
        ranks.append(self)

    @property
    def is_fenced(self) -> bool:
        return any(each.inner.is_fenced for each in self._ranks)

    def submit(self, work: Sent, now_ns: int) -> None:
        self.submitted.append(work)
        self.inner.submit(work, now_ns)

    def query(self, prefetch: Prefetch, now_ns: int) -> None:
        self.queries.append(prefetch)

    def read(self, prefetch: Prefetch, now_ns: int) -> None:
        self.reads.append(prefetch)

    def forward(self, batch: Batch, now_ns: int) -> StepRun:
        """Run the batch on the first rank; return the step times, which hold for every rank.

        Each step is made longer by the time of one collective operation between the ranks.
        """
        leader = self._ranks[0]
        if leader is self:
            ends, load_stall_ns = self.inner.forward(batch, now_ns)
            ends.look(NEVER)  # each step needs an agreement, so no step may be hidden in a run
            late = [end + self._collective_ns * step for step, end in enumerate(ends.known, 1)]
            self._run = StepRun(StepEnds(late), load_stall_ns)
        assert leader._run is not None
        return leader._run


class RankedEngine(Engine):
    """An engine of several simulated ranks, each with its own radix tree, queue and storage.

    This object is the first rank, and `followers` are the others. Between steps, all ranks have
    equal trees, queues and batches.
    """

    def __init__(self, ranks: Sequence[Engine], agreement: HitAgreement, batch_pages: int) -> None:
        """Join equally built engines that have not started; each becomes one rank.

        The new object replaces `ranks[0]`.
        """
        self._executors: list[RankExecutor] = []
        self._agreements: list[RankAgreement] = []
        for rank in ranks:
            assert rank.prefetcher is not None
            rank.executor = RankExecutor(
                rank.executor, self._executors, rank.cache.rules.collective_s
            )
            self._agreements.append(
                RankAgreement(rank.cache, rank.prefetcher, whole_digest_every=WHOLE_DIGEST_EVERY)
            )
        first = ranks[0]
        super().__init__(
            first.cache, first.prefetcher, first.scheduler, first.executor, check=first.check
        )
        self.followers = ranks[1:]
        self._batch_pages = batch_pages
        self._rule = agreement
        self._reads: dict[Prefetch, SharedRead] = {}  # by any rank's prefetch, own or local
        self._owners: dict[Work, RankAgreement] = {}  # of copies in flight

    def submit(self, request: Request, now_ns: int, *, came_ns: int | None = None) -> None:
        super().submit(request, now_ns, came_ns=came_ns)
        for follower in self.followers:
            follower.submit(request, now_ns, came_ns=came_ns)

    def abort(self, request_id: int, now_ns: int) -> None:
        super().abort(request_id, now_ns)
        for follower in self.followers:
            follower.abort(request_id, now_ns)

    def deliver(self, done: Work | Prefetch | News, now_ns: int) -> bool:
        """Tell the engine that one rank has finished a copy, or has news of a prefetch.

        The news is which pages storage has, or that more of them have been read.

        The report takes effect when all ranks have made the same report. Return True if the engine
        must act now: the report takes effect, or a planned batch still has to begin.
        """
        is_news = False
        if isinstance(done, Prefetch):
            read = self._reads.get(done)
            if read is not None:  # None if its end was agreed with an earlier report
                is_news = self._hear(read)
        elif isinstance(done, COPIES):
            self._owners.pop(done).copied(done)
            is_news = all(each.has_copied(type(done)) for each in self._agreements)
        if is_news or self.is_held:
            self.interrupt(now_ns)
        return is_news or self.is_held

    def catch_up(self, now_ns: int) -> None:
        num_steps = self.num_steps
        super().catch_up(now_ns)
        for follower in self.followers:
            follower.catch_up(now_ns)
        self._count("step_collectives_count", self.num_steps - num_steps)

    def next_wake_ns(self, now_ns: int) -> int:
        moments = [each.next_wake_ns(now_ns) for each in self.followers]
        return min([super().next_wake_ns(now_ns), *moments])

    def interrupt(self, now_ns: int) -> None:
        super().interrupt(now_ns)
        for follower in self.followers:
            follower.interrupt(now_ns)

    def wake(self, now_ns: int) -> Outcome:
        end = self.step_end_ns
        if end is not None and end > now_ns and not self.goes_on(now_ns):
            self.interrupt(now_ns)
            return Outcome()
        self.catch_up(now_ns)  # the agreement may use pages that earlier steps freed
        self._agree(now_ns)
        num_steps = self.num_steps
        outcome = super().wake(now_ns)
        for follower in self.followers:
            theirs = follower.wake(now_ns)
            if _ended(theirs) != _ended(outcome) or follower.step_end_ns != self.step_end_ns:
                raise RanksDivergedError(f"the ranks' batches differ at {now_ns} ns")
        self._begin_work(now_ns)
        if self._is_outvoted(now_ns):
            self.interrupt(now_ns)
        # one per step, and one for each wake without a step
        self._count("step_collectives_count", max(self.num_steps - num_steps, 1))
        return outcome

    def goes_on(self, now_ns: int) -> bool:
        """Whether the engine may act before the end of a step."""
        del now_ns
        return False

    def check_equal(self) -> None:
        digest = tree_digest(self.cache.tree)
        for rank, follower in enumerate(self.followers, 1):
            if tree_digest(follower.cache.tree) != digest:
                raise RanksDivergedError(
                    f"at the end of the run, the tree of rank {rank} differs from that of rank 0"
                )

    def _agree(self, now_ns: int) -> None:
        minimum = minimum_of([each.pack(now_ns) for each in self._agreements])
        if self._listener is not None:
            self._listener.at(now_ns)
        for agreement in self._agreements:
            agreement.apply(minimum, now_ns)

    def _is_outvoted(self, now_ns: int) -> bool:
        # True if the ranks would vote differently at the next step end without further results:
        # they voted before the results of this step end were known
        assert self.prefetcher is not None
        if self.step_end_ns is None or not self.prefetcher.policy.waits:
            return False
        verdicts = self.prefetcher.verdicts or {}
        ballots = [each.ballot(now_ns) for each in self._agreements]
        return any(
            all(ballot[number] for ballot in ballots) != verdicts.get(number, False)
            for number in ballots[0]
        )

    def _begin_work(self, now_ns: int) -> None:
        for executor, agreement in zip(self._executors, self._agreements, strict=True):
            for work in executor.submitted:
                if isinstance(work, COPIES):  # other works are not reported
                    agreement.submitted(work)
                    self._owners[work] = agreement
            executor.submitted.clear()
        for own in zip(*(each.queries for each in self._executors), strict=True):
            read = SharedRead(own)
            self._reads |= dict.fromkeys((*read.own, *read.local), read)
            for executor, local in zip(self._executors, read.local, strict=True):
                executor.inner.query(local, now_ns)
        for own in zip(*(each.reads for each in self._executors), strict=True):
            read = self._reads[own[0]]
            read.begin_read()
            num_batches = -(-read.own[0].num_pages // self._batch_pages)
            self._count("completion_collectives_count", num_batches + 1)
            for executor, local in zip(self._executors, read.local, strict=True):
                executor.inner.read(local, now_ns)
        for executor in self._executors:
            executor.queries.clear()
            executor.reads.clear()
        for read in dict.fromkeys(self._reads.values()):
            read.follow()
            if read.is_queried and not read.is_reading and read.own[0].is_settled:
                self._forget(read)  # too short to read

    def _hear(self, read: SharedRead) -> bool:
        if read.is_queried:
            return self._hear_of_read(read)
        read.num_answers += 1
        if read.num_answers < len(read.local):
            return False
        # the last rank's offer completes the query's collective
        read.is_queried = True
        lengths = [local.restorable or [] for local in read.local]
        offers = [offer(each, read.own[0].num_pages, self._rule) for each in lengths]
        common = taken(minimum_of(offers), self._rule)
        self._count("query_collectives_count", 1)
        longest = [max(each, default=0) for each in lengths]
        agreed = max(common, default=0)
        self._count("unequal_hits_count", int(len(set(longest)) > 1))
        self._count("given_up_pages", max(longest) - agreed)
        is_illegal = agreed > 0 and any(agreed not in each for each in lengths)
        self._count("illegal_lengths_count", int(is_illegal))
        leading = min(local.leading_pages for local in read.local)
        for agreement, own in zip(self._agreements, read.own, strict=True):
            news = ReadProgress(own, restorable=common, leading_pages=leading)
            agreement.answers.append(news)
        return True

    def _hear_of_read(self, read: SharedRead) -> bool:
        completed = min(local.completed_pages for local in read.local)
        is_read = all(local.is_read for local in read.local)
        if completed == read.completed_pages and not is_read:
            return False
        read.completed_pages = completed
        restored = [local.restored_pages for local in read.local]
        if is_read:
            lengths = {local.completed_pages for local in read.local}
            self._count("unequal_reads_count", int(len(lengths) > 1))
            self._count("unequal_sidecars_count", int(len(set(restored)) > 1))
            self._forget(read)
        for agreement, own, local in zip(self._agreements, read.own, read.local, strict=True):
            agreement.progress.append(
                ReadProgress(
                    own,
                    completed_pages=completed,
                    restored_pages=restored[0] if len(set(restored)) == 1 else 0,
                    is_read=is_read,
                    read_ns=local.read_ns,
                )
            )
        return True

    def _forget(self, read: SharedRead) -> None:
        for prefetch in (*read.own, *read.local):
            del self._reads[prefetch]

    def _count(self, name: str, amount: int) -> None:
        self.cache.counters[f"agreement/{name}"] += amount


class RankedPipeline(RankedEngine, PipelineEngine):
    """An engine with pipeline stages and several ranks."""

    def goes_on(self, now_ns: int) -> bool:
        return PipelineEngine.goes_on(self, now_ns)


def joined(ranks: Sequence[Engine], agreement: HitAgreement, batch_pages: int) -> RankedEngine:
    """Join equally built engines that have not started; each becomes one rank."""
    stages = [each.stages for each in ranks if isinstance(each, PipelineEngine)]
    if not stages:
        return RankedEngine(ranks, agreement, batch_pages)
    engine = RankedPipeline(ranks, agreement, batch_pages)
    for each in (engine, *ranks):
        assert isinstance(each, PipelineEngine)
        each.stages = stages[0]  # a step takes the same time on all ranks
    return engine


def _ended(outcome: Outcome) -> list[list[int]]:
    rejected = [req for req, _ in outcome.rejected]
    reqs = (outcome.finished, rejected, outcome.aborted)
    return [[req.request.id for req in each] for each in reqs]
