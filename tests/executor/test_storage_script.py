"""One script, three drivers: simulated time, real time, and a rank that agrees with others."""

from types import SimpleNamespace

import numpy as np
import pytest

from hicache.cache.kinds import FULL, MAMBA, SWA, Window
from hicache.cache.pages import NO_PAGES
from hicache.cache.prefetch.prefetch import Phase, Prefetch
from hicache.cache.tiers.transfer import StorageWrite
from hicache.cache.tree.node import HOST, Lock, Node
from hicache.cache.tree.sequence import Sequence
from hicache.clock import NEVER, SimulatedClock
from hicache.config import StorageConfig
from hicache.executor.real.io import TorchIo
from hicache.executor.real.model_runner import CopyStreams, ModelRunner
from hicache.executor.simulated.executor import SimulatedIo
from hicache.executor.simulated.stores import StandIns
from hicache.storage.base import StorageError
from hicache.storage.guards.breaker import BreakerStorage
from tests.executor.cpu_pools import cpu_pools
from tests.executor.mixes import tiny
from tests.executor.streams import PlacedStream
from tests.executor.test_torch_io import drained

CONFIG = StorageConfig(kind="memory", batch_pages=2)
NUM_PAGES = 5
DIGESTS = [bytes([number]) * 16 for number in range(NUM_PAGES)]
PAGE_BYTES = (4, 2, 8)


class Plotted:
    """A storage that holds everything but `missing`, and to which things happen by the call.

    `fails`: the number of the read that raises. `ends`: that after which the prefetch is given up.
    `stop_pages`: what the first read finds the prefetch shortened to.
    """

    def __init__(self, prefetch=None, *, missing=(), fails=None, ends=None, stop_pages=None):
        self.calls = []
        self._prefetch = prefetch
        self._missing = set(missing)
        self._fails = fails
        self._ends = ends
        self._stop_pages = stop_pages

    def contains(self, keys):
        self.calls.append(("contains", tuple(keys)))
        return [key not in self._missing for key in keys]

    def read(self, keys, buffers):
        self.calls.append(("read", tuple(keys)))
        if len(self.calls) == self._fails:
            raise StorageError("no answer")
        if len(self.calls) == self._ends:
            self._prefetch.phase = Phase.stopped
        if self._stop_pages is not None:
            self._prefetch.stop_pages = self._stop_pages
        for key, buffer in zip(keys, buffers, strict=True):
            if len(buffer) == len(key):  # a stand-in
                buffer[:] = key
        return [key not in self._missing for key in keys]

    def write(self, keys, buffers):
        self.calls.append(("write", tuple(keys)))
        return [True] * len(keys)

    def stats(self):
        return None

    def close(self):
        return


def guarded(storage):
    return BreakerStorage(storage, clock=SimulatedClock(), max_failures=99)


def prefetch_of(num_pages):
    root = Node(None, b"", 0, 0)
    return Prefetch(
        request_id=0,
        sequence=Sequence(b""),
        anchor=root,
        anchor_lock=Lock(HOST, root, []),
        start_page=0,
        asked_pages=NUM_PAGES,
        num_pages=num_pages,
        names=DIGESTS,
        enqueued_ns=0,
        needs=((SWA, Window(3)), (MAMBA, Window(1))),
        staged=[
            np.arange(num_pages, dtype=np.int32),
            np.arange(min(3, num_pages), dtype=np.int32),
            np.zeros(1, np.int32),
        ],
    )


class Simulated:
    def __init__(self, storage):
        rates = {"to_device": 1e9, "to_host": 1e9, "host_memory": 4e9}
        self._io = SimulatedIo(CONFIG, [StandIns(guarded(storage))], [rates], seed=0)

    def read(self, prefetch):
        self._io.begin(self._io.read(0, prefetch, PAGE_BYTES), 0)
        self._drain()

    def write(self, work):
        self._io.begin(self._io.write(0, work, PAGE_BYTES), 0)
        self._drain()

    def _drain(self):
        done = []
        while (event := self._io.pass_by(0, SimulatedClock())) < NEVER:
            done += self._io.advance(event)
        assert done


class Real:
    def __init__(self, storage):
        pools = cpu_pools(tiny("F S M", 4), 4, (8, 8, 2), (8, 8, 2))
        self._io = TorchIo(CONFIG, [guarded(storage)])
        model = SimpleNamespace(words=("F", "S", "M"))
        at_once = PlacedStream(is_late=False)
        self._io.attach(ModelRunner(model, pools, CopyStreams(at_once, at_once)))

    def read(self, prefetch):
        self._io.read(0, prefetch)
        assert len(drained(self._io)) == 1

    def write(self, work):
        self._io.write(0, work)
        assert len(drained(self._io)) == 1


def page(number, tag=b"f"):
    return DIGESTS[number] + tag


def reads(*batches):
    return [("read", tuple(batch)) for batch in batches]


FIRST, SECOND, THIRD = [page(0), page(1)], [page(2), page(3)], [page(4)]
ONE, THREE, FOUR = (
    [*(page(number, b"s") for number in windows), page(windows[-1], b"m")]
    for windows in ([0], [0, 1, 2], [1, 2, 3])
)  # windows and states of shorter prefixes
SIDECARS = [*(page(number, b"s") for number in (2, 3, 4)), page(4, b"m")]


@pytest.mark.parametrize("driver", [Simulated, Real])
@pytest.mark.parametrize(
    ("num_pages", "plot", "completed", "found", "calls"),
    [
        (5, {}, 5, True, reads(FIRST, SECOND, THIRD, SIDECARS)),
        (5, {"missing": [page(3)]}, 3, False, reads(FIRST, SECOND)),
        (5, {"missing": [page(0)]}, 0, False, reads(FIRST)),
        (5, {"fails": 2}, 2, False, reads(FIRST, SECOND)),
        (5, {"ends": 1}, 2, False, reads(FIRST)),
        (5, {"ends": 3}, 5, False, reads(FIRST, SECOND, THIRD)),
        (5, {"missing": [page(3, b"s")]}, 5, False, reads(FIRST, SECOND, THIRD, SIDECARS)),
        (5, {"fails": 4}, 5, False, reads(FIRST, SECOND, THIRD, SIDECARS)),
        (2, {}, 2, True, reads(FIRST, [page(0, b"s"), page(1, b"s"), page(1, b"m")])),
    ],
    ids=[
        "whole", "a hole", "nothing", "a fault", "given up", "given up at the end",
        "no window", "a fault in the window", "cut",
    ],
)  # fmt: skip
def test_a_read_goes_the_same_way_whoever_drives_it(
    driver, num_pages, plot, completed, found, calls
):
    prefetch = prefetch_of(num_pages)
    storage = Plotted(prefetch, **plot)
    driver(storage).read(prefetch)
    assert storage.calls == calls
    assert prefetch.completed_pages == completed
    assert prefetch.restored_pages == found * num_pages
    assert prefetch.is_read


@pytest.mark.parametrize("driver", [Simulated, Real])
@pytest.mark.parametrize(
    ("restorable", "plot", "restored", "calls"),
    [
        ([1, 3, 5], {"missing": [page(3)]}, 3, reads(FIRST, SECOND, THREE)),
        ([1, 3, 5], {"stop_pages": 1}, 1, reads(FIRST, ONE)),
        ([3, 4], {}, 4, reads(FIRST, SECOND, THIRD, FOUR)),
        ([1, 5], {"missing": [page(3), page(0, b"m")]}, 0, reads(FIRST, SECOND, ONE)),
        ([4, 5], {"missing": [page(3)]}, 0, reads(FIRST, SECOND)),
    ],
    ids=["a hole", "stopped", "a length without a state", "no state", "nothing to keep"],
)
def test_a_part_is_kept_with_its_own_window_and_state(driver, restorable, plot, restored, calls):
    prefetch = prefetch_of(5)
    prefetch.keeps_part, prefetch.restorable = True, restorable
    storage = Plotted(prefetch, **plot)
    driver(storage).read(prefetch)
    assert storage.calls == calls
    assert prefetch.restored_pages == restored
    assert prefetch.is_read


@pytest.mark.parametrize("driver", [Simulated, Real])
def test_a_write_goes_the_same_way_whoever_drives_it(driver):
    keys = [page(0), page(1), page(2), page(1, b"s"), page(2, b"m")]
    parts = [(FULL, [0, 1, 2]), (SWA, [0]), (MAMBA, [0])]
    storage = Plotted(missing=[keys[0], keys[2], keys[4]])
    driver(storage).write(StorageWrite(keys=keys, parts=parts, num_bytes=0, host_locks=[]))
    assert storage.calls == [
        ("contains", tuple(keys)),
        ("write", (keys[0], keys[2])),
        ("write", (keys[4],)),
    ]


@pytest.mark.parametrize("driver", [Simulated, Real])
def test_nothing_is_read_for_a_prefetch_that_was_given_up_in_the_queue(driver):
    prefetch = prefetch_of(3)
    prefetch.phase = Phase.stopped
    storage = Plotted(prefetch)
    driver(storage).read(prefetch)
    assert storage.calls == []
    assert prefetch.is_read


def test_a_prefetch_without_window_and_state_asks_for_neither():
    prefetch = prefetch_of(2)
    prefetch.staged[SWA] = prefetch.staged[MAMBA] = NO_PAGES
    prefetch.needs = ()
    storage = Plotted(prefetch)
    Simulated(storage).read(prefetch)
    assert storage.calls == reads(FIRST)
