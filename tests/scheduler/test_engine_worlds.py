"""Whole runs of small engines: token counts, scarce memory, and equal runs.

Every world checks all invariants after every step, and at the end that all memory is free.
"""

from dataclasses import replace

import pytest

from hicache.cache.kinds import FULL, KEY_TAGS, MAMBA, SWA
from hicache.cache.tree.digests import chain_seed, page_digests
from hicache.cache.tree.events import Purpose
from hicache.cache.tree.node import DEVICE
from hicache.cache.tree.sequence import Sequence
from hicache.config import SERVICE_ORDERS, WRITE_POLICIES, Batching, PrefetchConfig, StorageConfig
from hicache.executor.completions import StepRun
from hicache.request import Request
from hicache.scheduler.batch import Batch
from tests.scheduler.world import (
    EAGER,
    KINDS,
    STEP_NS,
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
def test_prompt_tokens_are_counted_once_and_single_steps_change_nothing(
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


@pytest.mark.parametrize("order", SERVICE_ORDERS)
@pytest.mark.parametrize("batching", list(Batching), ids=lambda batching: batching.value)
def test_every_order_and_batching_answers_every_request(order: str, batching: Batching) -> None:
    world = served(plot_of("all", order=order, batching=batching), seed=3, count=15)
    assert sorted(ended(world.finished)) == list(range(15))


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
def test_last_running_request_is_retracted_where_its_window_finds_no_page(
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
        aging=0,
    )
    world = World(plot)
    world.serve([fresh(number, 120, 150) for number in range(count)])
    assert world.rejected == []
    assert sorted(ended(world.finished)) == list(range(count))
    retractions = sum(req.retractions for req, _ in world.finished)
    assert world.counters["scheduler/retracted_count"] == retractions > 0


class FreeOfCharge:
    """A window charge that admits every request."""

    def window_charge(self, **sizes: int) -> int:
        return 0


@pytest.mark.parametrize("num_pages", range(8, 12))
def test_last_running_request_waits_for_a_prompt_in_the_same_step(num_pages: int) -> None:
    plot = plot_of(
        "full_swa",
        window_len=24,
        device=(200, num_pages, 0),
        chunk_tokens=16,
        batching=Batching.mixed,
        policy=FreeOfCharge(),
    )
    world = World(plot)
    world.serve([fresh(0, 60, 60), fresh(1, 60, 60, 70_000_000)])
    assert world.rejected == []
    assert ended(world.finished) == [0, 1]


def test_prompt_that_runs_out_of_pages_again_and_again_is_rejected() -> None:
    world = bare_world(chunk_tokens=16)
    extend, begun = world.cache.extend, set()

    def extend_once(
        sequence: Sequence, num_tokens: int, purpose: Purpose = Purpose.prefill
    ) -> bool:
        if sequence.request_id == 1 and sequence in begun:
            return False
        begun.add(sequence)
        return extend(sequence, num_tokens, purpose)

    world.cache.extend = extend_once  # type: ignore[method-assign]
    world.serve([fresh(0, 60, 1), fresh(1, 120, 1)])
    assert ended(world.finished) == [0]
    ((req, reason),) = world.rejected
    assert reason == "needs more pages than the pools can give"
    assert world.counters["scheduler/prefill_oom_count"] == req.retractions == 4
    assert req.recomputed_len < 3 * (120 - 16)  # each attempt hits what those before it published


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
def test_random_requests_never_run_out_of_memory_with_the_host_term(kind: str, budget: str) -> None:
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
    loaded: list[int] = []
    forward = world.executor.forward

    def watch(batch: Batch, now_ns: int) -> StepRun:
        loaded.extend(load.counts[FULL] for load in batch.load_backs)
        return forward(batch, now_ns)

    world.executor.forward = watch  # type: ignore[method-assign]
    prompts = ([1] * 80, [2] * 120, [1] * 96)  # the second evicts the first
    world.serve([request_of(n, prompt, [1], n * SECOND) for n, prompt in enumerate(prompts)])
    assert loaded == [10]


def test_decode_step_that_evicts_under_write_back_retracts_no_request() -> None:
    scarce = replace(EAGER, chunk_tokens=64)
    world = bare_world(device=(20, 0, 0), write_policy="write_back", scheduler=scarce)
    others = [fresh(number, 24, 50, SECOND) for number in (2, 3)]
    world.serve([fresh(0, 80, 1), *others])  # the answers evict the first prompt
    assert world.counters["transfer/back_up_bytes"] > 0
    assert world.counters["scheduler/retracted_count"] == 0


def test_answer_takes_the_page_that_its_window_leaves() -> None:
    # of windows three pages are cached, and the second request needs five at any time
    world = bare_world("full_swa", device=(60, 8, 0))
    world.serve([fresh(0, 24, 1), fresh(1, 8, 60, SECOND)])
    assert len(world.finished) == 2
    assert world.counters["evict/device_swa_pages"] == 0


def test_window_pages_are_freed_while_an_answer_grows() -> None:
    world = bare_world("full_swa", may_jump=False)
    taken = []
    world.hooks.append(lambda now_ns: taken.append(world.cache.pools[DEVICE][SWA].num_taken))
    world.serve([fresh(0, 20, 120)])
    # its window of 20 tokens and what lies before it as published with the prompt; not 18 pages
    assert max(taken) <= 3 + 3 + 2


def test_request_that_arrives_during_a_run_is_considered_at_the_next_step_end() -> None:
    world = bare_world("all")
    came_ns = 20 * STEP_NS + STEP_NS // 2
    world.serve([fresh(0, 20, 60), fresh(1, 20, 2, came_ns)])
    (second,) = (req for req, _ in world.finished if req.request.id == 1)
    assert second.admitted_ns is not None
    assert came_ns < second.admitted_ns <= came_ns + STEP_NS
    assert second.submitted_ns == came_ns


# -- several ranks -------------------------------------------------------------------------------

STORED = StorageConfig(kind="memory", read_gbps=1.0, write_gbps=1.0, batch_pages=2, query_s=1e-4)
WAITING = PrefetchConfig(threshold=16, occupied_share=1.0, stop="wait_complete")


def ranked(num_ranks: int) -> tuple[World, Request, list[bytes]]:
    """A world of ranks, and a request of which storage has 14 pages, by their keys."""
    world = World(plot_of("full", storage=STORED, prefetch=WAITING, num_ranks=num_ranks))
    request = fresh(0, 120, 2)
    world.warm([request])
    digests = page_digests(chain_seed(""), request.prompt.to_bytes(), 8 * 4)[:14]
    return world, request, [digest + KEY_TAGS[FULL : FULL + 1] for digest in digests]


@pytest.mark.parametrize(("num_ranks", "num_lost"), [(2, 0), (2, 14), (3, 1), (3, 4)])
def test_ranks_use_the_pages_that_the_storages_of_all_hold(num_ranks: int, num_lost: int) -> None:
    world, request, keys = ranked(num_ranks)
    world.storages[-1].delete(keys[len(keys) - num_lost :])
    world.serve([request])
    assert world.counters["agreement/unequal_hits_count"] == (num_lost > 0)
    assert world.counters["agreement/given_up_pages"] == num_lost
    assert world.counters["agreement/illegal_lengths_count"] == 0
    ((req, _),) = world.finished
    assert req.storage_len == 8 * (14 - num_lost)
    assert req.computed_len == 120 - req.storage_len


def test_page_that_is_lost_between_query_and_read_is_used_by_no_rank() -> None:
    world, request, keys = ranked(2)

    def lose(now_ns: int) -> None:
        prefetch = world.prefetcher and world.prefetcher.active.get(0)
        if prefetch and prefetch.is_reading:
            world.storages[-1].delete([keys[9]])

    world.hooks.append(lose)
    world.serve([request])
    ((req, _),) = world.finished
    assert req.storage_len == 8 * 9
    assert world.counters["agreement/unequal_reads_count"] > 0
