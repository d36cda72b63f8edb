"""Storage in threads: what is polled, what a failure costs, and whom the clock waits for."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hicache.cache.kinds import FULL
from hicache.cache.pages import NO_PAGES
from hicache.cache.prefetch.prefetch import Prefetch
from hicache.cache.tiers.transfer import Move, StorageWrite
from hicache.cache.tree.node import HOST, Lock, Node
from hicache.cache.tree.sequence import Sequence
from hicache.clock import NEVER, SimulatedClock
from hicache.config import StorageConfig
from hicache.executor.real.io import TorchIo
from hicache.executor.real.model_runner import CopyStreams, ModelRunner
from hicache.executor.real.pools import TorchPools
from hicache.storage.base import StorageError
from hicache.storage.engines.memory import MemoryStorage
from hicache.storage.guards.breaker import BreakerStorage
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny
from tests.executor.streams import PlacedStream

KEYS = [bytes(16) + b"f", b"\x01" * 16 + b"f"]
LIMIT_S = 30.0


class Broken(MemoryStorage):
    """Answers nothing."""

    def contains(self, keys):
        raise StorageError("no answer")

    def read(self, keys, buffers):
        raise StorageError("no answer")

    def write(self, keys, buffers):
        raise StorageError("no answer")


class Changing(MemoryStorage):
    """Gives back the second page with a bit turned over."""

    def read(self, keys, buffers):
        flags = super().read(keys, buffers)
        for key, buffer in zip(keys, buffers, strict=True):
            if key == KEYS[1]:
                buffer[5] ^= 64
        return flags


class Wrong(MemoryStorage):
    """Has a bug."""

    def contains(self, keys):
        raise ZeroDivisionError


@pytest.fixture
def pools() -> TorchPools:
    return cpu_pools(tiny("F", 4), 4, (4, 0, 0), (4, 0, 0), tp=2)


def opened(pools: TorchPools, *storages) -> TorchIo:
    guarded = [BreakerStorage(each, clock=SimulatedClock()) for each in storages]
    io = TorchIo(StorageConfig(kind="memory"), guarded)
    at_once = PlacedStream(is_late=False)
    streams = CopyStreams(at_once, at_once)
    io.attach(ModelRunner(SimpleNamespace(words=("F",)), pools, streams))
    return io


def drained(io: TorchIo) -> list:
    deadline = time.monotonic() + LIMIT_S
    done = []
    while not io.is_idle:
        assert time.monotonic() < deadline, "nothing came back"
        io.wait_until(io.pass_by(NEVER, io))
        done += io.advance(io.now())
    return done


def back_up(pools: TorchPools) -> None:
    """Random pages 0 and 1 of the device, copied to those of the host."""
    generator = torch.Generator().manual_seed(0)
    for rank in pools.ranks:
        rank.kv[FULL].copy_(torch.rand(rank.kv[FULL].shape, generator=generator))
    pages = np.array([0, 1], np.int32)
    pools.save([Move(FULL, pages, pages)])


def write(*pages: int) -> StorageWrite:
    return StorageWrite(
        keys=KEYS[: len(pages)],
        parts=[(FULL, list(pages))],
        num_bytes=0,
        host_locks=[],
    )


def prefetch(*pages: int) -> Prefetch:
    root = Node(None, b"", 0, 0)
    return Prefetch(
        request_id=0,
        sequence=Sequence(b""),
        anchor=root,
        anchor_lock=Lock(HOST, root, []),
        start_page=0,
        asked_pages=len(pages),
        num_pages=len(pages),
        names=[key[:-1] for key in KEYS],
        enqueued_ns=0,
        needs=(),
        staged=[list(pages), NO_PAGES, NO_PAGES],
    )


def test_what_is_written_comes_back_on_every_rank(pools):
    io = opened(pools, *(MemoryStorage(capacity_bytes=None) for _ in range(2)))
    back_up(pools)
    work = write(0, 1)
    io.write(0, work)
    assert drained(io) == [(0, work)]
    wanted = prefetch(2, 3)
    io.read(0, wanted)
    assert drained(io) == [(0, wanted)]
    assert wanted.completed_pages == 2
    for rank in pools.ranks:
        assert torch.equal(rank.host[FULL][2:], rank.host[FULL][:2])
        assert rank.host[FULL][:2].any(dim=1).all()


def test_a_page_that_storage_changed_and_calls_a_hit_is_a_miss(pools):
    io = opened(pools, MemoryStorage(capacity_bytes=None), Changing(capacity_bytes=None))
    back_up(pools)
    io.write(0, write(0, 1))
    drained(io)
    wanted = prefetch(2, 3)
    io.read(0, wanted)
    drained(io)
    assert wanted.completed_pages == 1
    assert io.counters["storage/changed_pages"] == 1


def test_a_page_of_another_process_is_taken_as_it_is(pools):
    storage = [Changing(capacity_bytes=None) for _ in range(2)]
    page = bytes(pools.ranks[0].host[FULL].shape[1])
    for each in storage:
        each.write(KEYS, [memoryview(page)] * 2)
    io = opened(pools, *storage)
    wanted = prefetch(2, 3)
    io.read(0, wanted)
    drained(io)
    assert wanted.completed_pages == 2


def test_the_rank_that_has_least_decides(pools):
    rich, poor = MemoryStorage(capacity_bytes=None), MemoryStorage(capacity_bytes=None)
    page = bytes(pools.ranks[0].host[FULL].shape[1])
    rich.write(KEYS, [memoryview(page)] * 2)
    poor.write(KEYS[:1], [memoryview(page)])
    io = opened(pools, rich, poor)
    wanted = prefetch(2, 3)
    io.read(0, wanted)
    drained(io)
    assert wanted.completed_pages == 1


def test_a_storage_that_fails_is_a_miss(pools):
    io = opened(pools, MemoryStorage(capacity_bytes=None), Broken(capacity_bytes=None))
    wanted = prefetch(2, 3)
    io.read(0, wanted)
    io.write(0, write(0, 1))
    assert len(drained(io)) == 2
    assert wanted.completed_pages == 0
    assert io.counters["transfer/storage_write_bytes"] == 0


def test_a_bug_in_a_thread_is_raised_where_it_is_polled(pools):
    io = opened(pools, Wrong(capacity_bytes=None), Wrong(capacity_bytes=None))
    io.write(0, write(0, 1))
    with pytest.raises(ZeroDivisionError):
        drained(io)


def test_idle_time_is_skipped(pools):
    io = opened(pools)
    started = time.monotonic()
    io.wait_until(io.now() + 3_600 * 10**9)
    assert io.now() >= 3_600 * 10**9
    assert time.monotonic() - started < 60
