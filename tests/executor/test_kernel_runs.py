"""Whole runs on the kernels alone: no operation of torch reads or writes a pool."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hicache.executor.real.plane import REFERENCE, interpreted
from hicache.executor.real.pools import TorchPools
from hicache.kernels import attend, copy, table
from tests.executor.mixes import run_mix


class RefusedError(RuntimeError):
    pass


class KernelsOnly(TorchDispatchMode):
    """Refuses operations on the storage of pools, but within launches."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, object] = {}  # kept, so that no address comes twice
        self._num_paused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._num_paused:
            for each in tree_leaves((args, kwargs)):
                if torch.is_tensor(each) and each.untyped_storage().data_ptr() in self._storages:
                    raise RefusedError(f"{func} on a pool")
        return func(*args, **(kwargs or {}))

    def add(self, pools: TorchPools) -> None:
        for rank in pools.ranks:
            slabs = (*rank.kv.values(), *rank.taps, *rank.states, *rank.host.values())
            for storage in (each.untyped_storage() for each in slabs if each.numel()):
                self._storages[storage.data_ptr()] = storage

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1

    def pausing(self, function):
        def run(*args, **kwargs):
            with self.paused():
                return function(*args, **kwargs)

        return run


@pytest.fixture
def kernels_only(monkeypatch) -> Iterator[KernelsOnly]:
    mode = KernelsOnly()
    for module in (copy, table):  # small tiles: the interpreter pays for each word
        monkeypatch.setattr(module, "TILE_WORDS", 512)
    monkeypatch.setattr(attend, "BLOCK", 16)
    make = TorchPools.__init__

    def made(pools, spec):
        with mode.paused():
            make(pools, spec)
        mode.add(pools)

    monkeypatch.setattr(TorchPools, "__init__", made)
    # poison is a check of the tests, and no part of a run
    monkeypatch.setattr(TorchPools, "poison", mode.pausing(TorchPools.poison))
    with mode:
        yield mode


@pytest.mark.parametrize(
    ("seed", "most", "hits"),
    [
        (94, 3, ["device hit", "storage hit"]),
        pytest.param(7, None, ["device hit", "host hit", "storage hit"], marks=pytest.mark.soak),
        pytest.param(11, None, ["device hit", "storage hit"], marks=pytest.mark.soak),
    ],
)
def test_logits_equal_a_cold_start_on_kernels_alone(seed, most, hits, kernels_only):
    mix = run_mix(seed, plane=interpreted().wrapped(kernels_only.pausing), most=most)
    assert mix.verdict.num_equal == mix.verdict.num_checked > 0
    assert all(mix.seen[hit] for hit in hits)


def test_an_operation_of_torch_on_a_pool_is_refused(kernels_only):
    with pytest.raises(RefusedError, match="on a pool"):
        run_mix(0, plane=REFERENCE)
