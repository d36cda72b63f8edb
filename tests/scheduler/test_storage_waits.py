"""How long a request waits for storage, to the nanosecond."""

from dataclasses import replace

import pytest

from hicache import experiment
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.clock import SECOND_NS
from hicache.config import PrefetchConfig, StorageConfig
from hicache.request import Request
from hicache.runs.schema import config_of
from hicache.scheduler.request_state import RequestState
from tests.scheduler.world import PAGE_BYTES, STEP_NS, TOKEN_NS, Plot, World, fresh, plot_of

QUERY_NS, OPERATION_NS = 500_000, 100_000
BATCH_NS = OPERATION_NS + 4 * PAGE_BYTES[0]  # at 1 GB/s
READ_NS = QUERY_NS + 3 * BATCH_NS  # of 13 pages of 8 tokens, 12 can be read: 3 batches of 4


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
    """The requests in order of their numbers, after a run that begins with warm storage."""
    world = World(plot)
    world.warm(requests)
    world.serve(requests)
    assert world.rejected == []
    return sorted((req for req, _ in world.finished), key=lambda req: req.request.id)


@pytest.mark.parametrize(
    ("ranks", "stop", "wait_ns", "storage_len"),
    [
        # ranks read their parts of the pages side by side, over one link
        *((ranks, "wait_complete", READ_NS, 96) for ranks in (1, 2, 4)),
        # one batch has come at the deadline, and the second has not
        *((ranks, "timeout", 7_000_001, 32) for ranks in (1, 2)),
        *((ranks, "best_effort", 0, 0) for ranks in (1, 2)),
    ],
)
def test_stop_policy_decides_how_long_a_lone_request_waits_for_its_read(
    ranks: int, stop: str, wait_ns: int, storage_len: int
) -> None:
    (req,) = served(plot(ranks=ranks, stop=stop, timeout_s=0.007), fresh(0, 104, 1))
    assert (req.storage_wait_ns, req.admitted_ns) == (wait_ns, wait_ns)
    assert req.storage_len == storage_len


def test_wait_of_a_request_that_arrives_during_a_step_begins_when_the_step_ends() -> None:
    # the first has 10 tokens, too few to be read: its only step ends when those are computed
    _, req = served(plot(), fresh(0, 10, 1), fresh(1, 104, 1, 1000))
    assert req.submitted_ns == 1000
    assert req.admitted_ns == STEP_NS + 10 * TOKEN_NS + READ_NS
    assert req.storage_wait_ns == READ_NS


def test_read_that_ends_while_a_request_waits_for_memory_is_no_wait_for_storage() -> None:
    # the first runs alone, and for longer than the second is read
    alone = replace(plot().scheduler, max_running=1)
    _, req = served(replace(plot(), scheduler=alone), fresh(0, 10, 9), fresh(1, 104, 1))
    assert req.admitted_ns == STEP_NS + 10 * TOKEN_NS + 8 * STEP_NS
    assert req.storage_wait_ns == 0


class Asked:
    """Waits for all pages, at most 5 ms, and counts how often it is asked."""

    count = 0

    def may_stop(self, prefetch: Prefetch, now_ns: int) -> bool:
        Asked.count += 1
        return prefetch.is_complete

    def deadline_ns(self, prefetch: Prefetch) -> int:
        Asked.count += 1
        return prefetch.enqueued_ns + 5_000_000


def test_requests_that_no_scan_has_reached_cause_no_calls_of_the_stop_policy() -> None:
    def num_asked(num_requests: int) -> int:
        Asked.count = 0
        # each reads from storage, all at once, and one runs at a time
        experiment.run(
            config_of(
                "model=llama3_8b", "workload=chat", "workload.time_scale=1e-6",
                f"workload.num_sessions={num_requests}", f"workload.limit={num_requests}",
                "storage=memory", "workload.start=warm_storage", "prefetch.threshold=64",
                "workload.arrivals=open", "scheduler.max_running=1", "compat.rules.scan_limit=1",
                f"cache.policy={__name__}:Asked",
            )
        )  # fmt: skip
        return Asked.count

    few = num_asked(20)
    assert few > 20
    assert num_asked(60) < 4 * few
