"""A patch with which Triton's interpreter runs the loops of flash-linear-attention's kernels."""

import sys
import warnings

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from hicache.executor.real import fla_scan


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the kernels, and make the variables of their loops tensors."""
    with warnings.catch_warnings(action="ignore"):  # there is no GPU
        fla_scan.library()
    for name in ("chunk_delta_h", "chunk_h"):
        monkeypatch.setattr(sys.modules[f"fla.ops.common.{name}"], "range", scalars, raising=False)


def scalars(*bounds):
    numbers = [int(b.handle.data.item()) if isinstance(b, tl.tensor) else b for b in bounds]
    for number in range(*numbers):
        handle = interpreter.TensorHandle(np.array([number], np.int32), tl.int32)
        yield tl.tensor(handle, tl.int32)
