"""Kernels run in the interpreter where there is no GPU, and for real where there is one."""

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is imported
# copies do no floating-point arithmetic; triton 3.9 warns until this is chosen
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

POISON = 0xA5


GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=[GPU if torch.cuda.is_available() else "cpu"])
def device(request) -> torch.device:
    """Where kernels run: the same cases in the interpreter and on a GPU."""
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def random_bytes(device, generator) -> Callable[..., Tensor]:
    """Random bytes of a shape, seen as a dtype: opaque words, NaN patterns included."""

    def make(*shape: int, dtype: torch.dtype = torch.uint8, host: bool = False) -> Tensor:
        last = shape[-1] * dtype.itemsize
        values = torch.randint(0, 256, (*shape[:-1], last), generator=generator, dtype=torch.uint8)
        return _placed(values, device, host=host).view(dtype)

    return make


@pytest.fixture
def poisoned(device) -> Callable[..., Tensor]:
    """A poisoned slab: what a kernel should have written, and did not, is seen."""

    def make(*shape: int, dtype: torch.dtype = torch.uint8, host: bool = False) -> Tensor:
        last = shape[-1] * dtype.itemsize
        slab = torch.full((*shape[:-1], last), POISON, dtype=torch.uint8)
        return _placed(slab, device, host=host).view(dtype)

    return make


def _placed(values: Tensor, device: torch.device, *, host: bool) -> Tensor:
    if device.type == "cpu":
        return values
    return values.pin_memory() if host else values.to(device)


@pytest.fixture
def ids(device) -> Callable[[Sequence[int] | Tensor], Tensor]:
    """Ids as the kernels want them."""

    def make(values: Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    return make
