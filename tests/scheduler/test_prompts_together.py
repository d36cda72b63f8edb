"""Steps in SGLang's order (`scheduler.batching=prompts_together`)."""

from dataclasses import replace
from typing import Any

import pytest

from hicache.cache.kinds import FULL, SWA
from hicache.cache.tree.node import DEVICE
from hicache.config import Batching
from hicache.rules import Rules
from hicache.scheduler.batch import Batch
from tests.scheduler.world import EAGER, World, bare_world, chunks, fresh, ids, request_of

SGLANG = replace(EAGER, batching=Batching.prompts_together, chunk_tokens=64, max_running=8)


def world_of(pages: int, kind: str = "full", **changes: Any) -> World:
    pools = {"device": (pages, pages, 0), "host": (0, 0, 0)}
    return bare_world(kind, scheduler=SGLANG, **pools, **{"clip_new_tokens": 0, **changes})


def step(world: World) -> tuple[list[int], list[int]]:
    """Take one step; return the ids of its prompts and of its decodes."""
    batch = world.scheduler.plan_once(0)[0] or Batch()
    if batch.extends or batch.decodes:
        world.scheduler.commit(batch, 1, 0)
    return ids(extend.req for extend in batch.extends), ids(batch.decodes)


def finished(world: World) -> list[int]:
    return ids(world.scheduler.ended.take().finished)


def test_prompt_is_charged_whole_pages_of_the_chunk_budget() -> None:
    world = world_of(40)
    world.submit(fresh(1, 20))  # 24 tokens with the rest of its last page
    world.submit(fresh(2, 100))
    assert chunks(world.step()) == [(1, 0, 20), (2, 0, 40)]


@pytest.mark.parametrize(("num_answers", "admitted"), [(40, [1]), (1, [1, 2])])
def test_answer_is_charged_in_the_step_of_its_prompt(num_answers: int, admitted: list[int]) -> None:
    world = world_of(10, clip_new_tokens=100)
    world.submit(fresh(1, 20, num_answers))
    world.submit(fresh(2, 8, 1))
    assert step(world) == (admitted, [])


def test_cache_hits_do_not_count_against_the_tokens_of_a_chunk() -> None:
    world = world_of(40)
    world.submit(fresh(1, 48, 1))
    step(world)
    world.submit(request_of(2, [*range(1000, 1048), 5], [7]))
    world.submit(fresh(3, 40))
    assert step(world) == ([2, 3], [])


def test_decode_steps_up_to_the_end_of_an_answer_are_planned_at_once() -> None:
    world = world_of(100)
    world.submit(fresh(1, 20, 10))
    world.submit(fresh(2, 20, 30))
    step(world)  # both prompts; the first token of each answer
    batch, _ = world.scheduler.plan_once(0)
    assert batch is not None
    assert (ids(batch.decodes), batch.num_steps) == ([1, 2], 9)


def test_idle_engine_resets_the_reserved_share_of_answers() -> None:
    world = world_of(40, new_token_ratio=0.7, new_token_ratio_decay_steps=10)
    ratio = world.scheduler.prefill.admission.new_token_ratio
    world.submit(fresh(1, 20, 3))
    step(world)
    step(world)
    assert ratio.after() < 0.7
    while not world.scheduler.is_idle:
        step(world)
    step(world)
    assert ratio.after() == 0.7


def test_queue_that_lacks_memory_is_not_considered_until_a_running_request_leaves() -> None:
    world = world_of(10)
    world.submit(fresh(1, 40, 4))
    step(world)
    world.submit(fresh(2, 40, 3))  # too long
    assert step(world) == ([], [1])
    world.submit(fresh(3, 8, 3))
    world.scheduler.waiting.reverse()  # now the short one is first, and would fit
    assert [step(world), step(world)] == [([], [1])] * 2
    assert finished(world) == [1]
    assert step(world) == ([3, 2], [])
    assert step(world) == ([], [3, 2])  # no step with prompts decodes


def test_decode_step_evicts_for_a_page_of_each_request_even_if_none_needs_one() -> None:
    world = world_of(14)
    taken = []
    for requests in ([fresh(1, 56, 1)], [fresh(2, 20, 4), fresh(3, 20, 4)], []):
        for each in requests:
            world.submit(each)
        step(world)
        taken.append(world.cache.pools[DEVICE][FULL].num_taken)
    # the last step's tokens have room in the last pages of both requests; one more page is free
    assert taken == [7, 7 + 6, 6]


def test_retracted_request_goes_to_the_end_of_the_queue() -> None:
    world = world_of(9)
    for number, length in ((1, 24), (2, 16)):
        world.submit(fresh(number, length, 60 - length))
    assert step(world) == ([1, 2], [])
    world.submit(fresh(3, 60, 2))
    while not world.counters["scheduler/retracted_count"]:
        step(world)
    # of equal answers, the request with the longer prompt is retracted
    assert ids(world.scheduler.running) == [2]
    assert ids(world.scheduler.waiting) == [3, 1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_request_ends_a_step_late_if_steps_are_planned_before_results_are_known(
    *, asynchronous: bool
) -> None:
    world = world_of(40, asynchronous=asynchronous)
    world.submit(fresh(1, 20, 2))
    assert [step(world), step(world)] == [([1], []), ([], [1])]
    assert finished(world) == ([] if asynchronous else [1])
    assert step(world) == ([], [])
    assert finished(world) == ([1] if asynchronous else [])
    assert world.scheduler.is_idle


def test_cached_prefixes_of_a_step_are_locked_before_any_of_its_prompts_takes_pages() -> None:
    world = world_of(16)
    for number, length in ((1, 24), (2, 48)):  # request 3 hits the older one
        world.submit(fresh(number, length, 1))
        step(world)
    world.submit(fresh(4, 40, 1))  # it evicts
    world.submit(request_of(3, [*range(1000, 1024), 5], [7]))
    assert chunks(world.step()) == [(4, 0, 40), (3, 24, 25)]


@pytest.mark.parametrize("is_stepped", [False, True])
def test_every_32nd_scan_of_a_server_refreshes_the_prefixes_of_the_queue(
    *, is_stepped: bool
) -> None:
    world = world_of(40)
    if is_stepped:
        world.scheduler.decode.only = {1, 2, 3, 4}
    world.submit(fresh(1, 24, 1))
    step(world)
    (node,) = world.cache.tree.root("").children.values()
    for number in (2, 3):  # each spends the chunk of a step, so request 4 is not considered
        world.submit(fresh(number, 60))
    world.submit(request_of(4, [*range(1000, 1024), 5], [7]))
    before = node.tick
    world.scheduler.prefill._num_looks = 31
    assert step(world) == ([2], [])
    assert node.tick == before
    assert step(world) == ([3], [])
    assert (node.tick > before) is not is_stepped


def test_answer_frees_window_pages_from_where_its_prompt_stopped_freeing_them() -> None:
    world = world_of(60, "full_swa", rules=Rules(trims_windows=True))
    world.submit(fresh(1, 33, 1))
    step(world)
    # four pages are hit, from where the prompt frees windows; its last two pages are in the tree
    world.submit(request_of(2, [*range(1000, 1032), *range(20)], [7] * 160))
    step(world)
    (req,) = world.scheduler.running
    taken = {}
    while world.scheduler.running:
        step(world)
        taken[req.kv_len] = world.cache.pools[DEVICE][SWA].num_taken
    # 128 tokens after the window of the fourth page
    assert (taken[32 + 20 + 128], taken[32 + 20 + 128 + 1]) == (23, 10)
