"""Copies by the copy engine: runs of bytes are passed to a CUDA driver, here a fake one.

Its functions have the signatures and structures of cuda.h, versions 12.8 and 13.
"""

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hicache.kernels import copy_table
from hicache.workbench.bench import copy_engine

SIDE = 7  # a stream that is not the default one
STREAM_ORDER, ANY_ORDER = 1, 3
ADDRESS, SIZE, RESULT, STREAM = (
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_location", Location),
        ("dst_location", Location),
        ("flags", ctypes.c_uint),
    ]


BATCH = (
    ctypes.POINTER(ADDRESS),
    ctypes.POINTER(ADDRESS),
    ctypes.POINTER(SIZE),
    SIZE,
    ctypes.POINTER(Attributes),
    ctypes.POINTER(SIZE),
    SIZE,
)


class HostDriver:
    """A fake driver with the functions `batches`; it copies at once what a driver would queue."""

    def __init__(self, *batches: str) -> None:
        self.calls: list[str] = []
        self.orders: list[int] = []  # of batches: in which sources may be read
        self._kept = {}
        for name in batches:
            failed = [] if name.endswith("_v2") else [ctypes.POINTER(SIZE)]
            prototype = ctypes.CFUNCTYPE(RESULT, *BATCH, *failed, STREAM)
            self._kept[name] = prototype(self._batch(name))

    def __getattr__(self, name: str):
        try:
            function = self.__dict__["_kept"][name]
        except KeyError:
            raise AttributeError(name) from None
        # a symbol of a library knows nothing of its arguments
        return ctypes.CFUNCTYPE(RESULT)(ctypes.cast(function, ctypes.c_void_p).value)

    def _batch(self, name):
        def call(dsts, srcs, sizes, count, attributes, starts, num_attributes, *rest):
            self.calls.append(name)
            its = attributes[0]
            locations = (its.src_location, its.dst_location)
            hints = [number for each in locations for number in (each.type, each.id)]
            self.orders.append(its.src_access_order)
            assert (hints, its.flags) == ([0] * 4, 0)
            assert (starts[0], num_attributes, rest[-1]) == (0, 1, SIDE)
            for place in range(count):
                ctypes.memmove(dsts[place], srcs[place], sizes[place])
            return 0

        return call


@pytest.fixture
def use(monkeypatch):
    """A function that sends copies to a driver, on a stream that is not the default one."""
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=SIDE)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def used(driver):
        monkeypatch.setattr(copy_engine, "_driver", lambda: driver)
        return driver

    return used


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def runs_of(src, dst, src_ids, dst_ids):
    return copy_engine.runs_of(copy_table(src, dst), i32(src_ids), i32(dst_ids))


def copy_on_gpu(runs):
    copy_engine.copy_runs(runs, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("functions", "wanted"),
    [
        (["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"], "cuMemcpyBatchAsync_v2"),
        (["cuMemcpyBatchAsync"], "cuMemcpyBatchAsync"),
    ],
    ids=["cuda 13", "cuda 12.8"],
)
def test_runs_are_passed_to_the_newest_function_of_the_driver(functions, wanted, use):
    driver = use(HostDriver(*functions))
    src = [torch.randint(0, 256, (6, 64), dtype=torch.uint8) for _ in range(2)]
    dst, expected = ([torch.zeros_like(each) for each in src] for _ in range(2))
    for buffer, source in zip(expected, src, strict=True):
        buffer[[0, 1, 5]] = source[[2, 3, 0]]
    copy_on_gpu(runs_of(src, dst, [2, 3, 0], [0, 1, 5]))
    assert (driver.calls, driver.orders) == ([wanted], [STREAM_ORDER])
    assert all(map(torch.equal, dst, expected))


@pytest.mark.parametrize(
    ("driver", "error", "sentence"),
    [
        (
            SimpleNamespace(cuMemcpyBatchAsync_v2=ctypes.CFUNCTYPE(RESULT)(lambda *_: 700)),
            RuntimeError,
            "refused a copy with error 700",
        ),
        (HostDriver(), NotImplementedError, r"CUDA 12\.8 wanted"),
    ],
    ids=["an error", "no batches"],
)
def test_a_failing_or_too_old_driver_is_an_error(driver, error, sentence, use):
    use(driver)
    pool = torch.zeros(2, 64)
    with pytest.raises(error, match=sentence):
        copy_on_gpu(runs_of([pool], [pool.clone()], [0], [0]))


def test_a_batch_has_at_most_as_many_runs_as_the_driver_takes(use):
    driver = use(HostDriver("cuMemcpyBatchAsync_v2"))
    assert copy_engine.BATCH_RUNS < 50_000
    num_items = copy_engine.BATCH_RUNS + 3
    src = torch.arange(4 * num_items).view(num_items, 4)
    dst, ids = torch.zeros_like(src), range(num_items)
    copy_on_gpu(runs_of([src], [dst], ids, ids[::-1]))
    assert driver.calls == ["cuMemcpyBatchAsync_v2"] * 2
    assert torch.equal(dst, src.flip(0))


RUNS = {  # how a buffer is cut out of pages, and how many runs five pages are then
    "contiguous": (lambda pool: [pool], 5),
    "strided items": (lambda pool: [pool[:, :1024]], 5),
    "strided rows": (lambda pool: [pool.view(6, 16, 4, 64)[:, :, 1:3]], 5 * 16),
    "two buffers": (lambda pool: [pool[:, :1024], pool[:, 2048:]], 10),
}


@pytest.mark.parametrize(("cut", "wanted"), RUNS.values(), ids=RUNS)
def test_each_row_of_an_item_is_copied_as_one_run(cut, wanted):
    generator = torch.Generator().manual_seed(0)
    pools = torch.randint(0, 256, (2, 6, 4096), generator=generator, dtype=torch.uint8)
    src, dst = map(cut, pools)
    expected = pools[1].clone()
    for buffer, source in zip(cut(expected), src, strict=True):
        buffer[[0, 1, 2, 3, 4]] = source[[1, 2, 3, 5, 0]]
    runs = runs_of(src, dst, [1, 2, 3, -1, 5, 0], [0, 1, 2, 5, 3, 4])
    assert len(runs.num_bytes) == wanted
    assert int(runs.num_bytes.sum()) == 5 * sum(buffer[0].nbytes for buffer in src)
    for run in zip(runs.dst.tolist(), runs.src.tolist(), runs.num_bytes.tolist(), strict=True):
        ctypes.memmove(*run)
    assert torch.equal(pools[1], expected)
    assert [len(column) for column in runs_of(src, dst, [], [])[:3]] == [0, 0, 0]


def test_only_copies_from_host_to_device_may_read_their_source_in_any_order(use):
    driver, here = use(HostDriver("cuMemcpyBatchAsync_v2")), torch.zeros(4, 64)
    table, elsewhere = copy_table([here], [here.clone()]), (here.to("meta"),)
    for its in (table, replace(table, dst=elsewhere), replace(table, src=elsewhere)):
        copy_on_gpu(copy_engine.runs_of(its, i32([0]), i32([0])))
    assert driver.orders == [STREAM_ORDER, ANY_ORDER, STREAM_ORDER]


class Operations(TorchDispatchMode):
    """Counts operations of PyTorch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_listing_thousands_of_runs_takes_no_more_torch_operations_than_a_few():
    counts = []
    for num_buffers, num_ids in ((128, 300), (2, 3)):
        slabs = torch.zeros(2, num_buffers, num_ids, 2, dtype=torch.int64)
        table = copy_table(slabs[0].unbind(0), slabs[1].unbind(0))
        ids = torch.arange(num_ids, dtype=torch.int32)
        with Operations() as operations:
            copy_engine.runs_of(table, ids, ids.flip(0))
        counts.append(operations.count)
    assert counts[0] == counts[1]
