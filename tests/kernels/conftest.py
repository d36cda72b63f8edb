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

from tests.quick_interpreter import hasten

hasten()

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
def ids(device) -> Callable[[Sequence[int] | Tensor], Tensor]:
    """Ids as the kernels want them."""
    return lambda values: torch.as_tensor(values, dtype=torch.int32).to(device)
