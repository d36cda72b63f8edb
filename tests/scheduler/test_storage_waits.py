"""How long a request waits for storage, to the nanosecond, and that it waits no longer."""

from dataclasses import replace

import pytest

from hicache.clock import SECOND_NS
from hicache.config import PrefetchConfig, SchedulerConfig, StorageConfig
from hicache.engine.warm import warm_storage
from hicache.executor.simulated.stores import StandIns
from hicache.request import Request
from hicache.scheduler.request_state import RequestState
from tests.fuzz.policies import UntilPagesCome
from tests.scheduler.world import (
    PAGE_BYTES,
    STEP_NS,
    TOKEN_NS,
    Plot,
    World,
    plot_of,
    request_of,
)

QUERY_NS, OPERATION_NS = 500_000, 100_000
PROMPT = range(1000, 1104)  # 13 pages of 8, of which 12 can be read: 3 batches of 4
BATCH_NS = OPERATION_NS + 4 * PAGE_BYTES[0]  # at 1 GB/s
READ_NS = QUERY_NS + 3 * BATCH_NS


def plot(*, ranks: int = 1, stop: str = "wait_complete", timeout_s: float = 1.0) -> Plot:
    return plot_of(
        "full",
        num_ranks=ranks,
        prefetch=PrefetchConfig(
            stop=stop, threshold=16, timeout_base_s=timeout_s, timeout_per_ki_token_s=0
        ),
        storage=StorageConfig(
            kind="memory",
            read_gbps=1.0,
            batch_pages=4,
            query_s=QUERY_NS / SECOND_NS,
            operation_s=OPERATION_NS / SECOND_NS,
        ),
    )


def served(plot: Plot, *requests: Request) -> list[RequestState]:
    """The reqs of requests that storage knows all about, in order of their numbers."""
    world = World(plot)
    for storage in world.storages:
        warm_storage(StandIns(storage), requests, world.cache.tree)
    world.serve(requests)
    assert world.rejected == []
    return sorted((req for req, _ in world.finished), key=lambda req: req.request.id)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_request_alone_waits_as_long_as_storage_takes(ranks: int) -> None:
    # ranks read their parts of the pages side by side, over one link
    (req,) = served(plot(ranks=ranks), request_of(0, PROMPT, [1]))
    assert req.storage_len == 96
    assert req.storage_wait_ns == READ_NS
    assert req.admitted_ns == READ_NS


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_waits_until_the_first_boundary_after_its_deadline(ranks: int) -> None:
    (req,) = served(plot(ranks=ranks, stop="timeout", timeout_s=0.007), request_of(0, PROMPT, [1]))
    assert req.storage_wait_ns == 7_000_001
    assert req.storage_len == 32  # one batch has come, and the second has not


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_does_not_wait_waits_for_nothing(ranks: int) -> None:
    (req,) = served(plot(ranks=ranks, stop="best_effort"), request_of(0, PROMPT, [1]))
    assert (req.storage_wait_ns, req.admitted_ns, req.storage_len) == (0, 0, 0)


def test_a_request_that_comes_during_a_step_waits_from_the_end_of_that_step() -> None:
    # the first has 10 tokens, too few to be read: its only step ends when those are computed
    first, second = request_of(0, range(10), [1]), request_of(1, PROMPT, [1], 1000)
    step_ns = STEP_NS + 10 * TOKEN_NS
    _, req = served(plot(), first, second)
    assert req.submitted_ns == 1000
    assert req.admitted_ns == step_ns + READ_NS
    assert req.storage_wait_ns == READ_NS


def test_a_request_that_waits_for_pages_does_not_wait_for_storage() -> None:
    # the first takes all there is room for, and is computed for longer than the second is read
    limits = SchedulerConfig(chunk_tokens=64, max_running=1)
    first, second = request_of(0, range(10), [1] * 9), request_of(1, PROMPT, [1])
    _, req = served(replace(plot(), scheduler=limits), first, second)
    last_ns = STEP_NS + 10 * TOKEN_NS + 8 * STEP_NS
    assert req.admitted_ns == last_ns
    # looked at when the first prompt is computed, and again at the first boundary after the read
    assert req.storage_wait_ns == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_part_of_a_time_to_first_token_is_negative_though_requests_are_retracted(
    ranks: int,
) -> None:
    limits = SchedulerConfig(
        chunk_tokens=256, max_running=16, new_token_ratio=0.0, new_token_ratio_floor=0.0
    )
    roomy = plot(ranks=ranks)
    tight = replace(
        roomy,
        cache=roomy.cache | {"policy": UntilPagesCome()},
        scheduler=limits,
        device=(24, 0, 0),
        # a page at a time, and slowly: there is news half way
        storage=replace(roomy.storage, batch_pages=1, query_s=0.0001, read_gbps=0.25),
    )
    reqs = served(
        tight,
        *(
            request_of(number, range(number * 100, number * 100 + 20), [number] * 60)
            for number in range(6)
        ),
    )
    assert sum(req.retractions for req in reqs) > 0
    assert sum(req.storage_wait_ns for req in reqs) > 0
    for req in reqs:
        assert req.admitted_ns is not None
        assert 0 <= req.storage_wait_ns <= req.admitted_ns - req.submitted_ns
