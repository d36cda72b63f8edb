"""The serving loop: what an engine counts, what ends a run of steps, and when it wakes."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.tiers.transfer import StorageWrite
from hicache.clock import NEVER, SECOND_NS, SimulatedClock
from hicache.config import PrefetchConfig
from hicache.engine.decode_run import DecodeRun
from hicache.engine.loop import Engine, serve
from hicache.executor.completions import StepEnds
from hicache.scheduler.batch import Outcome
from hicache.scheduler.queue_waits import Cause
from hicache.scheduler.request_state import RequestState
from tests.engine.test_decode_run import ends_left
from tests.engine.test_lockstep import STEP_NS, ManualExecutor
from tests.scheduler.world import engine_of, fresh, ids, plot_of


class Alone:
    """One engine whose steps take 100 ns, of which a step with prompts waits 5 for copies."""

    def __init__(
        self, *, stop: str = "wait_complete", max_running: int = 8, threshold: int = 10**6
    ) -> None:
        prefetch = PrefetchConfig(stop=stop, threshold=threshold)
        plot = plot_of("full", max_running=max_running, prefetch=prefetch)
        self.executor = ManualExecutor()
        self.engine: Engine = engine_of(plot, self.executor, checks=False)

    def count(self, *names: str) -> list[int]:
        return [self.engine.cache.counters[f"engine/{name}_ns"] for name in names]

    def submit(self, number: int, now_ns: int, *, answer: int = 9) -> None:
        self.engine.submit(fresh(number, 20, answer), now_ns)

    def prefill(self, count: int = 1) -> list[RequestState]:
        """Begin the step that computes the prompts of these requests; return them."""
        for number in range(count):
            self.submit(number, 0)
        self.engine.wake(0)
        return [extend.req for extend in self.engine.extending]

    def decode(self) -> list[int]:
        """Begin a run of decode steps at 100 ns, and return their ends."""
        self.prefill()
        self.engine.wake(STEP_NS)
        (run,) = self.engine._runs
        return ends_left(run)

    def write(self) -> StorageWrite:
        """A write to storage in flight."""
        write = StorageWrite(keys=[], parts=[], num_bytes=0, host_locks=[])
        self.engine.cache.in_flight.add(write)
        return write


def test_a_request_that_came_before_it_was_submitted_is_queued_since_then() -> None:
    alone = Alone()
    alone.engine.submit(fresh(1, 20), 50, came_ns=20)
    alone.engine.wake(50)
    (extend,) = alone.engine.extending
    assert extend.req.queue_ns[Cause.step] == 30


# -- what is counted -----------------------------------------------------------------------------


def test_only_prompt_steps_set_the_estimated_time_to_compute_a_token() -> None:
    alone = Alone()
    assert alone.engine.prefetcher is not None
    alone.decode()
    for _ in range(2):
        assert alone.engine.prefetcher.rates.compute_ns(20) == pytest.approx(100)
        alone.engine.wake(900)  # the answer


@pytest.mark.parametrize(("stall_ns", "own_ns", "shared_ns"), [(None, 47, 48), (STEP_NS + 1, 0, 0)])
def test_step_time_is_divided_by_prompt_tokens_without_its_wait_for_copies(
    stall_ns: int | None, own_ns: int, shared_ns: int
) -> None:
    alone = Alone()
    reqs = alone.prefill(2)
    assert [req.load_back_ns for req in reqs] == [5, 5]
    if stall_ns is not None:  # longer than the step, as two clocks may measure
        alone.engine._flights[0].stall_ns = stall_ns
    alone.engine.wake(STEP_NS)
    assert [req.load_back_ns for req in reqs] == [5, 5]
    assert [(req.own_ns, req.shared_ns) for req in reqs] == [(own_ns, shared_ns)] * 2


def test_backlog_is_the_time_in_which_requests_wait_up_to_the_last_arrival() -> None:
    alone = Alone(max_running=1)
    alone.decode()
    alone.submit(1, 130)
    backlogs = [alone.count("backlog")]
    alone.engine.wake(200)  # from now on a request waits
    alone.submit(2, 250)
    backlogs.append(alone.count("backlog"))
    alone.engine.wake(300)
    alone.submit(3, 310)
    assert [*backlogs, alone.count("backlog")] == [[0], [50], [110]]


def test_request_counts_as_present_from_its_arrival_to_its_answer() -> None:
    alone = Alone(max_running=2)  # a chunk is 64 tokens
    engine, counts = alone.engine, [alone.engine.num_requests()]
    engine.submit(fresh(0, 100, 2), 0)
    counts.append(engine.num_requests())  # not considered
    engine.wake(0)
    counts.append(engine.num_requests())  # its first chunk is computed
    alone.submit(1, 10)
    counts.append(engine.num_requests())
    engine.wake(100)
    assert len(engine.extending) == 2
    counts.append(engine.num_requests())
    alone.submit(2, 110)
    engine.wake(200)
    assert len(engine.scheduler.running) == 2
    counts.append(engine.num_requests())  # and one waits
    assert ids(engine.wake(300).finished) == [0]
    assert [*counts, engine.num_requests()] == [0, 1, 1, 2, 2, 3, 2]


def test_engine_is_idle_without_requests_and_without_a_step_in_progress() -> None:
    alone = Alone()
    idle = [alone.engine.is_idle]
    alone.submit(0, 0, answer=1)
    idle.append(alone.engine.is_idle)
    for now_ns in (0, STEP_NS):
        alone.engine.wake(now_ns)
        idle.append(alone.engine.is_idle)
    assert idle == [True, False, False, True]


# -- runs of steps -------------------------------------------------------------------------------


def test_catching_up_commits_the_steps_that_ended_before_but_never_the_last() -> None:
    alone = Alone()
    alone.engine.catch_up(50)
    assert (alone.engine.num_steps, alone.engine.step_end_ns) == (0, None)
    assert alone.decode() == [200, 300, 400, 500, 600, 700, 800, 900]
    (req,) = alone.engine.scheduler.running
    seen = []
    for moment in (50, 200, 201, 300, 301, 899, 5000):
        alone.engine.catch_up(moment)
        seen.append((req.decoded, alone.engine.num_steps, *alone.count("busy")))
    assert seen == [(steps, steps, 100 * steps) for steps in (1, 1, 2, 2, 3, 8, 8)]
    assert alone.engine.step_end_ns == 900
    assert alone.engine.wake(900).finished == [req]
    assert alone.count("busy", "prefill") == [900, 100]


def test_wake_and_abort_within_a_step_end_the_run_with_that_step() -> None:
    alone = Alone()
    alone.decode()
    assert alone.engine.wake(350) == Outcome()
    assert alone.engine.step_end_ns == 400
    alone.engine.abort(0, 250)
    assert alone.engine.step_end_ns == 300
    assert ids(alone.engine.wake(300).aborted) == [0]
    assert alone.engine.is_idle


def test_finished_write_does_not_cut_a_run_of_steps_and_is_applied_when_its_step_ends() -> None:
    alone = Alone()
    alone.decode()
    write, *later = (alone.write() for _ in range(3))
    for each, moment in zip((write, *later), (250, 260, 850), strict=True):
        assert not alone.engine.deliver(each, moment)
    assert alone.engine.step_end_ns == 900
    in_flight, left = alone.engine.cache.in_flight, []
    for moment in (300, 301, 401):
        alone.engine.catch_up(moment)
        left.append((alone.engine.num_steps, write in in_flight))
    assert left == [(2, True), (3, False), (4, False)]
    assert len(alone.engine.wake(900).finished) == 1
    assert not in_flight.intersection(later)
    assert (alone.engine.num_steps, alone.count("busy")) == (9, [900])


def test_finished_write_cuts_a_run_of_steps_once_if_the_next_step_may_need_its_memory() -> None:
    alone = Alone()
    alone.engine.cache.tree.demotes = True
    alone.decode()
    writes = [alone.write(), alone.write()]
    assert alone.engine.deliver(writes[0], 250)
    assert alone.engine.step_end_ns == 300
    # the run ends there already: the engine need not wake earlier
    assert not alone.engine.deliver(writes[1], 260)
    alone.engine.wake(300)
    assert not alone.engine.cache.in_flight.intersection(writes)


@pytest.mark.parametrize(("stop", "is_news"), [("wait_complete", True), ("best_effort", False)])
def test_batch_of_a_read_wakes_an_engine_that_waits_for_it(stop: str, *, is_news: bool) -> None:
    alone = Alone(stop=stop, threshold=16)
    engine = alone.engine
    alone.submit(0, 0)
    engine.take_in(0)
    engine.hand_out(0)
    (prefetch,) = alone.executor.queries
    prefetch.restorable = [2]
    assert engine.deliver(prefetch, 1)  # the answer
    engine.take_in(1)
    engine.hand_out(1)
    assert alone.executor.reads == [prefetch]
    prefetch.completed_pages = 1
    assert engine.deliver(prefetch, 2) is is_news
    assert engine._delivered == []  # nothing is to be applied
    prefetch.is_read = True
    assert engine.deliver(prefetch, 3)
    assert engine._delivered == [prefetch]


# -- wakes ---------------------------------------------------------------------------------------


def test_engine_wakes_at_the_next_step_end_or_deadline() -> None:
    alone = Alone(stop="timeout", threshold=16)
    engine = alone.engine
    assert engine.next_wake_ns(0) == NEVER
    alone.submit(0, 0)
    engine.take_in(0)
    assert engine.next_wake_ns(0) == NEVER  # the scheduler has not considered it
    assert engine.scheduler.plan(0) is None
    deadline_ns = engine.next_wake_ns(0)
    assert SECOND_NS < deadline_ns < 5 * SECOND_NS
    for end_ns, first_ns in ((700, 700), (5 * SECOND_NS, deadline_ns)):
        engine._runs[:] = [DecodeRun(StepEnds([end_ns]), 1, 0)]
        assert engine.next_wake_ns(0) == first_ns
    assert engine.next_wake_ns(deadline_ns) == 5 * SECOND_NS


def test_invariants_are_checked_at_every_wake_except_within_a_step() -> None:
    alone = Alone()
    checked: list[Engine] = []
    alone.engine.check = checked.append
    alone.engine.wake(0)
    alone.prefill()
    alone.engine.wake(50)
    assert checked == [alone.engine] * 2


def test_engines_with_requests_that_nothing_will_wake_are_an_error() -> None:
    queues = SimpleNamespace(waiting=[1, 2], running=[3])
    idle, stuck = (
        SimpleNamespace(is_idle=is_idle, scheduler=queues, next_wake_ns=lambda now_ns: NEVER)
        for is_idle in (True, False)
    )
    events: Any = SimpleNamespace(
        initial=list,
        is_over=False,
        pass_by=lambda limit_ns, clock: NEVER,
        next_look_ns=lambda: NEVER,
        at=lambda now_ns: None,
    )

    def serve_with(*engines: Any) -> None:
        roles: Any = dict.fromkeys(("io", "observer"), events)
        serve(engines, events, clock=SimulatedClock(), route=lambda request: 0, **roles)

    serve_with(idle, idle)
    with pytest.raises(RuntimeError, match=r"1 engine\(s\) are stuck: 2 requests wait and 1 run"):
        serve_with(idle, stuck)
