"""Fixtures of kernel tests: kernels run in Triton's interpreter, or on a GPU if there is one."""

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

from tests.quick_interpreter import hasten

hasten()

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=[GPU if torch.cuda.is_available() else "cpu"])
def device(request) -> torch.device:
    """The device that kernels run on: a GPU if there is one, otherwise the CPU (interpreted)."""
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@pytest.fixture
def in_the_examples(monkeypatch) -> None:
    """Make `docs/examples` the working directory and import kernels by name from there."""
    examples = Path(__file__).parents[2] / "docs" / "examples"
    monkeypatch.syspath_prepend(examples)
    monkeypatch.chdir(examples)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def ids(device) -> Callable[[Sequence[int] | Tensor], Tensor]:
    """A function that makes an int32 tensor on the device of the kernels from ids."""
    return lambda values: torch.as_tensor(values, dtype=torch.int32).to(device)
