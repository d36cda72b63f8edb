"""What is told of a request before, while and after it is in the queue."""

import pytest

from hicache.cache.prefetch.prefetch import Phase
from hicache.config import SchedulerConfig
from hicache.observe.timeline import RecordedWaits, Turn
from hicache.scheduler.queue_waits import NO_CHUNK, Cause, Shortage
from hicache.scheduler.request_state import RequestState
from tests.scheduler.world import World, plot_of, request_of


def test_of_a_request_that_has_not_begun_no_token_is_counted() -> None:
    req = RequestState(request_of(3, range(20), [1, 2]), b"", 7, 500)
    counted = (req.device_len, req.host_len, req.storage_len, req.computed_len, req.recomputed_len)
    assert counted == (0, 0, 0, 0, 0)
    assert (req.decoded, req.num_parts, req.retractions, req.storage_wait_ns) == (0, 0, 0, 0)
    assert (req.load_back_ns, req.cached_len, req.kv_len) == (0, 0, 0)
    assert (req.extend_len, req.remaining_output) == (20, 2)


def test_a_request_that_is_sent_back_begins_again_where_its_answer_ends() -> None:
    req = RequestState(request_of(3, range(20), [1, 2, 3]), b"tokens", 7, 500)
    before = req.sequence
    before.namespace = "tenant"
    object.__setattr__(req.request, "namespace", "tenant")
    req.remaining_output = 1
    req.cached_len, req.kv_len, req.placed, req.prefetched = 8, 21, [16], (8, 16)
    req.restart()
    assert req.sequence is not before
    assert (req.sequence.tokens, req.sequence.namespace) == (b"tokens", "tenant")
    assert (req.target_len, req.cached_len, req.kv_len, req.extend_len) == (22, 0, 0, 22)
    assert (req.placed, req.prefetched) == ([], (0, 0))
    assert (req.retractions, req.decoded, req.remaining_output) == (1, 2, 1)


def test_a_chunk_may_be_a_single_token() -> None:
    config = SchedulerConfig(chunk_tokens=10, max_running=8)
    world = World(plot_of("full", scheduler=config, has_storage=False, page_size=1))
    for number, length in ((0, 9), (1, 5)):
        world.scheduler.submit(
            request_of(number, range(100 * number, 100 * number + length), [1]), 0
        )
    batch = world.scheduler.plan(0)
    assert batch is not None
    assert [(each.start, each.end) for each in batch.extends] == [(0, 9), (0, 1)]


def test_requests_behind_a_prompt_that_is_computed_in_chunks_wait_for_a_chunk() -> None:
    config = SchedulerConfig(chunk_tokens=8, max_running=8)
    world = World(plot_of("full", scheduler=config, has_storage=False, page_size=1))
    for number in (0, 1):
        world.scheduler.submit(request_of(number, range(100 * number, 100 * number + 20), [1]), 0)
    world.scheduler.plan(0)
    assert world.scheduler.prefill.queue_waits.lacks == NO_CHUNK


def test_who_was_sent_back_is_looked_at_before_a_second_step() -> None:
    scheduler = world_of(new_token_ratio=0, new_token_ratio_floor=0).scheduler
    for number in range(2):  # together they need more than the 320 tokens there are
        scheduler.submit(request_of(number, range(1000 * number, 1000 * number + 60), [1] * 150), 0)
    now_ns, steps = 0, []
    while scheduler.cache.counters["scheduler/retracted_count"] == 0:
        batch = scheduler.plan(now_ns)
        assert batch is not None
        steps.append(batch.num_steps)
        now_ns += 10
        scheduler.commit(batch, batch.num_steps, now_ns)
    assert max(steps) > 1
    assert (steps[-1], len(scheduler.running), len(scheduler.waiting)) == (1, 1, 1)


def world_of(**knobs: int) -> World:
    config = SchedulerConfig(**{"chunk_tokens": 64, "max_running": 8, **knobs})  # type: ignore[arg-type]
    return World(plot_of("full", scheduler=config, has_storage=False))


def test_whoever_is_dropped_is_handed_back_wherever_it_was() -> None:
    scheduler = world_of(max_running=1).scheduler
    running, half, waiting = (
        scheduler.submit(
            request_of(number, range(1000 * number, 1000 * number + length), [1, 2]), 0
        )
        for number, length in ((0, 10), (1, 100), (2, 10))
    )
    batch = scheduler.plan(0)
    assert batch is not None
    scheduler.commit(batch, 1, 10)
    assert scheduler.abort(2, 10) is waiting
    assert scheduler.abort(0, 10) is running
    assert scheduler.plan(20) is not None
    assert scheduler.prefill.partial is half
    assert scheduler.abort(1, 20) is half
    assert scheduler.is_idle
    assert scheduler.abort(1, 20) is None


@pytest.mark.parametrize(
    ("order", "wanted"), [("fcfs", [0, 1, 2]), ("shortest_remaining", [1, 2, 0])]
)
def test_the_queue_is_in_the_order_of_service(order: str, wanted: list[int]) -> None:
    config = SchedulerConfig(order=order, aging=0)
    scheduler = World(plot_of("full", scheduler=config, has_storage=False)).scheduler
    for number, length in enumerate((90, 30, 60)):
        start = 1000 * number
        scheduler.submit(request_of(number, range(start, start + length), [1]), number)
    assert [req.request.id for req in scheduler.waiting] == wanted
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda req: req.place)


def test_nobody_is_idle_while_a_request_waits_is_half_way_or_runs() -> None:
    scheduler = world_of().scheduler
    assert scheduler.is_idle
    scheduler.submit(request_of(0, range(100), [1, 2]), 0)
    seen = []
    while not scheduler.is_idle:
        seen.append(
            (len(scheduler.waiting), scheduler.prefill.partial is not None, len(scheduler.running))
        )
        batch = scheduler.plan(0)
        assert batch is not None
        seen.append(
            (len(scheduler.waiting), scheduler.prefill.partial is not None, len(scheduler.running))
        )
        scheduler.commit(batch, batch.num_steps, 10)
    assert seen == [(1, 0, 0), (0, 1, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 1)]


def test_the_prefetch_of_a_request_that_is_rejected_is_forgotten() -> None:
    world = World(plot_of("full"))
    assert world.prefetcher is not None
    world.scheduler.submit(request_of(0, range(304), [1] * 8), 0)  # fits, and leaves nothing over
    world.prefetcher.active[0].phase = Phase.ended
    assert world.scheduler.plan(0) is None
    ((_, reason),) = world.scheduler.ended.take().rejected
    assert reason == "needs more tokens than the pools have"
    assert not world.prefetcher.active


def test_how_many_wait_is_told_to_whoever_weighs_waiting() -> None:
    world = World(plot_of("full"))
    assert world.prefetcher is not None
    for number in range(3):
        world.scheduler.submit(request_of(number, [number] * 10, [1]), 0)
    world.scheduler.plan(0)
    assert world.prefetcher.rates.num_waiting == 3
    world.scheduler.plan(1)
    assert world.prefetcher.rates.num_waiting == 0


@pytest.mark.parametrize("is_dropped", [False, True])
def test_steps_are_cut_short_only_while_somebody_waits_for_room(*, is_dropped: bool) -> None:
    scheduler = world_of(chunk_tokens=256).scheduler
    scheduler.submit(request_of(0, range(104), [1] * 60), 0)
    scheduler.submit(request_of(1, range(1000, 1180), [1] * 8), 0)  # does not fit beside it
    batch = scheduler.plan(0)
    assert batch is not None
    scheduler.commit(batch, 1, 10)
    batch = scheduler.plan(10)
    assert batch is not None
    assert 8 < batch.num_steps < 59  # more than a page, and not all that is left of the answer
    scheduler.commit(batch, 1, 20)
    if is_dropped:
        scheduler.abort(1, 20)
    batch = scheduler.plan(20)
    assert batch is not None
    assert (batch.num_steps == 59 - 1) == is_dropped


def test_a_wait_counts_for_what_was_lacking_since_the_last_turn() -> None:
    turns: list[Turn] = []
    waits = RecordedWaits(turns)
    lacks = Shortage(Cause.tokens, first=3)
    for now_ns, shortage in ((10, NO_CHUNK), (25, lacks), (30, lacks)):
        waits.turn(now_ns, shortage)
    assert {cause: ns for cause, ns in waits.mark(60).items() if ns} == {
        Cause.step: 10,
        Cause.chunk: 15,
        Cause.tokens: 35,
    }
    assert turns == [Turn(10, NO_CHUNK), Turn(25, lacks)]
