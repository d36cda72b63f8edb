"""Steps in vLLM's order (`scheduler.batching=running_first`), and answers that end a plan late."""

from dataclasses import replace
from typing import Any

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import BackUp
from hicache.cache.tree.events import NO_DEMAND, Purpose
from hicache.cache.tree.node import DEVICE, HOST
from hicache.config import Batching
from hicache.request import Request
from hicache.rules import Rules
from hicache.scheduler.batch import Batch
from tests.scheduler.world import (
    KINDS,
    SCHEDULER,
    World,
    bare_world,
    chunks,
    fresh,
    ids,
    plot_of,
    random_requests,
    request_of,
)

VLLM = replace(SCHEDULER, batching=Batching.running_first)
REPEATS = {"keeps_for_repeats": True, "trims_leaves": True, "answer_pages": 1}


def world_of(pages: int = 40, *, host: int = 0, chunk: int = 64, **more: Any) -> World:
    pools = {"device": (pages, 0, 0), "host": (host, 0, 0)}
    return bare_world(scheduler=VLLM, chunk_tokens=chunk, **pools, **more)


def states_world(**more: Any) -> World:
    rules = Rules(states_per_request=1)
    return bare_world("full_mamba", scheduler=VLLM, rules=rules, **REPEATS, **more)


def windows_world(**more: Any) -> World:
    return bare_world("full_swa", scheduler=VLLM, **REPEATS, **more)


def submit(world: World, *requests: tuple[int, int] | tuple[int, int, int]) -> None:
    """Submit requests by (number, tokens of the prompt, tokens of the answer)."""
    for each in requests:
        world.submit(fresh(*each))


def hitting(number: int, cached: int, own: int) -> Request:
    """A request with `cached` tokens of the prompt of `fresh(1)`, then `own` tokens of its own."""
    tail = range(90 + number, 90 + number + own)
    return request_of(number, [*range(1000, 1000 + cached), *tail], [7])


def planned(batch: Batch) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The requests that decode in a step, and its chunks of prompts."""
    return ids(batch.decodes), chunks(batch)


def begin_load(world: World, number: int, cached: int) -> None:
    """Plan a step that loads the prefix of a new request back."""
    world.submit(hitting(number, cached, 1))
    world.scheduler.plan(0)


def complete_load(world: World) -> None:
    (req, *_) = world.scheduler.prefill.loading
    assert req.load_back is not None
    world.cache.complete(req.load_back)


def test_decodes_come_first_and_a_chunk_ends_at_any_token() -> None:
    world = world_of()
    submit(world, (1, 20), (2, 100))
    assert chunks(world.step()) == [(1, 0, 20), (2, 0, 44)]
    assert planned(world.step()) == ([1], [(2, 44, 100)])


def test_request_hits_what_another_one_computes_in_the_same_step() -> None:
    world = world_of()
    for number in (1, 2):
        world.submit(hitting(number, 24, 1))
    assert chunks(world.step()) == [(1, 0, 25), (2, 24, 25)]


def test_back_ups_start_when_the_step_ends() -> None:
    world = world_of(host=40)
    submit(world, (1, 24))
    batch = world.scheduler.plan(0)
    assert batch is not None
    assert world.cache.outbox == []
    world.scheduler.commit(batch, 1, 0)
    assert len(world.cache.outbox) == 1


def test_answer_page_can_be_hit_once_it_is_planned_and_is_backed_up_once_it_is_computed() -> None:
    world = world_of(host=80, answer_pages=1)
    submit(world, (1, 15))
    world.step()
    (req,), num_copies = world.scheduler.running, len(world.cache.outbox)
    batch = world.scheduler.plan(0)
    assert batch is not None
    assert (req.sequence.tree_pages, len(world.cache.outbox)) == (2, num_copies)
    world.scheduler.commit(batch, 1, 0)
    assert len(world.cache.outbox) == num_copies + 1


def test_host_pages_are_used_at_a_requests_first_plan_and_two_plans_after_its_end() -> None:
    world = world_of(
        host=80, trims_leaves=True, evicts_mirrors=True, answer_pages=1, backs_up_answers=False
    )

    def oldest() -> int:
        for back_up in [each for each in world.cache.in_flight if isinstance(each, BackUp)]:
            world.cache.complete(back_up)
        node = world.cache.tree.residency.queues[HOST][FULL].best()
        assert node is not None
        return int.from_bytes(node.edge[:4], "little") // 1000

    submit(world, (1, 16, 11))
    for _ in range(5):
        world.step()
    submit(world, (2, 16, 30))
    found = []
    for _ in range(8):  # the fourth publishes a page of the first answer, which ends in the sixth
        world.step()
        found.append(oldest())
    assert ids(world.scheduler.running) == [2]
    assert found == [1, 1, 1, 1, 1, 1, 1, 2]


def test_retracted_request_keeps_the_time_of_its_first_use_of_the_host() -> None:
    world = world_of(8, host=80, trims_leaves=True)
    submit(world, (1, 24, 30), (2, 24, 30))
    world.step()
    ticks = [req.sequence.host_tick for req in world.scheduler.running]
    for _ in range(9):
        world.step()
    (req,) = world.scheduler.waiting
    assert 0 < ticks[0] < ticks[1] == req.sequence.host_tick


@pytest.mark.parametrize(("second_len", "fits"), [(32, True), (33, False)])  # four pages, or five
def test_whole_prompt_must_fit_and_nothing_is_reserved_for_answers(
    second_len: int, *, fits: bool
) -> None:
    world = world_of(pages=8, chunk=16)
    submit(world, (1, 30, 20), (2, second_len))  # four pages, and three more for the answer
    world.step()
    assert chunks(world.step()) == [(1, 16, 30), *[(2, 0, 2)] * fits]
    assert ids(world.scheduler.waiting) == [2] * (not fits)


def test_last_admitted_request_is_retracted_to_the_head_of_the_queue_and_none_starts() -> None:
    world = world_of(pages=8)
    submit(world, *((number, 24, 30) for number in (1, 2, 3)))  # three pages each
    assert len(world.step().extends) == 2
    for _ in range(8):
        assert ids(world.step().decodes) == [1, 2]
    assert planned(world.step()) == ([1], [])
    assert ids(world.scheduler.waiting) == [2, 3]
    assert world.counters["scheduler/retracted_count"] == 1


def test_request_is_computed_only_in_a_step_after_its_load_back() -> None:
    world = world_of(pages=12, host=40)
    world.serve([fresh(1, 64, 1), fresh(2, 80, 1)])  # the second evicts the first
    submit(world, (9, 8, 20))
    world.step()
    world.submit(hitting(3, 64, 1))
    batch = world.step()
    assert (planned(batch), batch.load_backs) == (([9], []), [])
    world.submit(hitting(4, 64, 1))
    assert chunks(world.step()) == []  # nor does one that hits the same data
    complete_load(world)
    assert chunks(world.step()) == [(3, 64, 65), (4, 64, 65)]


def test_loaded_request_waits_while_decodes_take_all_tokens_of_the_budget() -> None:
    world = world_of(pages=12, host=40, chunk=1)
    world.serve([fresh(1, 64, 1), fresh(2, 80, 1)])
    begin_load(world, 3, 64)
    submit(world, (9, 1, 2))
    assert chunks(world.step()) == [(9, 0, 1)]
    complete_load(world)
    assert planned(world.step()) == ([9], [])
    assert chunks(world.step()) == [(3, 64, 65)]


@pytest.mark.parametrize("batching", [Batching.prefill_first, Batching.running_first])
def test_answer_holds_its_memory_for_one_more_plan_if_asynchronous(batching: Batching) -> None:
    rooms = {}
    for asynchronous in (False, True):
        world = bare_world(batching=batching, asynchronous=asynchronous, host=(0, 0, 0))
        submit(world, (1, 20, 2), (2, 20, 9))
        world.step()
        world.step()
        rooms[asynchronous] = world.cache.room()
        assert ids(world.scheduler.decode.ending) == [1] * asynchronous
        world.step()
        assert ids(world.scheduler.ended.outcome.finished) == [1]
        assert world.cache.room() == rooms[False]
    assert rooms[True] == rooms[False] - 24


def test_request_of_the_step_in_flight_is_not_retracted() -> None:
    world = world_of(pages=8, asynchronous=True)
    submit(world, (1, 24, 30), (2, 24, 30))  # three pages, which the prompt fills
    for _ in range(9):
        world.step()
    # the step in flight writes to the pages of both
    assert world.scheduler.plan_once(0) == (None, True)
    assert world.counters["scheduler/retracted_count"] == 0
    assert ids(world.step().decodes) == [1]
    assert ids(world.scheduler.waiting) == [2]


@pytest.mark.parametrize("num_answers", [1, 9])  # with one, the last request is about to end
def test_prompt_without_pages_stays_ahead_of_requests_that_start_later(num_answers: int) -> None:
    world = world_of(pages=9, asynchronous=True, chunk=25)
    submit(world, (1, 24), (2, 48))  # three pages, and six
    assert chunks(world.step()) == [(1, 0, 24), (2, 0, 1)]
    assert chunks(world.step()) == [(2, 1, 25)]
    submit(world, (3, 7, num_answers))
    # one page is free: too few for the second prompt
    assert planned(world.step()) == ([1], [(3, 0, 7)])
    assert ids(world.scheduler.started)[0] == 2
    # the third request cannot be retracted, nor run before the second one
    assert (planned(world.step()), world.scheduler.waiting) == (([1], []), [])
    world.step()
    assert world.scheduler.waiting[0].request.id == 2


def test_page_enters_the_tree_with_its_last_token_although_the_step_left_the_request_out() -> None:
    world = world_of(12, host=80, chunk=80, asynchronous=True, answer_pages=1)
    submit(world, (0, 24, 30), (1, 23, 30), (2, 20, 30))  # four pages each, eight tokens later
    for _ in range(9):
        world.step()
    second = world.scheduler.running[1]
    assert world.scheduler.plan_once(0) == (None, True)  # no page for the first request
    assert ids(world.step().decodes) == [0, 1]  # the third one is retracted
    assert (second.kv_len, second.sequence.tree_pages) == (32, 4)


@pytest.mark.parametrize(
    ("batching", "name", "count"),  # all attempts, or those that had computed a chunk
    [(Batching.prefill_first, "prefill_oom", 10), (Batching.running_first, "retracted", 4)],
)
def test_prompt_that_finds_no_pages_again_and_again_is_rejected(
    batching: Batching, name: str, count: int
) -> None:
    world = bare_world(batching=batching, chunk_tokens=16, host=(0, 0, 0))
    submit(world, (1, 40))
    extend = world.cache.extend
    # its second chunk never finds a page
    world.cache.extend = lambda sequence, end, *_: end <= 16 and extend(sequence, end)
    for _ in range(20):
        if (batch := world.scheduler.plan(0)) is not None:
            world.scheduler.commit(batch, 1, 0)
    ((req, reason),) = world.scheduler.ended.take().rejected
    assert reason == "needs more pages than the pools can give"
    assert req.failed_prompts == 4
    assert world.counters[f"scheduler/{name}_count"] == count


# -- states --------------------------------------------------------------------------------------


def test_with_states_a_chunk_ends_at_a_page_and_where_a_state_is_kept() -> None:
    world = states_world()
    submit(world, (1, 50), (2, 45))
    assert chunks(world.step()) == [(1, 0, 48), (2, 0, 16)]
    assert world.cache.tree.residency.resident[DEVICE][MAMBA] == 1
    assert len(world.cache.pools[DEVICE][MAMBA].taken) == 3  # and one for each request
    submit(world, (3, 70))
    assert chunks(world.step()) == [(1, 48, 50), (2, 16, 40), (3, 0, 32)]
    submit(world, (4, 70))
    # 58 tokens are left, the third request ends at page 64
    assert planned(world.step()) == ([1], [(2, 40, 45), (3, 32, 64), (4, 0, 24)])


def test_request_waits_for_the_next_step_if_this_one_computes_its_state() -> None:
    world = states_world()
    for number in (1, 2):
        world.submit(hitting(number, 24, 1))
    assert chunks(world.step()) == [(1, 0, 24)]
    assert chunks(world.step()) == [(1, 24, 25), (2, 24, 25)]


def test_load_back_begins_in_a_step_that_has_less_than_a_page_left() -> None:
    world = states_world()
    world.serve([fresh(1, 25, 1)])
    world.cache.make_room(40, Purpose.prefill)  # all of it leaves the device
    submit(world, (8, 5))
    world.step()
    submit(world, (9, 60))
    world.submit(hitting(3, 24, 16))
    submit(world, (10, 60))
    assert chunks(world.step()) == [(9, 0, 56)]  # and one token for the answer
    assert ids(world.scheduler.prefill.loading) == [3]
    assert ids(world.scheduler.waiting) == [10]


def test_state_is_released_two_steps_after_the_one_that_computed_or_hit_it() -> None:
    world = states_world()
    world.serve([fresh(1, 25, 1)])
    (node,) = (each for each in world.cache.tree.nodes() if each.held[DEVICE][MAMBA])
    hit = node.aux_ticks[MAMBA]
    submit(world, (1, 100, 9))
    assert chunks(world.step()) == [(1, 24, 88)]
    assert (node.aux_ticks[MAMBA], node.path_locks) == (hit, 2)
    assert chunks(world.step()) == [(1, 88, 96)]
    released = node.aux_ticks[MAMBA]
    assert released > hit
    world.step()
    assert (node.aux_ticks[MAMBA], node.path_locks) == (released, 1)


# -- windows -------------------------------------------------------------------------------------


def test_no_window_pages_of_an_answer_are_cached_while_it_grows() -> None:
    world = windows_world()
    submit(world, (1, 25, 20))
    for _ in range(17):
        world.step()
    resident = world.cache.tree.residency.resident[DEVICE]
    assert (resident[FULL], resident[SWA]) == (5, 3)


def test_windows_are_evicted_page_by_page_in_the_order_in_which_requests_free_them() -> None:
    world = windows_world()
    world.serve([fresh(1, 25, 9)])
    tree, order = world.cache.tree, []
    tree.is_shared = (True, True)  # KV and windows are evicted for each other
    while (found := tree.victim(DEVICE, FULL, 1)) is not None:
        node, kind = found
        order.append((kind, node.start, node.end))
        tree.evict(node, DEVICE, kind, NO_DEMAND)
    first, *rest = order
    assert first == (SWA, 0, 1)  # the answer left it behind; the others follow the request's KV
    assert rest == [*((FULL, page, page + 1) for page in (3, 2, 1, 0)), (SWA, 2, 3), (SWA, 1, 2)]


def test_loaded_window_leaves_the_device_when_it_has_been_read() -> None:
    world = windows_world()
    world.serve([fresh(1, 25, 1)])
    resident = world.cache.tree.residency.resident[DEVICE]
    world.cache.make_room(40, Purpose.prefill)  # all of it leaves the device
    assert resident[SWA] == 0
    world.submit(fresh(1, 60, 1))
    world.scheduler.plan(0)
    (req,) = world.scheduler.prefill.loading
    assert [len(page_ids) for _, _, page_ids in req.sequence.leaving] == [3]
    assert resident[SWA] == 0  # no other request can hit it
    complete_load(world)
    assert chunks(world.step()) == [(1, 24, 60)]
    assert world.counters["cache/host_hit_tokens"] == 24
    held = [node for node in world.cache.tree.nodes() if node.held[DEVICE][SWA] is not None]
    assert min(node.start for node in held) == 4  # the window of its own prompt


def test_host_counts_the_window_of_a_hit_as_used_only_where_a_prompt_is_expected_to_resume() -> (
    None
):
    world = windows_world(evicts_mirrors=True)

    def oldest_after(*num_tokens: int) -> int:
        for each in num_tokens:
            world.serve([fresh(1, each, 1)])
        found = world.cache.tree.victim(HOST, SWA, 1)
        assert found is not None
        return found[0].end

    assert oldest_after(25, 60) == 3  # the second prompt hits this window, and ends behind it
    assert oldest_after(25) == 7  # an equal prompt resumes there


def test_page_of_two_kinds_leaves_the_host_one_kind_at_a_time() -> None:
    world = windows_world(evicts_mirrors=True)
    world.serve([fresh(1, 25, 1)])
    tree = world.cache.tree
    tree.is_shared = (True, True)  # KV and windows are evicted for each other
    for need, kind in ((2, FULL), (1, SWA)):  # two pages: KV and window of the last page
        found = tree.victim(HOST, FULL, need)
        assert found is not None
        assert (found[0].start, found[0].end, found[1]) == (2, 3, kind)


def test_state_leaves_the_host_before_the_kv_of_its_page() -> None:
    world = states_world(evicts_mirrors=True)
    world.serve([fresh(1, 25, 1)])
    tree = world.cache.tree
    tree.is_shared = (True, True)
    found = []
    for _ in range(2):
        victim = tree.victim(HOST, FULL, 1)
        assert victim is not None
        found.append((victim[0].end, victim[1]))
        tree.evict(victim[0], HOST, victim[1], NO_DEMAND)
    assert found == [(3, MAMBA), (3, FULL)]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_planned_together_in_vllms_order_change_nothing(kind: str) -> None:
    rules = Rules(states_per_request=1, asynchronous=True)
    settings = {"scheduler": VLLM, "rules": rules, "has_storage": False, **REPEATS}
    few, many = (World(plot_of(kind, may_jump=jump, **settings)) for jump in (True, False))
    for world in (few, many):
        world.serve(random_requests(0, 25))
    assert few.outcome() == many.outcome()
    assert len(few.executor.batches) < len(many.executor.batches)
