"""The scheduler: the order of service, decode steps, retractions and aborts."""

from collections.abc import Sequence

import pytest

from hicache.config import Batching
from hicache.scheduler.batch import Batch, Extend
from hicache.scheduler.request_state import RequestState
from tests.scheduler.world import World, bare_world, fresh, ids, request_of


@pytest.mark.parametrize(
    ("order", "wanted"), [("fcfs", [0, 1, 2]), ("shortest_remaining", [1, 2, 0])]
)
def test_queue_is_sorted_by_the_configured_order(order: str, wanted: list[int]) -> None:
    world = bare_world(order=order)
    for number, length in enumerate((90, 30, 60)):
        world.submit(fresh(number, length, 1))
    waiting = world.scheduler.waiting
    assert ids(waiting) == wanted
    assert waiting == sorted(waiting, key=lambda req: req.place)


@pytest.mark.parametrize("batching", list(Batching), ids=lambda batching: batching.value)
def test_only_mixed_batching_decodes_in_a_step_with_prompts(batching: Batching) -> None:
    world = bare_world(batching=batching)
    world.submit(fresh(0, 20))
    world.step()
    world.submit(fresh(1, 20))
    batch = world.step()
    is_mixed = batching not in (Batching.prefill_first, Batching.prompts_together)
    assert (len(batch.extends), ids(batch.decodes)) == (1, [0] * is_mixed)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_decode_run_is_cut_short_only_while_a_request_waits_for_memory(*, is_aborted: bool) -> None:
    world = bare_world(chunk_tokens=256)
    world.submit(fresh(0, 104, 60))
    world.submit(fresh(1, 180, 8))  # does not fit beside it
    world.step()
    # more than a page, and not all that is left of the answer
    assert 8 < world.step().num_steps < 59
    if is_aborted:
        world.scheduler.abort(1, 20)
    assert (world.step().num_steps == 59 - 1) == is_aborted


def test_abort_returns_a_running_partly_computed_or_waiting_request() -> None:
    world = bare_world(max_running=1)
    scheduler = world.scheduler
    running, half, waiting = (world.submit(fresh(*each)) for each in ((0, 10), (1, 100), (2, 10)))
    world.step()
    assert scheduler.abort(2, 10) is waiting
    assert scheduler.abort(0, 10) is running
    assert scheduler.plan(20) is not None
    assert scheduler.prefill.partial is half
    assert scheduler.abort(1, 20) is half
    assert scheduler.is_idle
    assert scheduler.abort(1, 20) is None


# -- retractions ---------------------------------------------------------------------------------


def world_with(*running: tuple[int, int, int]) -> World:
    """A world of running requests: tokens of the prompt, of the answer, and decoded so far."""
    world = bare_world()
    for number, (prompt_len, output_len, decoded) in enumerate(running):
        req = world.submit(request_of(number, [number] * prompt_len, [7] * output_len))
        req.remaining_output -= decoded
        world.scheduler.running.append(req)
    world.scheduler.waiting.clear()
    return world


@pytest.mark.parametrize(
    ("running", "victim"),
    [
        ([(10, 90, 50), (20, 100, 3), (30, 80, 40)], 1),  # the fewest decoded tokens
        ([(10, 90, 5), (10, 90, 3), (11, 90, 3)], 2),  # of those, the longest prompt
        ([(10, 90, 3), (9, 90, 3), (99, 90, 4)], 0),
    ],
)
def test_request_that_loses_least_is_retracted(
    running: list[tuple[int, int, int]], victim: int
) -> None:
    world = world_with(*running)
    scheduler = world.scheduler
    prompt_len, _, decoded = running.pop(victim)
    assert scheduler._retract_one(Batch())
    (req,) = scheduler.waiting
    assert ids([req, *scheduler.running]) == [victim, *(i for i in range(3) if i != victim)]
    assert (req.target_len, req.kv_len, req.decoded) == (prompt_len + decoded, 0, decoded)
    assert (req.place, req.retractions) == ((0, victim + 1), 1)
    # the requests that stay set the share: (decoded + 20 for each) / (their answers + 1)
    share = (sum(each[2] for each in running) + 40) / (sum(each[1] for each in running) + 1)
    assert scheduler.prefill.admission.new_token_ratio.after() == pytest.approx(share)
    scheduler._retract_one(Batch())
    assert world.counters["scheduler/retracted_count"] == 2


def test_retracted_request_restarts_where_its_answer_ends() -> None:
    request = request_of(3, range(20), [1, 2, 3], namespace="tenant")
    req = RequestState(request, b"tokens", 7, 500)
    before = req.sequence
    req.remaining_output = 1
    req.cached_len, req.kv_len, req.placed, req.prefetched = 8, 21, [16], (8, 16)
    req.restart()
    assert req.sequence is not before
    assert (req.sequence.tokens, req.sequence.namespace) == (b"tokens", "tenant")
    assert (req.target_len, req.cached_len, req.kv_len, req.extend_len) == (22, 0, 0, 22)
    assert (req.placed, req.prefetched) == ([], (0, 0))
    assert (req.retractions, req.decoded, req.remaining_output) == (1, 2, 1)


def state_of(world: World) -> tuple[list[int], list[int], list[int]]:
    partial = world.scheduler.prefill.partial
    found: Sequence[Sequence[RequestState]] = (
        world.scheduler.running,
        world.scheduler.waiting,
        [] if partial is None else [partial],
    )
    running, waiting, half = map(ids, found)
    return running, waiting, half


def test_retracting_the_last_running_request_leaves_the_reserved_share_as_it_is() -> None:
    world = world_with((10, 90, 5))
    ratio = world.scheduler.prefill.admission.new_token_ratio
    before = ratio.after()
    assert not world.scheduler._retract_one(Batch())
    assert state_of(world) == ([], [0], [])
    assert ratio.after() == before
    assert world.scheduler.ended.take().rejected == []


def test_last_running_request_waits_for_a_copy_and_for_prompts_of_the_same_step() -> None:
    world = world_with((10, 90, 5))
    world.cache.in_flight.add(object())
    assert not world.scheduler._retract_one(Batch())
    assert state_of(world) == ([0], [], [])
    world = world_with((10, 90, 5), (10, 90, 5))
    second = world.scheduler.prefill.partial = world.scheduler.running.pop()
    assert not world.scheduler._retract_one(Batch(extends=[Extend(second, 0, 8, [])]))
    assert state_of(world) == ([0], [], [1])


def test_partial_prompt_gives_its_pages_to_the_last_running_request() -> None:
    world = world_with((10, 90, 5), (10, 90, 0))
    half = world.scheduler.prefill.partial = world.scheduler.running.pop()
    assert world.scheduler._retract_one(Batch())
    assert state_of(world) == ([0], [1], [])
    assert world.counters["scheduler/prefill_oom_count"] == half.retractions == 1
    assert world.counters["scheduler/retracted_count"] == 0
