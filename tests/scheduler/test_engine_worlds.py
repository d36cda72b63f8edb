"""Engines in tiny worlds: exact accounts, equal runs, and nothing left behind.

Every world checks all laws after every step, and at the end that the pools are as they were.
"""

from dataclasses import replace

import pytest

from hicache.cache.kinds import FULL, MAMBA
from hicache.cache.tree.events import Purpose
from hicache.cache.tree.sequence import Sequence
from hicache.config import SERVICE_ORDERS, WRITE_POLICIES, Batching, SchedulerConfig
from hicache.executor.completions import StepRun
from hicache.scheduler.batch import Batch
from tests.scheduler.world import (
    KINDS,
    SCHEDULER,
    Plot,
    World,
    plot_of,
    random_requests,
    request_of,
)

KIND_NAMES = sorted(KINDS)
POLICIES = WRITE_POLICIES


def served(plot: Plot, seed: int, count: int = 25) -> World:
    world = World(plot)
    world.serve(random_requests(seed, count))
    return world


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_every_prompt_token_of_an_admitted_request_is_counted_once(kind: str, policy: str) -> None:
    world = served(plot_of(kind, write_policy=policy), seed=1)
    assert len(world.finished) == 25
    for req, _ in world.finished:
        parts = req.device_len + req.host_len + req.storage_len + req.computed_len
        assert parts == req.request.prompt_len
    tokens = sum(req.request.prompt_len for req, _ in world.finished)
    names = ("device_hit", "host_hit", "storage_hit", "computed")
    assert sum(world.counters[f"cache/{name}_tokens"] for name in names) == tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_taking_decode_steps_one_by_one_changes_nothing(kind: str, policy: str) -> None:
    plots = [plot_of(kind, write_policy=policy, may_jump=jump) for jump in (True, False)]
    jumping, stepping = (served(plot, seed=0) for plot in plots)
    assert jumping.outcome() == stepping.outcome()
    assert len(jumping.executor.batches) < len(stepping.executor.batches)


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_two_equal_runs_are_equal(kind: str) -> None:
    assert served(plot_of(kind), seed=2).outcome() == served(plot_of(kind), seed=2).outcome()


@pytest.mark.parametrize("order", SERVICE_ORDERS)
@pytest.mark.parametrize("batching", list(Batching), ids=lambda batching: batching.value)
def test_every_order_and_batching_answers_every_request(order: str, batching: Batching) -> None:
    config = SchedulerConfig(chunk_tokens=64, max_running=8, order=order, batching=batching)
    world = served(plot_of("all", scheduler=config), seed=3)
    assert sorted(req.request.id for req, _ in world.finished) == list(range(25))


def test_two_requests_that_do_not_fit_side_by_side_run_one_after_the_other() -> None:
    world = World(plot_of("full", device=(40, 0, 0), has_storage=False))
    prompts = [[first] * 200 for first in (1, 2)]
    world.serve([request_of(number, prompt, [9] * 30) for number, prompt in enumerate(prompts)])
    assert [req.request.id for req, _ in world.finished] == [0, 1]
    assert world.rejected == []


def test_a_request_that_no_pool_could_ever_hold_is_rejected_alone() -> None:
    world = World(plot_of("full", device=(10, 0, 0)))
    world.serve([request_of(0, range(100), [1]), request_of(1, range(20), [1])])
    assert [req.request.id for req, _ in world.rejected] == [0]
    assert [req.request.id for req, _ in world.finished] == [1]


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_prompt_longer_than_a_chunk_is_computed_in_chunks(kind: str) -> None:
    world = World(plot_of(kind))
    world.serve([request_of(0, range(1000, 1150), [1, 2, 3])])
    assert world.executor.batches[:3] == [(1, 0)] * 3  # 64 + 64 + 22
    ((req, _),) = world.finished
    assert req.computed_len == 150


def crowded(kind: str, **changes: object) -> Plot:
    config = SchedulerConfig(
        chunk_tokens=256, max_running=16, new_token_ratio=0.0, new_token_ratio_floor=0.0
    )
    return plot_of(kind, device=(24, 40, 24), scheduler=config, **changes)


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_answers_that_outgrow_the_pool_are_retracted_and_finish_later(kind: str) -> None:
    world = World(crowded(kind))
    requests = [
        request_of(number, range(number * 100, number * 100 + 20), [number] * 60)
        for number in range(6)
    ]
    world.serve(requests)
    assert world.counters["scheduler/retracted_count"] > 0
    assert len(world.finished) == 6
    retracted = [req for req, _ in world.finished if req.retractions]
    assert retracted
    for req in retracted:
        assert req.computed_len == 20
        assert req.recomputed_len > 0


def narrow_window(count: int, **changes: object) -> World:
    """A window pool that holds a prompt's window and most of the answer's, and no more."""
    pools = (200, 16, 0)
    world = World(plot_of("full_swa", window_len=64, device=pools, checkpoints="end", **changes))
    prompts = [range(number * 1000, number * 1000 + 120) for number in range(count)]
    world.serve([request_of(number, prompt, [7] * 150) for number, prompt in enumerate(prompts)])
    return world


@pytest.mark.parametrize("has_storage", [False, True])
def test_the_last_running_request_begins_again_where_its_window_finds_no_page(
    *, has_storage: bool
) -> None:
    world = narrow_window(1, has_storage=has_storage)
    assert world.rejected == []
    ((req, _),) = world.finished
    assert world.counters["scheduler/retracted_count"] == req.retractions > 0
    assert req.decoded == 150


@pytest.mark.parametrize("has_storage", [False, True])
def test_whoever_waits_for_the_last_running_request_is_looked_at_when_it_gives_way(
    *, has_storage: bool
) -> None:
    config = SchedulerConfig(chunk_tokens=64, max_running=8, order="shortest_remaining", aging=0)
    world = narrow_window(4, has_storage=has_storage, scheduler=config)
    assert world.rejected == []
    assert len(world.finished) == 4
    assert any(req.retractions for req, _ in world.finished)


class FreeOfCharge:
    """A budget that lets in whoever comes."""

    def window_charge(self, **sizes: int) -> int:
        return 0


EIGHT = SchedulerConfig(chunk_tokens=16, max_running=8)


@pytest.mark.parametrize("num_pages", range(8, 12))
def test_the_last_running_request_waits_for_a_prompt_in_the_same_step(num_pages: int) -> None:
    plot = plot_of(
        "full_swa",
        window_len=24,
        device=(200, num_pages, 0),
        scheduler=replace(EIGHT, batching=Batching.mixed),
        policy=FreeOfCharge(),
    )
    world = World(plot)
    first = request_of(0, range(60), [7] * 60)
    later = request_of(1, range(1000, 1060), [7] * 60, arrival_ns=70_000_000)
    world.serve([first, later])
    assert world.rejected == []
    assert [req.request.id for req, _ in world.finished] == [0, 1]


def test_a_prompt_that_fails_half_way_again_and_again_is_rejected() -> None:
    world = World(plot_of("full", has_storage=False, scheduler=EIGHT))
    extend, begun = world.cache.extend, set()

    def extend_once(
        sequence: Sequence, num_tokens: int, purpose: Purpose = Purpose.prefill
    ) -> bool:
        if sequence.request_id == 1 and sequence in begun:
            return False
        begun.add(sequence)
        return extend(sequence, num_tokens, purpose)

    world.cache.extend = extend_once  # type: ignore[method-assign]
    world.serve([request_of(0, range(60), [7]), request_of(1, range(1000, 1120), [7])])
    assert [req.request.id for req, _ in world.finished] == [0]
    ((req, reason),) = world.rejected
    assert reason == "needs more pages than the pools can give"
    assert world.counters["scheduler/prefill_oom_count"] == req.retractions == 4
    assert req.recomputed_len < 3 * (120 - 16)  # each attempt hits what those before it published


def host_window_world(budget: str) -> World:
    """A window pool with room for a prompt and its window, but not for that and a load-back."""
    config = SchedulerConfig(chunk_tokens=4096, max_running=8, swa_budget=budget)
    pools = {"device": (200, 17, 0), "host": (400, 100, 0)}
    world = World(plot_of("full_swa", window_len=64, scheduler=config, has_storage=False, **pools))
    first = list(range(1000, 1120))
    long = list(range(5000, 5110))
    world.serve(
        [
            request_of(0, first, [1] * 9),
            request_of(1, long, [2] * 9, arrival_ns=2_000_000_000),  # pushes out the first window
            request_of(2, [*first, *range(7000, 7080)], [3], arrival_ns=4_000_000_000),
        ]
    )
    return world


def test_without_the_host_term_a_window_load_back_runs_the_prefill_out_of_memory() -> None:
    world = host_window_world("no_host_term")
    assert world.counters["scheduler/prefill_oom_count"] > 0


def test_with_the_host_term_no_prefill_runs_out_of_memory() -> None:
    world = host_window_world("reports")
    assert world.counters["scheduler/prefill_oom_count"] == 0


@pytest.mark.parametrize("budget", ["reports", "sglang_0_5_23"])
@pytest.mark.parametrize("kind", ["full_swa", "all"])
def test_random_work_never_runs_out_of_memory_with_the_host_term(kind: str, budget: str) -> None:
    config = SchedulerConfig(chunk_tokens=64, max_running=8, swa_budget=budget)
    for seed in range(2):
        world = served(plot_of(kind, device=(40, 14, 12), scheduler=config), seed)
        assert world.counters["scheduler/prefill_oom_count"] == 0


def test_full_pages_behind_a_state_on_the_host_are_not_charged_again() -> None:
    # full is on the device, its state is not: the path is locked, and only the state is loaded
    world = World(plot_of("full_mamba", has_storage=False))
    prompt = list(range(200))
    world.serve([request_of(0, prompt, [7] * 9)])
    while world.cache.device.evict(MAMBA, 1):
        pass
    world.serve([request_of(1, [*prompt, 8], [9] * 30)])
    assert [req.request.id for req, _ in world.finished] == [0, 1]
    assert world.finished[1][0].cached_len == 200


def test_a_step_carries_what_is_loaded_back_for_its_requests() -> None:
    world = World(plot_of("full", device=(20, 0, 0), has_storage=False))
    loaded: list[int] = []
    forward = world.executor.forward

    def watch(batch: Batch, now_ns: int) -> StepRun:
        loaded.extend(load.counts[FULL] for load in batch.load_backs)
        return forward(batch, now_ns)

    world.executor.forward = watch  # type: ignore[method-assign]
    prompts = ([1] * 80, [2] * 120, [1] * 96)  # the second takes the first one's place
    world.serve([request_of(n, prompt, [1], n * 1_000_000_000) for n, prompt in enumerate(prompts)])
    assert loaded == [10]


def test_a_decode_step_that_evicts_under_write_back_sends_nobody_back() -> None:
    no_promise = replace(SCHEDULER, new_token_ratio=0, new_token_ratio_floor=0)
    world = World(
        plot_of(
            "full",
            device=(20, 0, 0),
            write_policy="write_back",
            has_storage=False,
            scheduler=no_promise,
        )
    )
    first = request_of(0, [1] * 80, [1])  # what it leaves is in the way of the others' answers
    others = [request_of(n, [n] * 24, [n] * 50, 1_000_000_000) for n in (2, 3)]
    world.serve([first, *others])
    assert world.counters["transfer/back_up_bytes"] > 0
    assert world.counters["scheduler/retracted_count"] == 0


def test_an_answer_takes_the_page_that_its_window_leaves() -> None:
    # of windows three pages are cached, and the second request needs five at any time
    world = World(plot_of("full_swa", device=(60, 8, 0), has_storage=False))
    requests = [request_of(0, range(24), [1]), request_of(1, range(100, 108), [1] * 60, 10**9)]
    world.serve(requests)
    assert len(world.finished) == 2
    assert world.counters["evict/device_swa_pages"] == 0
