"""The storage script runs the same operations in simulated and in real time."""

import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA
from hicache.cache.prefetch.prefetch import Phase
from hicache.clock import NEVER, SimulatedClock
from hicache.config import StorageConfig
from hicache.executor.simulated.executor import SimulatedIo
from hicache.executor.simulated.stores import StandIns
from hicache.storage.base import StorageError
from hicache.storage.engines.memory import MemoryStorage
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny
from tests.executor.test_io import drained, guarded, opened
from tests.executor.works import key, prefetch_of, write_of

CONFIG = StorageConfig(kind="memory", batch_pages=2)


class Scripted(MemoryStorage):
    """A storage that holds everything but `missing`, and changes its prefetch during reads.

    Read number `fails` raises. The prefetch is stopped during read number `ends`. The first read
    sets the prefetch's `stop_pages`.
    """

    def __init__(self, prefetch=None, *, missing=(), fails=None, ends=None, stop_pages=None):
        super().__init__(capacity_bytes=None)
        self.calls = []
        self._prefetch, self._missing = prefetch, set(missing)
        self._fails, self._ends, self._stop_pages = fails, ends, stop_pages

    def contains(self, keys):
        self.calls.append(("contains", *keys))
        return [key not in self._missing for key in keys]

    def read(self, keys, buffers):
        self.calls.append(("read", *keys))
        if len(self.calls) == self._fails:
            raise StorageError("no answer")
        if len(self.calls) == self._ends:
            self._prefetch.phase = Phase.stopped
        if self._stop_pages is not None:
            self._prefetch.stop_pages = self._stop_pages
        for name, buffer in zip(keys, buffers, strict=True):
            if len(buffer) == len(name):  # a stand-in
                buffer[:] = name
        return [key not in self._missing for key in keys]

    def write(self, keys, buffers):
        self.calls.append(("write", *keys))
        return [True] * len(keys)


class Simulated:
    def __init__(self, storage):
        rates = {"to_device": 1e9, "to_host": 1e9, "host_memory": 4e9}
        self._io = SimulatedIo(CONFIG, [StandIns(guarded(storage))], [rates], seed=0)

    def run(self, name, work):
        self._io.begin(getattr(self._io, name)(0, work, (4, 2, 8)), 0)
        done = []
        while (event := self._io.pass_by(0, SimulatedClock())) < NEVER:
            done += self._io.advance(event)
        assert done


class Real:
    def __init__(self, storage):
        pools = cpu_pools(tiny("F S M", 4), 4, (8, 8, 2), (8, 8, 2))
        self._io = opened(pools, storage, batch_pages=2)

    def run(self, name, work):
        getattr(self._io, name)(0, work)
        assert len(drained(self._io)) == 1


DRIVERS = pytest.mark.parametrize("driver", [Simulated, Real])


def reads(*batches):
    return [("read", *batch) for batch in batches]


def sidecars(*windows):
    """Keys of the window pages of a prefix and of the state at its end."""
    return [*(key(number, SWA) for number in windows), key(windows[-1], MAMBA)]


FIRST, SECOND, THIRD = [key(0), key(1)], [key(2), key(3)], [key(4)]
PAGES = reads(FIRST, SECOND, THIRD)
ALL = reads(FIRST, SECOND, THIRD, sidecars(2, 3, 4))
NEEDS = {"windows": 3, "has_state": True}
SCRIPTS = {  # pages to read, what happens, pages read, whether all is restored, calls of storage
    "whole": (5, {}, 5, True, ALL),
    "a missing page": (5, {"missing": [key(3)]}, 3, False, ALL[:2]),
    "no page": (5, {"missing": [key(0)]}, 0, False, ALL[:1]),
    "a failing read": (5, {"fails": 2}, 2, False, ALL[:2]),
    "stopped": (5, {"ends": 1}, 2, False, ALL[:1]),
    "stopped before the window": (5, {"ends": 3}, 5, False, PAGES),
    "a missing window page": (5, {"missing": [key(3, SWA)]}, 5, False, ALL),
    "a failing read of the window": (5, {"fails": 4}, 5, False, ALL),
    "short": (2, {}, 2, True, reads(FIRST, sidecars(0, 1))),
}


@DRIVERS
@pytest.mark.parametrize(
    ("num_pages", "happens", "completed", "found", "calls"), SCRIPTS.values(), ids=SCRIPTS
)
def test_a_read_makes_the_same_calls_in_simulated_and_real_time(
    driver, num_pages, happens, completed, found, calls
):
    prefetch = prefetch_of(num_pages, **NEEDS)
    storage = Scripted(prefetch, **happens)
    driver(storage).run("read", prefetch)
    assert storage.calls == calls
    assert prefetch.completed_pages == completed
    assert prefetch.restored_pages == found * num_pages
    assert prefetch.is_read


PARTS = {  # restorable lengths, what happens, restored pages, calls of storage
    "a missing page": ([1, 3, 5], {"missing": [key(3)]}, 3, [*ALL[:2], *reads(sidecars(0, 1, 2))]),
    "stopped": ([1, 3, 5], {"stop_pages": 1}, 1, reads(FIRST, sidecars(0))),
    "a length without a state": ([3, 4], {}, 4, [*PAGES, *reads(sidecars(1, 2, 3))]),
    "no state": (
        [1, 5], {"missing": [key(3), key(0, MAMBA)]}, 0, reads(FIRST, SECOND, sidecars(0))
    ),
    "nothing to keep": ([4, 5], {"missing": [key(3)]}, 0, ALL[:2]),
}  # fmt: skip


@DRIVERS
@pytest.mark.parametrize(("lengths", "happens", "restored", "calls"), PARTS.values(), ids=PARTS)
def test_a_part_of_a_read_is_used_with_the_window_and_state_at_its_end(
    driver, lengths, happens, restored, calls
):
    prefetch = prefetch_of(5, **NEEDS, keeps_part=True, restorable=lengths)
    storage = Scripted(prefetch, **happens)
    driver(storage).run("read", prefetch)
    assert storage.calls == calls
    assert prefetch.restored_pages == restored
    assert prefetch.is_read


@DRIVERS
def test_a_write_stores_in_batches_the_pages_that_storage_lacks(driver):
    work = write_of((FULL, 0), (FULL, 1), (FULL, 2), (SWA, 0), (MAMBA, 0))
    keys = work.keys
    storage = Scripted(missing=[keys[0], keys[2], keys[4]])
    driver(storage).run("write", work)
    assert storage.calls == [
        ("contains", *keys), ("write", keys[0], keys[2]), ("write", keys[4])
    ]  # fmt: skip


@DRIVERS
def test_a_read_that_is_stopped_in_the_queue_reads_nothing(driver):
    prefetch = prefetch_of(3, **NEEDS, phase=Phase.stopped)
    storage = Scripted(prefetch)
    driver(storage).run("read", prefetch)
    assert storage.calls == []
    assert prefetch.is_read


def test_a_read_that_needs_no_window_or_state_reads_only_pages():
    storage = Scripted()
    Simulated(storage).run("read", prefetch_of(2))
    assert storage.calls == reads(FIRST)
