"""Steps in SGLang's order (`scheduler.batching=prompts_together`)."""

from dataclasses import replace
from typing import Any

import pytest

from hicache.cache.kinds import SWA
from hicache.cache.tree.node import DEVICE
from hicache.config import Batching, QuirksConfig
from hicache.scheduler.batch import Batch
from tests.scheduler.world import SCHEDULER, World, plot_of, request_of

SGLANG = replace(
    SCHEDULER,
    batching=Batching.prompts_together,
    chunk_tokens=64,
    clip_new_tokens=0,
    new_token_ratio=0.0,
    new_token_ratio_floor=0.0,
)


def world_of(pages: int, **settings: Any) -> World:
    config = replace(SGLANG, **settings)
    plot = plot_of(
        "full", scheduler=config, device=(pages, 0, 0), host=(0, 0, 0), has_storage=False
    )
    return World(plot)


def submit(world: World, number: int, length: int, num_answers: int = 3) -> None:
    tokens = range(1000 * number, 1000 * number + length)
    world.scheduler.submit(request_of(number, tokens, [7] * num_answers), 0)


def step(world: World) -> Batch:
    batch = world.scheduler.plan_once(0)[0] or Batch()
    if batch.extends or batch.decodes:
        world.scheduler.commit(batch, 1, 0)
    return batch


def ids(batch: Batch) -> tuple[list[int], list[int]]:
    prompts = [extend.req.request.id for extend in batch.extends]
    return prompts, [req.request.id for req in batch.decodes]


def finished(world: World) -> list[int]:
    return [req.request.id for req in world.scheduler.ended.take().finished]


def test_a_prompt_takes_whole_pages_of_the_chunk() -> None:
    world = world_of(40)
    submit(world, 1, 20)  # 24 tokens with the rest of its last page
    submit(world, 2, 100)
    batch = step(world)
    assert [(each.start, each.end) for each in batch.extends] == [(0, 20), (0, 40)]


@pytest.mark.parametrize(("num_answers", "admitted"), [(40, [1]), (1, [1, 2])])
def test_the_answer_of_a_prompt_is_charged_in_its_step(
    num_answers: int, admitted: list[int]
) -> None:
    world = world_of(10, clip_new_tokens=100)
    submit(world, 1, 20, num_answers)
    submit(world, 2, 8, 1)
    assert ids(step(world)) == (admitted, [])


def test_tokens_that_are_hit_are_not_charged() -> None:
    world = world_of(40)
    submit(world, 1, 48, num_answers=1)
    step(world)
    world.scheduler.submit(request_of(2, [*range(1000, 1048), 5], [7]), 0)
    submit(world, 3, 40)
    assert ids(step(world)) == ([2, 3], [])


def test_an_idle_engine_expects_long_answers_again() -> None:
    world = world_of(40, new_token_ratio=0.7, new_token_ratio_decay_steps=10)
    ratio = world.scheduler.prefill.admission.new_token_ratio
    submit(world, 1, 20)
    step(world)
    step(world)
    assert ratio.after() < 0.7
    while not world.scheduler.is_idle:
        step(world)
    step(world)
    assert ratio.after() == 0.7


def test_a_step_with_prompts_decodes_nothing() -> None:
    world = world_of(40)
    submit(world, 1, 20)
    step(world)
    submit(world, 2, 20)
    assert ids(step(world)) == ([2], [])
    assert ids(step(world)) == ([], [1, 2])


def test_a_queue_that_lacks_memory_is_not_considered_until_a_running_request_leaves() -> None:
    world = world_of(10)
    submit(world, 1, 40, num_answers=4)
    step(world)
    submit(world, 2, 40)  # too long
    assert ids(step(world)) == ([], [1])
    submit(world, 3, 8)
    world.scheduler.waiting.reverse()  # now the short one is first, and would fit
    assert ids(step(world)) == ([], [1])
    assert ids(step(world)) == ([], [1])
    assert finished(world) == [1]
    assert ids(step(world)) == ([3, 2], [])


def test_a_retracted_request_goes_behind_all_that_wait() -> None:
    world = world_of(9)
    for number, length in ((1, 24), (2, 16)):
        submit(world, number, length, num_answers=60 - length)
    assert ids(step(world)) == ([1, 2], [])
    submit(world, 3, 60, num_answers=2)
    while not world.scheduler.cache.counters["scheduler/retracted_count"]:
        step(world)
    # equal answers: the one with the longer prompt went
    assert [req.request.id for req in world.scheduler.running] == [2]
    assert [req.request.id for req in world.scheduler.waiting] == [3, 1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_ends_a_step_late_if_steps_are_planned_before_results_are_known(
    asynchronous: bool,  # noqa: FBT001
) -> None:
    world = world_of(40, asynchronous=asynchronous)
    submit(world, 1, 20, num_answers=2)
    assert ids(step(world)) == ([1], [])
    assert ids(step(world)) == ([], [1])
    assert finished(world) == ([] if asynchronous else [1])
    assert ids(step(world)) == ([], [])
    assert finished(world) == ([1] if asynchronous else [])
    assert world.scheduler.is_idle


def test_all_prefixes_of_a_step_are_locked_before_its_prompts_take_pages() -> None:
    world = world_of(16)
    submit(world, 1, 24, num_answers=1)  # the oldest, which request 3 hits
    step(world)
    submit(world, 2, 48, num_answers=1)
    step(world)
    submit(world, 4, 40, num_answers=1)  # it evicts
    world.scheduler.submit(request_of(3, [*range(1000, 1024), 5], [7]), 0)
    batch = step(world)
    assert [(each.req.request.id, each.start) for each in batch.extends] == [(4, 0), (3, 24)]


@pytest.mark.parametrize("is_stepped", [False, True])
def test_every_32nd_pass_of_a_server_over_the_queue_refreshes_its_prefixes(
    *, is_stepped: bool
) -> None:
    world = world_of(40)
    if is_stepped:
        world.scheduler.decode.only = {1, 2, 3, 4}
    submit(world, 1, 24, num_answers=1)
    step(world)
    (node,) = world.cache.tree.root("").children.values()
    for number in (2, 3):  # each spends the chunk of a step, so request 4 is not considered
        submit(world, number, 60, num_answers=9)
    world.scheduler.submit(request_of(4, [*range(1000, 1024), 5], [7]), 0)
    before = node.tick
    world.scheduler.prefill._num_looks = 31
    assert ids(step(world)) == ([2], [])
    assert node.tick == before
    assert ids(step(world)) == ([3], [])
    assert (node.tick > before) is not is_stepped


def test_an_answer_frees_windows_from_where_its_prompt_last_looked_for_some() -> None:
    plot = plot_of(
        "full_swa",
        scheduler=SGLANG,
        device=(60, 60, 0),
        host=(0, 0, 0),
        has_storage=False,
        quirks=QuirksConfig(trims_windows=True),
    )
    world = World(plot)
    submit(world, 1, 33, num_answers=1)
    step(world)
    # four pages are hit, where the prompt looks; its last two pages are in the tree
    world.scheduler.submit(request_of(2, [*range(1000, 1032), *range(20)], [7] * 160), 0)
    step(world)
    (req,) = world.scheduler.running
    taken = {}
    while world.scheduler.running:
        step(world)
        taken[req.kv_len] = world.cache.pools[DEVICE][SWA].num_taken
    # 128 tokens after the window of the fourth page
    assert (taken[32 + 20 + 128], taken[32 + 20 + 128 + 1]) == (23, 10)
