"""Storage calls in threads: pages read back, reads that are misses, and skipped idle time."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hicache.cache.kinds import FULL
from hicache.cache.tiers.transfer import Move
from hicache.clock import NEVER, SimulatedClock
from hicache.config import StorageConfig
from hicache.executor.real.io import TorchIo
from hicache.executor.real.model_runner import CopyStreams, ModelRunner
from hicache.storage.base import StorageError
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.breaker import BreakerStorage
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny
from tests.executor.streams import PlacedStream
from tests.executor.works import key, prefetch_of, write_of

KEYS = [key(0), key(1)]
LIMIT_S = 30.0


def failing(error):
    def call(*arguments):
        raise error

    storage = MemoryStorage(capacity_bytes=None)
    storage.contains = storage.read = storage.write = call
    return storage


class Changing(MemoryStorage):
    """A storage that changes one bit of the second page on each read."""

    def read(self, keys, buffers):
        flags = super().read(keys, buffers)
        for each, buffer in zip(keys, buffers, strict=True):
            if each == KEYS[1]:
                buffer[5] ^= 64
        return flags


@pytest.fixture
def pools():
    return cpu_pools(tiny("F", 4), 4, (4, 0, 0), (4, 0, 0), tp=2)


def guarded(storage):
    return BreakerStorage(storage, clock=SimulatedClock(), max_failures=99)


def opened(pools, *storages, batch_pages=128):
    config = StorageConfig(kind="memory", batch_pages=batch_pages)
    io = TorchIo(config, list(map(guarded, storages)))
    at_once = PlacedStream(is_late=False)
    model = SimpleNamespace(words=pools.model.layer_words)
    io.attach(ModelRunner(model, pools, CopyStreams(at_once, at_once)))
    return io


def drained(io):
    deadline = time.monotonic() + LIMIT_S
    done = []
    while not io.is_idle:
        assert time.monotonic() < deadline, "nothing came back"
        io.wait_until(io.pass_by(NEVER, io))
        done += io.advance(io.now())
    return done


def written(pools, io):
    """Write random pages 0 and 1 of the host to storage."""
    generator = torch.Generator().manual_seed(0)
    for rank in pools.ranks:
        rank.kv[FULL].copy_(torch.rand(rank.kv[FULL].shape, generator=generator))
    pages, work = np.array([0, 1], np.int32), write_of((FULL, 0), (FULL, 1))
    pools.save([Move(FULL, pages, pages)])
    io.write(0, work)
    assert drained(io) == [(0, work)]


def num_read(io):
    """Read both pages into host pages 2 and 3; return how many are found."""
    wanted = prefetch_of(2, first=2)
    io.read(0, wanted)
    assert drained(io) == [(0, wanted)]
    return wanted.completed_pages


def test_pages_written_to_storage_are_read_back_on_every_rank(pools):
    io = opened(pools, *(MemoryStorage(capacity_bytes=None) for _ in range(2)))
    written(pools, io)
    assert num_read(io) == 2
    for rank in pools.ranks:
        assert torch.equal(rank.host[FULL][2:], rank.host[FULL][:2])
        assert rank.host[FULL][:2].any(dim=1).all()


def test_a_page_that_storage_changed_is_a_miss(pools):
    io = opened(pools, MemoryStorage(capacity_bytes=None), Changing(capacity_bytes=None))
    written(pools, io)
    assert num_read(io) == 1
    assert io.counters["storage/changed_pages"] == 1


@pytest.mark.parametrize(("kind", "on_second", "found"), [(Changing, 2, 2), (MemoryStorage, 1, 1)])
def test_pages_of_other_processes_are_read_up_to_the_first_that_a_rank_lacks(
    pools, kind, on_second, found
):
    storages = [kind(capacity_bytes=None) for _ in range(2)]
    page = memoryview(bytes(pools.ranks[0].host[FULL].shape[1]))
    for storage, count in zip(storages, (2, on_second), strict=True):
        storage.write(KEYS[:count], [page] * count)
    assert num_read(opened(pools, *storages)) == found


def test_a_read_from_a_failing_storage_is_a_miss(pools):
    io = opened(pools, MemoryStorage(capacity_bytes=None), failing(StorageError("no answer")))
    wanted = prefetch_of(2, first=2)
    io.read(0, wanted)
    io.write(0, write_of((FULL, 0), (FULL, 1)))
    assert len(drained(io)) == 2
    assert wanted.completed_pages == 0
    assert io.counters["transfer/storage_write_bytes"] == 0


def test_an_error_in_a_storage_thread_is_raised_in_the_thread_that_polls(pools):
    io = opened(pools, failing(ZeroDivisionError()), MemoryStorage(capacity_bytes=None))
    io.write(0, write_of((FULL, 0), (FULL, 1)))
    with pytest.raises(ZeroDivisionError):
        drained(io)


def test_idle_time_of_a_real_run_is_skipped(pools):
    io = opened(pools)
    started = time.monotonic()
    io.wait_until(io.now() + 3_600 * 10**9)
    assert io.now() >= 3_600 * 10**9
    assert time.monotonic() - started < 60
