"""Pinned memory of the size that was asked for, pinned by a stand-in for the CUDA runtime."""

import mmap
from pathlib import Path

import pytest
import torch

from hicache.executor.real import pinned
from hicache.executor.real.pinned import HUGE_PAGE_BYTES, pinned_bytes


class Registry:
    """Pins nothing, and remembers the calls."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}
        self.released: list[bool] = []  # of each range: was it still mapped

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == pinned.PORTABLE
        if self.code == 0:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in maps]
        self.released.append(any(int(a, 16) <= address < int(b, 16) for a, b in spans))
        return 0


@pytest.mark.parametrize("num_bytes", [1, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 1])
def test_as_much_is_pinned_as_was_asked_for(num_bytes: int) -> None:
    registry = Registry()
    memory = pinned_bytes(num_bytes, registry)
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    (pinned_size,) = registry.pinned.values()
    assert registry.pinned == {memory.data_ptr(): pinned_size}
    assert 0 <= pinned_size - num_bytes < HUGE_PAGE_BYTES  # and not the next power of two


def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = []
    monkeypatch.setattr(pinned._Registered, "madvise", lambda self, what: advice.append(what))
    pinned_bytes(64, Registry())
    assert advice == [mmap.MADV_HUGEPAGE]


def test_a_system_without_huge_pages_pins_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: object, what: int) -> None:
        raise OSError("invalid argument")

    monkeypatch.setattr(pinned._Registered, "madvise", refused)
    assert len(pinned_bytes(64, Registry())) == 64


def test_memory_is_released_with_its_last_view_and_before_it_is_unmapped() -> None:
    registry = Registry()
    memory = pinned_bytes(64, registry)
    view = memory[8:16].view(torch.int64)
    del memory
    assert registry.pinned
    del view
    assert not registry.pinned
    assert registry.released == [True]


def test_memory_that_cannot_be_pinned_is_refused() -> None:
    with pytest.raises(MemoryError, match=r"2,097,152 bytes .* cannot be pinned: CUDA error 2"):
        pinned_bytes(64, Registry(code=2))


def test_memory_that_cannot_be_mapped_is_refused() -> None:
    with pytest.raises(MemoryError, match="cannot be mapped"):
        pinned_bytes(1 << 60, Registry())


def test_nothing_is_pinned_for_an_empty_pool() -> None:
    registry = Registry()
    assert len(pinned_bytes(0, registry)) == 0
    assert not registry.pinned
