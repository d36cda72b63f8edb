"""How far one look at the queue reaches past requests that wait for storage."""

import pytest

from hicache.config import SchedulerConfig
from hicache.scheduler.admission import StepBudget
from tests.scheduler.world import World, plot_of, request_of


def begun(blocked: set[int], **knobs: int) -> tuple[list[int], World]:
    """Of four requests, some of which wait for storage, those that the first step takes up."""
    config = SchedulerConfig(**{"chunk_tokens": 64, "max_running": 8, **knobs})  # type: ignore[arg-type]
    world = World(plot_of("full", scheduler=config))
    prefetcher = world.prefetcher
    assert prefetcher is not None
    prefetcher.check = lambda request_id, now_ns: request_id not in blocked  # type: ignore[method-assign]
    prefetcher.is_blocking = lambda request_id, now_ns: request_id in blocked  # type: ignore[method-assign]
    for number in range(4):
        world.scheduler.submit(request_of(number, [number] * 10, [1]), 0)
    batch = world.scheduler.plan(0)
    return [each.req.request.id for each in batch.extends] if batch else [], world


@pytest.mark.parametrize(
    ("blocked", "scan_limit", "wanted"),
    [
        (set(), 1, [0, 1, 2, 3]),
        ({0}, 2, [1, 2, 3]),
        ({0}, 1, []),
        ({1}, 1, [0]),
        ({0, 2}, 3, [1, 3]),
        ({0, 2}, 2, [1]),
    ],
)
def test_a_scan_passes_over_fewer_waiting_requests_than_its_limit(
    blocked: set[int], scan_limit: int, wanted: list[int]
) -> None:
    assert begun(blocked, scan_limit=scan_limit)[0] == wanted


def test_whoever_waits_for_storage_is_no_backlog_and_whoever_lacks_room_is() -> None:
    _, waiting = begun({0, 1, 2, 3})
    assert not waiting.scheduler.prefill.has_backlog
    _, full = begun({0}, max_running=1)
    assert full.scheduler.prefill.has_backlog


def test_whoever_a_scan_does_not_reach_waits_for_storage_no_longer_than_it_must() -> None:
    _, world = begun(set(), chunk_tokens=10)  # the first takes all that one step computes
    reqs = list(world.scheduler.waiting)
    reqs[1].blocked_since_ns = reqs[2].blocked_since_ns = 5
    assert world.prefetcher is not None
    world.prefetcher.is_blocking = lambda request_id, now_ns: request_id == 3  # type: ignore[method-assign]
    world.scheduler.plan(100)
    assert [(req.storage_wait_ns, req.blocked_since_ns) for req in reqs[1:]] == [(95, None), (0, 5)]


def test_a_step_begins_with_no_window_promised() -> None:
    assert StepBudget(chunk_tokens=1, reserved_tokens=0).reserved_windows == {}
