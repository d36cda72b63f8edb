"""Kernels run in the interpreter where there is no GPU, and for real where there is one."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

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
def in_the_examples(monkeypatch) -> None:
    """Kernels of `docs/examples` can be named."""
    examples = Path(__file__).parents[2] / "docs" / "examples"
    monkeypatch.syspath_prepend(examples)
    monkeypatch.chdir(examples)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def random_bytes(device, generator) -> Callable[..., Tensor]:
    """Random bytes of a shape, seen as a dtype: opaque words, NaN patterns included."""
    return _slabs(lambda shape: torch.randint(0, 256, shape, generator=generator), device)


@pytest.fixture
def poisoned(device) -> Callable[..., Tensor]:
    """A poisoned slab: what a kernel should have written, and did not, is seen."""
    return _slabs(lambda shape: torch.full(shape, POISON), device)


def _slabs(fill: Callable[[Sequence[int]], Tensor], device: torch.device) -> Callable[..., Tensor]:
    def make(*shape: int, dtype: torch.dtype = torch.uint8, host: bool = False) -> Tensor:
        slab = fill((*shape[:-1], shape[-1] * dtype.itemsize)).to(torch.uint8)
        if device.type == "cuda":
            slab = slab.pin_memory() if host else slab.to(device)
        return slab.view(dtype)

    return make


@pytest.fixture
def ids(device) -> Callable[[Sequence[int] | Tensor], Tensor]:
    """Ids as the kernels want them."""
    return lambda values: torch.as_tensor(values, dtype=torch.int32).to(device)
