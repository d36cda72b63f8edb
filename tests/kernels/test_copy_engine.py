"""How runs are handed to the CUDA driver, shown by one that moves host memory.

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
    """Does at once what a driver with these functions would queue."""

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
def stream(monkeypatch):
    """The current stream."""
    current = SimpleNamespace(cuda_stream=SIDE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return current


@pytest.mark.parametrize(
    ("functions", "wanted"),
    [
        (["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"], "cuMemcpyBatchAsync_v2"),
        (["cuMemcpyBatchAsync"], "cuMemcpyBatchAsync"),
    ],
    ids=["cuda 13", "cuda 12.8"],
)
def test_runs_are_handed_over_as_the_driver_wants_them(functions, wanted, stream, monkeypatch):
    driver = HostDriver(*functions)
    monkeypatch.setattr(copy_engine, "_driver", lambda: driver)
    src = [torch.randint(0, 256, (6, 64), dtype=torch.uint8) for _ in range(2)]
    dst = [torch.zeros(6, 64, dtype=torch.uint8) for _ in range(2)]
    expected = [torch.zeros(6, 64, dtype=torch.uint8) for _ in range(2)]
    for buffer, source in zip(expected, src, strict=True):
        buffer[[0, 1, 5]] = source[[2, 3, 0]]
    ids = [torch.tensor(values, dtype=torch.int32) for values in ([2, 3, 0], [0, 1, 5])]
    device = torch.device("cuda", 0)
    copy_engine.copy_runs(copy_engine.contiguous_runs(copy_table(src, dst), *ids), device)
    assert (driver.calls, driver.orders) == ([wanted], [STREAM_ORDER])
    assert all(torch.equal(a, b) for a, b in zip(dst, expected, strict=True))


def test_a_copy_that_the_driver_refuses_is_an_error(stream, monkeypatch):
    refuse = ctypes.CFUNCTYPE(RESULT)(lambda *arguments: 700)
    driver = SimpleNamespace(cuMemcpyBatchAsync_v2=refuse)
    monkeypatch.setattr(copy_engine, "_driver", lambda: driver)
    pool = torch.zeros(2, 64, dtype=torch.uint8)
    ids = torch.zeros(1, dtype=torch.int32)
    runs = copy_engine.contiguous_runs(copy_table([pool], [pool.clone()]), ids, ids)
    with pytest.raises(RuntimeError, match="refused a copy with error 700"):
        copy_engine.copy_runs(runs, torch.device("cuda", 0))


def test_a_driver_without_batches_is_refused(stream, monkeypatch):
    monkeypatch.setattr(copy_engine, "_driver", HostDriver)
    table = copy_table([torch.zeros(2, 64)], [torch.zeros(2, 64)])
    ids = torch.zeros(1, dtype=torch.int32)
    runs = copy_engine.contiguous_runs(table, ids, ids)
    with pytest.raises(NotImplementedError, match=r"CUDA 12\.8 wanted"):
        copy_engine.copy_runs(runs, torch.device("cuda", 0))


def test_a_batch_stays_below_what_the_driver_takes(stream, monkeypatch):
    driver = HostDriver("cuMemcpyBatchAsync_v2")
    monkeypatch.setattr(copy_engine, "_driver", lambda: driver)
    assert copy_engine.BATCH_RUNS < 50_000
    num_items = copy_engine.BATCH_RUNS + 3
    src = torch.arange(4 * num_items).view(num_items, 4)
    dst = torch.zeros_like(src)
    ids = torch.arange(num_items, dtype=torch.int32)
    runs = copy_engine.contiguous_runs(copy_table([src], [dst]), ids, ids.flip(0))
    copy_engine.copy_runs(runs, torch.device("cuda", 0))
    assert driver.calls == ["cuMemcpyBatchAsync_v2"] * 2
    assert torch.equal(dst, src.flip(0))


def moved(runs):
    for from_address, to_address, size in zip(*(c.tolist() for c in runs[:3]), strict=True):
        ctypes.memmove(to_address, from_address, size)


@pytest.mark.parametrize(
    ("cut", "wanted"),
    [
        (lambda pool: pool, 3),
        (lambda pool: pool[:, :1024], 5),  # strided items do not touch
        (lambda pool: pool.view(6, 16, 4, 64)[:, :, 1:3], 5 * 16),  # rows of an item neither
    ],
    ids=["contiguous", "strided items", "strided rows"],
)
def test_runs_merge_neighbours_where_both_sides_are_contiguous(cut, wanted):
    generator = torch.Generator().manual_seed(0)
    pools = torch.randint(0, 256, (2, 6, 4096), generator=generator, dtype=torch.uint8)
    src, dst = cut(pools[0]), cut(pools[1])
    untouched = pools[1].clone()
    expected = cut(untouched)
    expected[[0, 1, 2, 3, 4]] = src[[1, 2, 3, 5, 0]]
    ids = [torch.tensor(i, dtype=torch.int32) for i in ([1, 2, 3, -1, 5, 0], [0, 1, 2, 5, 3, 4])]
    table = copy_table([src], [dst])
    runs = copy_engine.contiguous_runs(table, *ids)
    assert len(runs.num_bytes) == wanted
    assert int(runs.num_bytes.sum()) == 5 * table.item_bytes
    moved(runs)
    assert torch.equal(pools[1], untouched)


def test_buffers_that_merge_and_buffers_that_do_not_are_one_list_of_runs():
    src = torch.arange(6 * 8).view(6, 8)
    dst = torch.zeros(6, 8, dtype=torch.int64)
    whole = torch.zeros_like(dst)
    ids = torch.arange(6, dtype=torch.int32)
    runs = copy_engine.contiguous_runs(copy_table([src[:, :4], src], [dst[:, :4], whole]), ids, ids)
    assert len(runs.num_bytes) == 6 + 1
    moved(runs)
    assert torch.equal(dst[:, :4], src[:, :4])
    assert torch.equal(whole, src)


def test_pages_that_lie_in_one_piece_on_both_sides_are_one_run_each():
    src = torch.arange(5 * 3 * 8).view(5, 3, 8)  # pages of three buffers
    dst = torch.zeros(5, 4, 8, dtype=torch.int64)  # with room after the second buffer
    table = copy_table(src.unbind(1), [dst[:, 0], dst[:, 1], dst[:, 3]])
    ids = torch.tensor([4, 0], dtype=torch.int32)
    runs = copy_engine.contiguous_runs(table, ids, ids)
    assert sorted(runs.num_bytes.tolist()) == [64, 64, 128, 128]
    moved(runs)
    assert torch.equal(dst[[0, 4]][:, [0, 1, 3]], src[[0, 4]])
    assert not dst[:, 2].any()


def test_only_host_memory_on_its_way_to_a_device_may_be_read_in_any_order(stream, monkeypatch):
    driver = HostDriver("cuMemcpyBatchAsync_v2")
    monkeypatch.setattr(copy_engine, "_driver", lambda: driver)
    here = torch.zeros(4, 64)
    table, elsewhere = copy_table([here], [here.clone()]), (here.to("meta"),)
    ids = torch.zeros(1, dtype=torch.int32)
    for its in (table, replace(table, dst=elsewhere), replace(table, src=elsewhere)):
        runs = copy_engine.contiguous_runs(its, ids, ids)
        copy_engine.copy_runs(runs, torch.device("cuda", 0))
    assert driver.orders == [STREAM_ORDER, ANY_ORDER, STREAM_ORDER]


def test_no_ids_make_no_runs():
    table = copy_table([torch.zeros(4, 64)], [torch.zeros(4, 64)])
    none = torch.zeros(0, dtype=torch.int32)
    runs = copy_engine.contiguous_runs(table, none, none)
    assert [len(column) for column in runs[:3]] == [0, 0, 0]


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def num_operations(num_buffers, num_ids):
    slabs = torch.zeros(2, num_buffers, 512, 16, dtype=torch.int64)
    table = copy_table(slabs[0].unbind(0), slabs[1].unbind(0))
    ids = torch.arange(num_ids, dtype=torch.int32)
    with Operations() as operations:
        copy_engine.contiguous_runs(table, ids, ids.flip(0))
    return operations.count


def test_runs_of_thousands_are_listed_with_as_many_operations_as_those_of_a_few():
    assert num_operations(128, 300) == num_operations(2, 3)
