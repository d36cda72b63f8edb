"""Whole runs of small engines: token counts, scarce memory, and jumps over decode steps.

Every world checks all invariants after every step, and at the end that all memory is free.
"""

from dataclasses import replace

import pytest

from hicache.cache.kinds import FULL, MAMBA
from hicache.config import WRITE_POLICIES
from tests.scheduler.world import (
    EAGER,
    KINDS,
    Plot,
    World,
    bare_world,
    ended,
    fresh,
    plot_of,
    random_requests,
    request_of,
)

SECOND = 1_000_000_000


def served(plot: Plot, seed: int, count: int = 25, *, checks: bool = True) -> World:
    world = World(plot, checks=checks)
    world.serve(random_requests(seed, count))
    return world


@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_tokens_are_counted_once_and_jumps_over_decode_steps_change_nothing(
    kind: str, policy: str
) -> None:
    world, stepping = (
        served(plot_of(kind, write_policy=policy, may_jump=jump), seed=0, checks=jump)
        for jump in (True, False)
    )
    assert world.outcome() == stepping.outcome()
    assert len(world.executor.batches) < len(stepping.executor.batches)
    assert len(world.finished) == 25
    for req, _ in world.finished:
        parts = req.device_len + req.host_len + req.storage_len + req.computed_len
        assert parts == req.request.prompt_len
    tokens = sum(req.request.prompt_len for req, _ in world.finished)
    names = ("device_hit", "host_hit", "storage_hit", "computed")
    assert sum(world.counters[f"cache/{name}_tokens"] for name in names) == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_outgrow_the_pool_are_retracted_and_finish_later(kind: str) -> None:
    world = World(plot_of(kind, device=(24, 40, 24), scheduler=EAGER))
    world.serve([fresh(number, 20, 60) for number in range(6)])
    reqs, counters = [req for req, _ in world.finished], world.counters
    assert len(reqs) == 6
    assert all(req.decoded == 60 and req.computed_len == 20 for req in reqs)
    assert counters["cache/computed_tokens"] == 120
    assert counters["scheduler/retracted_count"] == sum(req.retractions for req in reqs) > 0
    assert all(bool(req.recomputed_len) == bool(req.retractions) for req in reqs)
    assert counters["cache/recomputed_tokens"] == sum(req.recomputed_len for req in reqs)


@pytest.mark.parametrize("has_storage", [False, True])
@pytest.mark.parametrize(("count", "order"), [(1, "fcfs"), (4, "shortest_remaining")])
def test_last_running_request_is_retracted_if_its_window_finds_no_page(
    count: int, order: str, *, has_storage: bool
) -> None:
    # the window pool holds a prompt's window and most of the answer's
    plot = plot_of(
        "full_swa",
        window_len=64,
        device=(200, 16, 0),
        checkpoints="end",
        has_storage=has_storage,
        order=order,
    )
    world = World(plot)
    world.serve([fresh(number, 120, 150) for number in range(count)])
    assert world.rejected == []
    assert sorted(ended(world.finished)) == list(range(count))
    retractions = sum(req.retractions for req, _ in world.finished)
    assert world.counters["scheduler/retracted_count"] == retractions > 0


@pytest.mark.parametrize(("budget", "runs_out"), [("no_host_term", True), ("reports", False)])
def test_prefill_runs_out_of_memory_unless_the_charge_counts_windows_on_the_host(
    budget: str, *, runs_out: bool
) -> None:
    # the window pool holds a prompt and its window, but not a load-back beside them
    pools = {"device": (200, 17, 0), "host": (400, 100, 0)}
    world = bare_world("full_swa", window_len=64, chunk_tokens=4096, swa_budget=budget, **pools)
    first = range(120)
    evicting = fresh(1, 110, 9, 2 * SECOND)
    longer = request_of(2, [*first, *range(7000, 7080)], [3], 4 * SECOND)
    world.serve([request_of(0, first, [1] * 9), evicting, longer])
    assert (world.counters["scheduler/prefill_oom_count"] > 0) == runs_out


@pytest.mark.parametrize("budget", ["reports", "sglang_0_5_23"])
@pytest.mark.parametrize("kind", ["full_swa", "all"])
def test_prefill_always_finds_memory_if_host_windows_are_charged(kind: str, budget: str) -> None:
    world = served(plot_of(kind, device=(40, 14, 12), swa_budget=budget), seed=0)
    assert world.counters["scheduler/prefill_oom_count"] == 0


def test_full_pages_behind_a_state_on_the_host_are_not_charged_again() -> None:
    # full is on the device, its state is not: the path is locked, and only the state is loaded
    world = bare_world("full_mamba")
    prompt = list(range(200))
    world.serve([request_of(0, prompt, [7] * 9)])
    while world.cache.device.evict(MAMBA, 1):
        pass
    world.serve([request_of(1, [*prompt, 8], [9] * 30)])
    assert [req.cached_len for req, _ in world.finished] == [0, 200]


def test_step_carries_the_load_backs_of_its_requests() -> None:
    world = bare_world(device=(20, 0, 0))
    world.serve([fresh(0, 80, 1), fresh(1, 120, 1)])  # the second evicts the first
    world.submit(fresh(0, 96, 1))
    assert [load.counts[FULL] for load in world.step().load_backs] == [10]


def test_decode_step_that_evicts_under_write_back_retracts_no_request() -> None:
    scarce = replace(EAGER, chunk_tokens=64)
    world = bare_world(device=(20, 0, 0), write_policy="write_back", scheduler=scarce)
    others = [fresh(number, 24, 50, SECOND) for number in (2, 3)]
    world.serve([fresh(0, 80, 1), *others])  # the answers evict the first prompt
    assert world.counters["transfer/back_up_bytes"] > 0
    assert world.counters["scheduler/retracted_count"] == 0


def test_answer_reuses_the_pages_that_leave_its_window_and_evicts_none() -> None:
    # of windows three pages are cached, and the second request needs five at any time
    world = bare_world("full_swa", device=(60, 8, 0))
    world.serve([fresh(0, 24, 1), fresh(1, 8, 60, SECOND)])
    assert len(world.finished) == 2
    assert world.counters["evict/device_swa_pages"] == 0
