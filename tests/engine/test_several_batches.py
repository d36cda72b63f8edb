"""An engine with two batches in flight."""

from typing import Any

import pytest

from hicache.config import Batching
from hicache.scheduler.prompts_together import TogetherPrefill
from tests.scheduler.world import KINDS, World, bare_world, ended, plot_of, random_requests

SMALL = {"device": (30, 30, 14), "chunk_tokens": 24, "num_batches": 2}


def served(kind: str, seed: int, **plot: Any) -> World:
    """A world that has served random requests, some aborted, with invariant checks every step."""
    requests = random_requests(seed, gap_ns=15_000_000, longest=120)
    patience_ns = {each.id: 400_000_000 for each in requests if each.id % 5 == 0}
    world = World(plot_of(kind, **SMALL, **plot))
    world.serve(requests, patience_ns=patience_ns)
    all_ended = [*world.finished, *world.rejected, *world.aborted]
    assert sorted(ended(all_ended)) == [each.id for each in requests]
    return world


@pytest.mark.parametrize(
    ("batching", "has_storage"),
    [("prefill_first", True), ("prompts_together", True), ("prompts_mixed", False)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_invariants_hold_with_two_batches_in_flight(
    kind: str, batching: str, *, has_storage: bool
) -> None:
    world = served(kind, 0, has_storage=has_storage, batching=Batching(batching))
    assert len(world.finished) > 25
    assert world.counters["cache/device_hit_tokens"]


def test_request_is_in_one_batch_at_a_time_and_both_batches_are_used() -> None:
    world = World(plot_of("all", **SMALL))
    overlaps = []

    def look(_: int) -> None:
        flights = world.engine._flights
        assert len({flight.batch.number for flight in flights}) == len(flights)
        inside = [
            {*flight.batch.decodes, *(each.req for each in flight.batch.extends)}
            for flight in flights
        ]
        if len(inside) == 2:
            assert not inside[0] & inside[1]
            overlaps.append(all(flight.batch.decodes for flight in flights))

    world.hooks.append(look)
    world.serve(random_requests(1, gap_ns=15_000_000, longest=120))
    assert any(overlaps)


def test_requests_are_retracted_with_two_batches_too() -> None:
    worlds = (served("full", seed, has_storage=False) for seed in range(6))
    assert any(world.counters["scheduler/retracted_count"] for world in worlds)


def test_two_batches_decode_twice_as_many_requests_in_the_same_time() -> None:
    ends = []
    for num_batches in (1, 2):
        world = bare_world(num_batches=num_batches, may_jump=False)
        world.serve(random_requests(2, count=8, gap_ns=0, longest=60))
        ends.append(world.clock.now())
    assert ends[1] < ends[0] * 1.1


def test_vllms_order_of_steps_allows_only_one_batch_in_flight() -> None:
    with pytest.raises(ValueError, match="running_first takes one batch in flight, got 2"):
        bare_world(num_batches=2, batching=Batching.running_first)


def test_each_batch_of_sglangs_order_takes_its_part_of_the_running_requests() -> None:
    # SGLang 0.5.23, `managers/scheduler.py`, line 1241: 4 requests of 2 batches are 2 each
    world = bare_world(num_batches=2, batching=Batching.prompts_together, max_running=4)
    most = [0, 0]

    def look(_: int) -> None:
        for number, half in enumerate(world.scheduler.decodes):
            most[number] = max(most[number], len(half.running))

    world.hooks.append(look)
    world.serve(random_requests(2, count=12, gap_ns=0, longest=60))
    assert most == [2, 2]


def test_queue_that_is_shut_for_one_batch_stays_open_for_the_other() -> None:
    world = bare_world(num_batches=2, batching=Batching.prompts_together)
    prefill = world.scheduler.prefill
    assert isinstance(prefill, TogetherPrefill)
    prefill.is_shut = True
    prefill.number = 1
    assert not prefill.is_shut
    prefill.number = 0
    assert prefill.is_shut
