"""Pinned host memory has the requested size; a fake CUDA runtime stands for the real one."""

import mmap
from pathlib import Path

import pytest
import torch

from hicache.executor.real import pinned
from hicache.executor.real.pinned import HUGE_PAGE_BYTES, pinned_bytes


class Registry:
    """A fake CUDA runtime that pins nothing and records the calls."""

    def __init__(self, code=0):
        self.code = code
        self.pinned = {}
        self.released = []  # of each range: was it still mapped

    def cudaHostRegister(self, address, num_bytes, flags):
        assert flags == pinned.PORTABLE
        if self.code == 0:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in maps]
        self.released.append(any(int(a, 16) <= address < int(b, 16) for a, b in spans))
        return 0


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 1])
def test_memory_of_the_wanted_size_is_pinned_until_its_last_view_is_gone(num_bytes):
    registry = Registry()
    memory = pinned_bytes(num_bytes, registry)
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    sizes = list(registry.pinned.values())
    assert len(sizes) == (num_bytes > 0)
    assert registry.pinned == dict.fromkeys([memory.data_ptr()][: len(sizes)], *sizes or [0])
    # and not the next power of two
    assert all(0 <= size - num_bytes < HUGE_PAGE_BYTES for size in sizes)
    view = memory[num_bytes // 2 :].view(torch.int8)
    del memory
    assert len(registry.pinned) == len(sizes)
    del view
    assert not registry.pinned
    assert registry.released == [True] * len(sizes)  # before it is unmapped


@pytest.mark.parametrize("error", [None, OSError("invalid argument")])
def test_huge_pages_are_requested_and_a_system_without_them_is_supported(error, monkeypatch):
    advice = []

    def madvise(self, what):
        advice.append(what)
        if error:
            raise error

    monkeypatch.setattr(pinned._Registered, "madvise", madvise)
    assert len(pinned_bytes(64, Registry())) == 64
    assert advice == [mmap.MADV_HUGEPAGE]


@pytest.mark.parametrize(
    ("num_bytes", "code", "sentence"),
    [
        (64, 2, r"2,097,152 bytes .* cannot be pinned: CUDA error 2"),
        (1 << 60, 0, "cannot be mapped"),
    ],
)
def test_memory_that_cannot_be_pinned_or_mapped_is_refused(num_bytes, code, sentence):
    with pytest.raises(MemoryError, match=sentence):
        pinned_bytes(num_bytes, Registry(code))
