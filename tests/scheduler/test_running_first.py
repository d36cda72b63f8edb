"""Steps in vLLM's order (`scheduler.batching=running_first`), and answers that end a plan late."""

from dataclasses import replace
from typing import Any

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.tiers.transfer import BackUp
from hicache.cache.tree.events import NO_DEMAND, Purpose
from hicache.cache.tree.node import DEVICE, HOST
from hicache.config import Batching, QuirksConfig
from hicache.scheduler.batch import Batch
from tests.scheduler.world import SCHEDULER, World, plot_of, random_requests, request_of

VLLM = replace(SCHEDULER, batching=Batching.running_first)


def world_of(
    pages: int = 40, *, host: int = 0, asynchronous: bool = False, chunk: int = 64
) -> World:
    config = replace(VLLM, asynchronous=asynchronous, chunk_tokens=chunk)
    plot = plot_of(
        "full", scheduler=config, device=(pages, 0, 0), host=(host, 0, 0), has_storage=False
    )
    return World(plot)


def submit(world: World, number: int, length: int, num_answers: int = 9) -> None:
    tokens = range(1000 * number, 1000 * number + length)
    world.scheduler.submit(request_of(number, tokens, [7] * num_answers), 0)


def step(world: World) -> Batch:
    batch = world.scheduler.plan(0)
    assert batch is not None
    world.scheduler.commit(batch, 1, 0)
    return batch


def chunks(batch: Batch) -> list[tuple[int, int, int]]:
    return [(each.req.request.id, each.start, each.end) for each in batch.extends]


def ids(batch: Batch) -> list[int]:
    return [req.request.id for req in batch.decodes]


def test_decodes_take_tokens_of_the_budget_and_a_chunk_ends_at_any_token() -> None:
    world = world_of()
    submit(world, 1, 20)
    submit(world, 2, 100)
    assert chunks(step(world)) == [(1, 0, 20), (2, 0, 44)]
    batch = step(world)
    assert ids(batch) == [1]
    assert chunks(batch) == [(2, 44, 100)]


def test_a_request_hits_what_another_one_computes_in_the_same_step() -> None:
    world = world_of()
    for number in (1, 2):
        world.scheduler.submit(request_of(number, [*range(24), number], [7]), 0)
    assert chunks(step(world)) == [(1, 0, 25), (2, 24, 25)]


def test_back_ups_start_when_the_step_ends() -> None:
    world = world_of(host=40)
    submit(world, 1, 24)
    batch = world.scheduler.plan(0)
    assert batch is not None
    assert world.cache.outbox == []
    world.scheduler.commit(batch, 1, 0)
    assert len(world.cache.outbox) == 1


def test_a_page_of_an_answer_is_hit_when_it_is_planned_and_copied_when_it_is_computed() -> None:
    plot = plot_of("full", scheduler=VLLM, has_storage=False, answer_pages=1)
    world = World(plot)
    submit(world, 1, 15)
    step(world)
    (req,), num_copies = world.scheduler.running, len(world.cache.outbox)
    batch = world.scheduler.plan(0)
    assert batch is not None
    assert (req.sequence.tree_pages, len(world.cache.outbox)) == (2, num_copies)
    world.scheduler.commit(batch, 1, 0)
    assert len(world.cache.outbox) == num_copies + 1


def test_the_host_counts_the_first_use_of_a_request_and_its_end_after_two_more_plans() -> None:
    knobs = {"trims_leaves": True, "evicts_mirrors": True, "answer_pages": 1}
    world = World(
        plot_of("full", scheduler=VLLM, has_storage=False, backs_up_answers=False, **knobs)
    )

    def oldest() -> int:
        for back_up in [each for each in world.cache.in_flight if isinstance(each, BackUp)]:
            world.cache.complete(back_up)
        node = world.cache.tree.residency.queues[HOST][FULL].best()
        assert node is not None
        return int.from_bytes(node.edge[:4], "little") // 1000

    submit(world, 1, 16, num_answers=11)
    for _ in range(5):
        step(world)
    submit(world, 2, 16, num_answers=30)
    found = []
    for _ in range(8):  # the fourth publishes a page of the first answer, which ends in the sixth
        step(world)
        found.append(oldest())
    assert [req.request.id for req in world.scheduler.running] == [2]
    assert found == [1, 1, 1, 1, 1, 1, 1, 2]


def test_the_host_counts_the_end_of_a_request_at_once_if_no_request_is_left() -> None:
    world = World(plot_of("full", scheduler=VLLM, has_storage=False, trims_leaves=True))
    submit(world, 1, 16, num_answers=2)
    step(world)
    (node,) = world.cache.tree.nodes()
    first_use = node.host_ticks[FULL]
    step(world)
    assert world.scheduler.is_idle
    assert node.host_ticks[FULL] > first_use > 0


def test_a_request_that_goes_back_to_the_queue_keeps_its_first_use_of_the_host() -> None:
    plot = plot_of("full", scheduler=VLLM, device=(8, 0, 0), has_storage=False, trims_leaves=True)
    world = World(plot)
    for number in (1, 2):
        submit(world, number, 24, num_answers=30)
    step(world)
    ticks = [req.sequence.host_tick for req in world.scheduler.running]
    for _ in range(9):
        step(world)
    (req,) = world.scheduler.waiting
    assert 0 < ticks[0] < ticks[1] == req.sequence.host_tick


def test_nothing_is_reserved_for_answers_and_the_whole_prompt_must_fit() -> None:
    world = world_of(pages=8, chunk=16)
    submit(world, 1, 30, num_answers=20)  # four pages, and three more for the answer
    submit(world, 2, 32)  # four pages
    step(world)
    assert chunks(step(world)) == [(1, 16, 30), (2, 0, 2)]
    world = world_of(pages=8, chunk=16)
    submit(world, 1, 30, num_answers=20)
    submit(world, 2, 33)  # a page too many, although its first chunk fits
    for _ in range(3):
        step(world)
    assert [req.request.id for req in world.scheduler.waiting] == [2]


def test_the_last_admitted_goes_to_the_head_of_the_queue_and_nobody_starts_in_that_step() -> None:
    world = world_of(pages=8)
    for number in (1, 2, 3):
        submit(world, number, 24, num_answers=30)  # three pages, which the prompt fills
    assert len(step(world).extends) == 2
    for _ in range(8):
        assert ids(step(world)) == [1, 2]
    batch = step(world)
    assert ids(batch) == [1]
    assert chunks(batch) == []
    assert [req.request.id for req in world.scheduler.waiting] == [2, 3]
    assert world.counters["scheduler/retracted_count"] == 1


def test_a_loaded_request_computes_after_the_load_back() -> None:
    world = world_of(pages=12, host=40)
    world.serve([request_of(1, range(64), [7]), request_of(2, range(1000, 1080), [7])])
    submit(world, 9, 8, num_answers=20)
    step(world)
    world.scheduler.submit(request_of(3, [*range(64), 5], [7]), 0)
    batch = step(world)
    assert (ids(batch), chunks(batch)) == ([9], [])
    assert batch.load_backs == []
    (req,) = world.scheduler.prefill.loading
    world.scheduler.submit(request_of(4, [*range(64), 6], [7]), 0)
    assert chunks(step(world)) == []  # nor does one that hits the same data
    assert req.load_back is not None
    world.cache.complete(req.load_back)
    assert chunks(step(world)) == [(3, 64, 65), (4, 64, 65)]


def test_a_loaded_request_waits_while_decodes_take_all_tokens_of_the_budget() -> None:
    world = world_of(pages=12, host=40, chunk=1)
    world.serve([request_of(1, range(64), [7]), request_of(2, range(1000, 1080), [7])])
    world.scheduler.submit(request_of(3, [*range(64), 5], [7]), 0)
    world.scheduler.plan(0)
    (req,) = world.scheduler.prefill.loading
    submit(world, 9, 1, num_answers=2)
    assert chunks(step(world)) == [(9, 0, 1)]
    assert req.load_back is not None
    world.cache.complete(req.load_back)
    batch = step(world)
    assert (ids(batch), chunks(batch)) == ([9], [])
    assert chunks(step(world)) == [(3, 64, 65)]


@pytest.mark.parametrize("batching", [Batching.prefill_first, Batching.running_first])
def test_a_complete_answer_holds_its_memory_for_one_more_plan(batching: Batching) -> None:
    rooms = {}
    for asynchronous in (False, True):
        config = replace(SCHEDULER, batching=batching, asynchronous=asynchronous)
        world = World(plot_of("full", scheduler=config, host=(0, 0, 0), has_storage=False))
        submit(world, 1, 20, num_answers=2)
        submit(world, 2, 20, num_answers=9)
        step(world)
        step(world)
        rooms[asynchronous] = world.cache.room()
        assert [req.request.id for req in world.scheduler.decode.ending] == [1] * asynchronous
        step(world)
        assert [req.request.id for req in world.scheduler.ended.outcome.finished] == [1]
        assert world.cache.room() == rooms[False]
    assert rooms[True] == rooms[False] - 24


def test_a_request_of_the_step_under_way_is_not_sent_back() -> None:
    world = world_of(pages=8, asynchronous=True)
    for number in (1, 2):
        submit(world, number, 24, num_answers=30)  # three pages, which the prompt fills
    for _ in range(9):
        step(world)
    # the step under way writes to the pages of both
    assert world.scheduler.plan_once(0) == (None, True)
    assert world.counters["scheduler/retracted_count"] == 0
    assert ids(step(world)) == [1]
    assert [req.request.id for req in world.scheduler.waiting] == [2]


@pytest.mark.parametrize("num_answers", [1, 9])  # with one, the last request is about to end
def test_a_prompt_without_pages_keeps_its_place_before_later_starts(num_answers: int) -> None:
    world = world_of(pages=9, asynchronous=True, chunk=25)
    submit(world, 1, 24)
    submit(world, 2, 48)  # six pages
    assert chunks(step(world)) == [(1, 0, 24), (2, 0, 1)]
    assert chunks(step(world)) == [(2, 1, 25)]
    submit(world, 3, 7, num_answers)
    batch = step(world)  # one page is free: too few for the second prompt
    assert (ids(batch), chunks(batch)) == ([1], [(3, 0, 7)])
    assert world.scheduler.started[0].request.id == 2
    batch = step(world)  # the third request cannot be sent back, nor run before the second one
    assert (ids(batch), chunks(batch), world.scheduler.waiting) == ([1], [], [])
    step(world)
    assert world.scheduler.waiting[0].request.id == 2


def test_a_page_enters_the_tree_with_its_last_token_if_the_step_before_left_the_request_out() -> (
    None
):
    config = replace(VLLM, asynchronous=True, chunk_tokens=80)
    plot = plot_of("full", scheduler=config, device=(12, 0, 0), has_storage=False, answer_pages=1)
    world = World(plot)
    for number, length in enumerate((24, 23, 20)):  # four pages each, eight tokens later
        submit(world, number, length, num_answers=30)
    for _ in range(9):
        step(world)
    second = world.scheduler.running[1]
    assert world.scheduler.plan_once(0) == (None, True)  # no page for the first request
    assert ids(step(world)) == [0, 1]  # the third one has gone back
    assert (second.kv_len, second.sequence.tree_pages) == (32, 4)


def states_world() -> World:
    knobs = {"keeps_for_repeats": True, "trims_leaves": True, "answer_pages": 1}
    quirks = QuirksConfig(states_per_request=1)
    return World(plot_of("full_mamba", scheduler=VLLM, has_storage=False, quirks=quirks, **knobs))


def test_with_states_a_chunk_ends_at_a_page_and_where_a_state_is_kept() -> None:
    world = states_world()
    submit(world, 1, 50)
    submit(world, 2, 45)
    assert chunks(step(world)) == [(1, 0, 48), (2, 0, 16)]
    assert world.cache.tree.residency.resident[DEVICE][MAMBA] == 1
    assert len(world.cache.pools[DEVICE][MAMBA].taken) == 3  # and one for each request
    submit(world, 3, 70)
    assert chunks(step(world)) == [(1, 48, 50), (2, 16, 40), (3, 0, 32)]
    submit(world, 4, 70)
    batch = step(world)  # 58 tokens are left, the third request ends at page 64
    assert (ids(batch), chunks(batch)) == ([1], [(2, 40, 45), (3, 32, 64), (4, 0, 24)])


def test_a_request_waits_for_the_next_step_if_this_one_computes_its_state() -> None:
    world = states_world()
    for number in (1, 2):
        world.scheduler.submit(request_of(number, [*range(24), number], [7]), 0)
    assert chunks(step(world)) == [(1, 0, 24)]
    assert chunks(step(world)) == [(1, 24, 25), (2, 24, 25)]


def test_a_load_begins_in_a_step_that_has_less_than_a_page_left() -> None:
    world = states_world()
    world.serve([request_of(1, range(25), [7])])
    world.cache.make_room(40, Purpose.prefill)  # all of it leaves the device
    submit(world, 8, 5)
    step(world)
    submit(world, 9, 60)
    world.scheduler.submit(request_of(3, [*range(24), *range(90, 106)], [7]), 0)
    submit(world, 10, 60)
    assert chunks(step(world)) == [(9, 0, 56)]  # and one token for the answer
    assert [req.request.id for req in world.scheduler.prefill.loading] == [3]
    assert [req.request.id for req in world.scheduler.waiting] == [10]


def test_a_hit_state_is_as_old_as_its_last_release() -> None:
    world = states_world()
    world.serve([request_of(1, range(25), [7])])
    (node,) = (each for each in world.cache.tree.nodes() if each.held[DEVICE][MAMBA])
    last = node.aux_ticks[MAMBA]
    world.scheduler.submit(request_of(2, range(40), [7]), 0)
    assert chunks(step(world)) == [(2, 24, 32)]
    released = node.aux_ticks[MAMBA]
    assert released > last
    step(world)
    assert node.aux_ticks[MAMBA] == released


def windows_world(**more: Any) -> World:
    knobs = {"keeps_for_repeats": True, "trims_leaves": True, "answer_pages": 1, **more}
    return World(plot_of("full_swa", scheduler=VLLM, has_storage=False, **knobs))


def test_a_prompt_that_finds_no_pages_again_and_again_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of(chunk=16)
    submit(world, 1, 40)
    extend = world.cache.extend
    monkeypatch.setattr(  # its second chunk never finds a page
        world.cache, "extend", lambda sequence, end, *more: end <= 16 and extend(sequence, end)
    )
    for _ in range(20):
        if (batch := world.scheduler.plan(0)) is not None:
            world.scheduler.commit(batch, 1, 0)
    ((req, reason),) = world.scheduler.ended.take().rejected
    assert reason == "needs more pages than the pools can give"
    assert world.counters["scheduler/retracted_count"] == req.failed_prompts == 4


def test_answers_keep_no_windows_while_they_grow() -> None:
    world = windows_world()
    submit(world, 1, 25, num_answers=20)
    for _ in range(17):
        step(world)
    resident = world.cache.tree.residency.resident[DEVICE]
    assert (resident[FULL], resident[SWA]) == (5, 3)


def test_windows_are_evicted_page_by_page_in_the_order_in_which_requests_free_them() -> None:
    world = windows_world()
    world.serve([request_of(1, range(25), [7] * 9)])
    tree, order = world.cache.tree, []
    tree.is_shared = (True, True)  # KV and windows leave for each other
    while (found := tree.victim(DEVICE, FULL, 1)) is not None:
        node, kind = found
        order.append((kind, node.start, node.end))
        tree.evict(node, DEVICE, kind, NO_DEMAND)
    first, *rest = order
    assert first == (SWA, 0, 1)  # the answer left it behind; the others follow the request's KV
    assert rest == [*((FULL, page, page + 1) for page in (3, 2, 1, 0)), (SWA, 2, 3), (SWA, 1, 2)]


def test_a_loaded_window_leaves_the_device_when_it_has_been_read() -> None:
    world = windows_world()
    world.serve([request_of(1, range(25), [7])])
    world.cache.make_room(40, Purpose.prefill)  # all of it leaves the device
    assert world.cache.tree.residency.resident[DEVICE][SWA] == 0
    world.scheduler.submit(request_of(2, range(60), [7]), 0)
    world.scheduler.plan(0)
    (req,) = world.scheduler.prefill.loading
    assert [len(page_ids) for _, _, page_ids in req.sequence.leaving] == [3]
    assert world.cache.tree.residency.resident[DEVICE][SWA] == 0  # no other request can hit it
    assert req.load_back is not None
    world.cache.complete(req.load_back)
    assert chunks(step(world)) == [(2, 24, 60)]
    assert world.counters["cache/host_hit_tokens"] == 24
    held = [node for node in world.cache.tree.nodes() if node.held[DEVICE][SWA] is not None]
    assert min(node.start for node in held) == 4  # the window of its own prompt


def test_a_page_of_two_kinds_leaves_the_host_one_kind_at_a_time() -> None:
    world = windows_world(evicts_mirrors=True)
    world.serve([request_of(1, range(25), [7])])
    tree = world.cache.tree
    tree.is_shared = (True, True)  # KV and windows leave for each other
    for need, kind in ((2, FULL), (1, SWA)):  # two pages: KV and window of the last page
        found = tree.victim(HOST, FULL, need)
        assert found is not None
        assert (found[0].start, found[0].end, found[1]) == (2, 3, kind)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["full", "full_swa", "full_mamba", "all"])
def test_all_requests_are_answered_on_small_pools(kind: str, *, asynchronous: bool) -> None:
    config = replace(VLLM, asynchronous=asynchronous)
    world = World(plot_of(kind, scheduler=config, device=(40, 40, 20), host=(20, 20, 9)))
    world.serve(random_requests(5, count=30, gap_ns=10_000_000))
    assert sorted(req.request.id for req, _ in world.finished) == list(range(30))
    assert world.counters["scheduler/retracted_count"] > 0
