"""What an engine is built with where the config says nothing."""

import pytest

from hicache.config import CacheConfig, ExperimentConfig, StorageConfig
from hicache.engine.build import queue_bytes
from hicache.models import GIB


@pytest.mark.parametrize(
    ("unlimited", "queue_gib", "wanted"),
    [(False, None, [1, 32]), (False, 3.0, [3, 3]), (True, 3.0, [3, 3])],
)
def test_half_of_the_host_may_wait_to_be_written(
    queue_gib: float | None, wanted: list[int], *, unlimited: bool
) -> None:
    queues = [
        queue_bytes(
            ExperimentConfig(
                cache=CacheConfig(unlimited=unlimited, host_gib=host_gib),
                storage=StorageConfig(write_queue_gib=queue_gib),
            )
        )
        for host_gib in (2, 64)
    ]
    assert queues == [gib * GIB for gib in wanted]


def test_unlimited_pools_have_a_write_queue_that_does_not_depend_on_the_host() -> None:
    queues = {
        queue_bytes(ExperimentConfig(cache=CacheConfig(unlimited=True, host_gib=host_gib)))
        for host_gib in (1, 8, 64)
    }
    assert len(queues) == 1
    assert queues.pop() > 1e6 * GIB
