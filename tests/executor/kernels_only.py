"""A check that operations of torch read or write pools only within launches of kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hicache.executor.real.pools import TorchPools
from hicache.kernels import attend, copy, table


class RefusedError(RuntimeError):
    pass


class KernelsOnly(TorchDispatchMode):
    """Refuses operations of torch on the memory of pools, except while paused."""

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
            slabs = (*rank.kv.values(), *rank.index.values(), *rank.taps, *rank.states)
            slabs += tuple(rank.host.values())
            for storage in (each.untyped_storage() for each in slabs if each.numel()):
                self._storages[storage.data_ptr()] = storage

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1


@contextmanager
def kernels_only() -> Iterator[KernelsOnly]:
    """Refuse operations of torch on pools, except in functions that `paused()` decorates."""
    mode = KernelsOnly()
    make = TorchPools.__init__

    def made(pools, spec):
        mode.paused()(make)(pools, spec)
        mode.add(pools)

    with (
        patch.object(TorchPools, "__init__", made),
        # poison is a check of the tests, and no part of a run
        patch.object(TorchPools, "poison", mode.paused()(TorchPools.poison)),
        # small tiles: the interpreter pays for each word
        patch.object(copy, "TILE_WORDS", 512),
        patch.object(table, "TILE_WORDS", 512),
        patch.object(attend, "BLOCK", 16),
        mode,
    ):
        yield mode
