"""One engine, one move at a time: what it counts, and what ends a run of steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.cache.tiers.transfer import StorageWrite
from hicache.clock import NEVER, SECOND_NS, SimulatedClock
from hicache.config import PrefetchConfig, SchedulerConfig
from hicache.engine.decode_run import DecodeRun
from hicache.engine.loop import Engine, serve
from hicache.executor.completions import StepEnds
from hicache.scheduler.batch import NOTHING, Outcome
from tests.engine.test_decode_run import ends_left
from tests.engine.test_lockstep import STEP_NS, Hand
from tests.scheduler.world import engine_of, plot_of, request_of


class Alone:
    """An engine whose steps take 100 ns and stand still for 5 of them, and its hand."""

    def __init__(
        self, *, stop: str = "wait_complete", max_running: int = 8, threshold: int = 10**6
    ) -> None:
        plot = plot_of(
            "full",
            scheduler=SchedulerConfig(chunk_tokens=64, max_running=max_running),
            prefetch=PrefetchConfig(stop=stop, threshold=threshold),
        )
        self.hand = Hand()
        self.engine: Engine = engine_of(plot, self.hand, checks=False)

    def count(self, name: str) -> int:
        return self.engine.cache.counters[f"engine/{name}"]

    def submit(self, number: int, now_ns: int, *, answer: int = 9, came_ns: int | None = None):
        request = request_of(number, range(number * 100, number * 100 + 20), [1] * answer)
        self.engine.submit(request, now_ns, came_ns=came_ns)

    def decode(self) -> list[int]:
        """A request is past its prompt, and a run of steps begins at 100 ns."""
        self.submit(0, 0)
        self.engine.wake(0)
        self.engine.wake(STEP_NS)
        (run,) = self.engine._runs
        return ends_left(run)


def test_what_steps_take_is_counted_and_prompts_apart() -> None:
    alone = Alone()
    assert alone.decode() == [200, 300, 400, 500, 600, 700, 800, 900]
    assert (alone.count("busy_ns"), alone.count("prefill_ns")) == (100, 100)
    alone.engine.wake(900)
    assert (alone.count("busy_ns"), alone.count("prefill_ns")) == (900, 100)
    assert alone.engine.num_steps == 9


def test_a_prompt_tells_what_computing_takes() -> None:
    alone = Alone()
    assert alone.engine.prefetcher is not None
    alone.decode()
    assert alone.engine.prefetcher.rates.compute_ns(20) == pytest.approx(100)
    alone.engine.wake(900)  # answers do not count
    assert alone.engine.prefetcher.rates.compute_ns(20) == pytest.approx(100)


def test_a_step_that_stood_still_for_a_copy_says_so_until_the_first_token() -> None:
    alone = Alone()
    alone.submit(0, 0)
    alone.engine.wake(0)
    (extend,) = alone.engine.extending
    assert extend.req.load_back_ns == 5
    alone.engine.wake(STEP_NS)
    assert extend.req.load_back_ns == 5


@pytest.mark.parametrize(("came_ns", "submitted_ns"), [(None, 130), (120, 120)])
def test_a_request_has_come_when_it_came(came_ns: int | None, submitted_ns: int) -> None:
    alone = Alone(max_running=1)
    alone.decode()
    alone.submit(1, 130, came_ns=came_ns)
    alone.engine.wake(200)
    (req,) = alone.engine.scheduler.waiting
    assert req.submitted_ns == submitted_ns


def test_who_has_no_room_is_a_backlog_as_of_the_last_arrival() -> None:
    alone = Alone(max_running=1)
    alone.decode()
    alone.submit(1, 130)
    assert alone.count("backlog_ns") == 0
    alone.engine.wake(200)  # from now on somebody waits
    alone.submit(2, 250)
    assert alone.count("backlog_ns") == 50
    alone.engine.wake(300)
    alone.submit(3, 310)
    assert alone.count("backlog_ns") == 110


def test_who_looks_sees_the_steps_that_ended_before_and_never_the_last() -> None:
    alone = Alone()
    alone.decode()
    (req,) = alone.engine.scheduler.running
    seen = []
    for moment in (50, 200, 201, 300, 301, 899, 5000):
        alone.engine.catch_up(moment)
        seen.append((req.decoded, alone.engine.num_steps, alone.count("busy_ns")))
    assert seen == [
        (1, 1, 100),
        (1, 1, 100),
        (2, 2, 200),
        (2, 2, 200),
        (3, 3, 300),
        (8, 8, 800),
        (8, 8, 800),
    ]
    assert alone.engine.step_end_ns == 900
    outcome = alone.engine.wake(900)
    assert outcome.finished == [req]
    assert alone.count("busy_ns") == 900


def test_a_run_that_was_looked_at_is_cut_short_all_the_same() -> None:
    alone = Alone()
    alone.decode()
    alone.engine.catch_up(450)
    alone.engine.interrupt(500)
    assert alone.engine.step_end_ns == 500
    alone.engine.interrupt(450)
    assert alone.engine.step_end_ns == 500


def test_nobody_running_has_nothing_to_show() -> None:
    alone = Alone()
    alone.engine.catch_up(100)
    assert (alone.engine.num_steps, alone.engine.step_end_ns) == (0, None)


def test_to_be_woken_within_a_step_ends_the_run_at_the_next_boundary() -> None:
    alone = Alone()
    alone.decode()
    assert alone.engine.wake(250) == Outcome()
    assert alone.engine.step_end_ns == 300


def test_whoever_gives_up_ends_the_run_at_the_next_boundary() -> None:
    alone = Alone()
    alone.decode()
    alone.engine.abort(0, 250)
    assert alone.engine.step_end_ns == 300
    assert [req.request.id for req in alone.engine.wake(300).aborted] == [0]
    assert alone.engine.is_idle


def write_under_way(engine: Engine) -> StorageWrite:
    write = StorageWrite(keys=[], parts=[], num_bytes=0, host_locks=[])
    engine.cache.in_flight.add(write)
    return write


def test_a_write_that_is_done_cuts_no_run_and_is_taken_in_where_its_step_ends() -> None:
    alone = Alone()
    alone.decode()
    write = write_under_way(alone.engine)
    assert not alone.engine.deliver(write, 250)
    assert alone.engine.step_end_ns == 900
    left = []
    for moment in (300, 301, 401):
        alone.engine.catch_up(moment)
        left.append((alone.engine.num_steps, write in alone.engine.cache.in_flight))
    assert left == [(2, True), (3, False), (4, False)]


def test_writes_that_are_done_meanwhile_are_taken_in_when_the_run_ends() -> None:
    alone = Alone()
    alone.decode()
    writes = [write_under_way(alone.engine) for _ in range(3)]
    for write, moment in zip(writes, (250, 260, 850), strict=True):
        assert not alone.engine.deliver(write, moment)
    assert len(alone.engine.wake(900).finished) == 1
    assert not alone.engine.cache.in_flight.intersection(writes)
    assert (alone.engine.num_steps, alone.count("busy_ns")) == (9, 900)


def test_a_write_that_is_done_meanwhile_finds_the_steps_before_it_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = Alone()
    alone.decode()
    found = []
    monkeypatch.setattr(
        alone.engine.cache, "complete", lambda done: found.append((done, alone.engine.num_steps))
    )
    write = write_under_way(alone.engine)
    alone.engine.deliver(write, 250)
    alone.engine.wake(900)
    assert found == [(write, 3)]


def test_where_the_next_step_may_need_what_a_write_has_freed_it_ends_the_run_once() -> None:
    alone = Alone()
    alone.engine.cache.tree.demotes = True
    alone.decode()
    writes = [write_under_way(alone.engine) for _ in range(2)]
    assert alone.engine.deliver(writes[0], 250)
    assert alone.engine.step_end_ns == 300
    # the run ends there already: the engine need not be woken earlier
    assert not alone.engine.deliver(writes[1], 260)
    alone.engine.wake(300)
    assert not alone.engine.cache.in_flight.intersection(writes)


@pytest.mark.parametrize(("stop", "is_news"), [("wait_complete", True), ("best_effort", False)])
def test_a_batch_of_a_read_is_news_to_those_who_wait(stop: str, *, is_news: bool) -> None:
    alone = Alone(stop=stop, threshold=16)
    engine = alone.engine
    alone.submit(0, 0)
    engine.take_in(0)
    engine.hand_out(0)
    (prefetch,) = alone.hand.queries
    prefetch.restorable = [2]
    assert engine.deliver(prefetch, 1)  # the answer
    engine.take_in(1)
    engine.hand_out(1)
    assert alone.hand.reads == [prefetch]
    prefetch.completed_pages = 1
    assert engine.deliver(prefetch, 2) is is_news
    assert engine._delivered == []  # nothing is to be done about it
    prefetch.is_read = True
    assert engine.deliver(prefetch, 3)
    assert engine._delivered == [prefetch]


def test_an_engine_wakes_for_what_comes_first() -> None:
    alone = Alone(stop="timeout", threshold=16)
    assert alone.engine.next_wake_ns(0) == NEVER
    alone.submit(0, 0)
    alone.engine.take_in(0)
    deadline_ns = alone.engine.next_wake_ns(0)
    assert deadline_ns is not None
    assert deadline_ns > SECOND_NS
    alone.engine._runs.append(DecodeRun(StepEnds([700]), 1, 0))
    assert alone.engine.next_wake_ns(0) == 700
    alone.engine._runs[:] = [DecodeRun(StepEnds([5 * SECOND_NS]), 1, 0)]
    assert alone.engine.next_wake_ns(0) == deadline_ns
    assert alone.engine.next_wake_ns(deadline_ns) == 5 * SECOND_NS


def test_every_wake_is_checked() -> None:
    alone = Alone()
    checked: list[Engine] = []
    alone.engine.check = checked.append
    alone.engine.wake(0)
    alone.submit(0, 0)
    alone.engine.wake(0)
    alone.engine.wake(50)  # within a step there is nothing to check
    assert checked == [alone.engine] * 2


def test_a_request_counts_from_its_arrival_to_its_answer() -> None:
    alone = Alone(max_running=2)  # a chunk is 64 tokens
    engine = alone.engine
    assert engine.num_requests() == 0
    engine.submit(request_of(0, range(100), [1, 2]), 0)
    assert engine.num_requests() == 1  # not looked at
    engine.wake(0)
    assert engine.num_requests() == 1  # the first chunk
    alone.submit(1, 10)
    assert engine.num_requests() == 2
    engine.wake(100)
    assert (len(engine.extending), engine.num_requests()) == (2, 2)  # the last, and a whole prompt
    alone.submit(2, 110)
    engine.wake(200)
    assert (len(engine.scheduler.running), engine.num_requests()) == (2, 3)  # and one waits
    (outcome,) = [engine.wake(300)]
    assert [req.request.id for req in outcome.finished] == [0]
    assert engine.num_requests() == 2


def test_an_engine_is_idle_with_nobody_here_and_nothing_under_way() -> None:
    alone = Alone()
    engine = alone.engine
    idle = [engine.is_idle]
    alone.submit(0, 0, answer=1)
    idle.append(engine.is_idle)  # it has come
    engine.wake(0)
    idle.append(engine.is_idle)  # its step is under way
    engine.wake(STEP_NS)
    idle.append(engine.is_idle)
    assert idle == [True, False, False, True]


def test_a_step_is_each_prompts_own_for_its_share_of_the_tokens() -> None:
    alone = Alone()
    for number in range(2):
        alone.submit(number, 0)
    alone.engine.wake(0)
    reqs = [extend.req for extend in alone.engine.extending]
    alone.engine.wake(STEP_NS)  # of which 5 ns stood still
    assert [(req.own_ns, req.shared_ns) for req in reqs] == [(47, 48), (47, 48)]


def test_a_step_that_stood_still_all_the_time_is_nobodys_own() -> None:
    alone = Alone()
    alone.submit(0, 0)
    alone.engine.wake(0)
    req = alone.engine.extending[0].req
    alone.engine._flights[0].stall_ns = STEP_NS + 1  # as clocks may have it that are read apart
    alone.engine.wake(STEP_NS)
    assert (req.own_ns, req.shared_ns) == (0, 0)


def test_an_engine_whose_steps_are_looked_at_further_is_woken_at_the_end_of_these() -> None:
    ends, woken, events = [100, 200], [], [0]
    ahead: Any = SimpleNamespace(
        is_idle=True,
        deliver=lambda done, now_ns: True,
        look_on=lambda until_ns: len(ends) > 1 and bool(ends.pop(0)),
        next_wake_ns=lambda now_ns: ends[0] if now_ns < ends[0] else NEVER,
        wake=lambda now_ns: woken.append(now_ns) or NOTHING,
    )
    events_alone: Any = SimpleNamespace(
        initial=list,
        pass_by=lambda limit_ns, clock: events.pop() if events else NEVER,
        advance=lambda now_ns: [(0, None)],
        next_look_ns=lambda: NEVER,
        at=lambda now_ns: None,
    )
    serve(
        [ahead],
        events_alone,
        clock=SimulatedClock(),
        io=events_alone,
        route=lambda request: 0,
        observer=events_alone,
    )
    assert woken == [0, 200]


def test_engines_that_nothing_will_wake_are_an_error() -> None:
    queues = SimpleNamespace(waiting=[1, 2], running=[3])
    never: Any = lambda now_ns: NEVER  # noqa: E731
    stuck: Any = SimpleNamespace(is_idle=False, scheduler=queues, next_wake_ns=never)
    idle: Any = SimpleNamespace(is_idle=True, next_wake_ns=never)
    still: Any = SimpleNamespace(
        initial=list,
        pass_by=lambda limit_ns, clock: NEVER,
        next_look_ns=lambda: NEVER,
        at=never,
    )

    def serve_all(*engines: Any) -> None:
        serve(
            engines,
            still,
            clock=SimulatedClock(),
            io=still,
            route=lambda request: 0,
            observer=still,
        )

    serve_all(idle, idle)
    with pytest.raises(RuntimeError, match=r"1 engine\(s\) are stuck: 2 requests wait and 1 run"):
        serve_all(idle, stuck)
