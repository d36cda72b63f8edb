"""Pinned host memory of exactly the requested size.

torch rounds pinned allocations up to a power of two: a pool of 65 GiB would pin 128 GiB. Here
memory is mapped, advised to use huge pages (fewer address translations for the device), and
registered with CUDA, which faults all of it in and locks it.
"""

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context


class Registry(Protocol):
    """Interface of the CUDA runtime calls that pin host memory and release pinned memory.

    Both calls return 0 on success.
    """

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


class _Registered(mmap.mmap):
    release: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()


def pinned_bytes(num_bytes: int, registry: Registry | None = None) -> Tensor:
    """Return a tensor of `num_bytes` zero bytes in pinned host memory.

    The memory is released when the last view of the tensor is deleted.

    Args:
        num_bytes: size in bytes.
        registry: the CUDA runtime. None means the one that torch uses.

    Raises:
        MemoryError: the memory cannot be allocated or pinned.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    registry = registry or torch.cuda.cudart()  # type: ignore[no-untyped-call]
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        mapping = _Registered(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size:,} bytes of host memory cannot be mapped: {error}") from error
    with suppress(OSError):  # without huge pages, small ones serve
        mapping.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes)
    address = tensor.data_ptr()
    code = int(registry.cudaHostRegister(address, size, PORTABLE))
    if code != 0:
        raise MemoryError(f"{size:,} bytes of host memory cannot be pinned: CUDA error {code}")
    mapping.release = lambda: registry.cudaHostUnregister(address)
    return tensor
