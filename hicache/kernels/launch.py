"""Repeated launches of a kernel, without the work that Triton does to choose its variant.

Triton looks at every argument of a launch to find the variant that was compiled for it. That takes
longer than the launch. Here the caller guarantees that `constants`, the device and the dtypes of
tensors decide the variant: whole numbers are not specialized, and addresses have one alignment.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,
    num_programs: int,
    arguments: Sequence[object],
    constants: Mapping[str, Any],
    there: Tensor,
) -> None:
    """Launch a kernel on the current stream of the device that holds the tensor `there`.

    Args:
        kernel: a `@triton.jit` function.
        num_programs: size of the grid.
        arguments: the kernel's arguments without its constants, in their order.
        constants: values of `tl.constexpr` parameters, and options like `num_warps`.
        there: any of the tensors.
    """
    variant = (kernel.fn, there.device, *constants.values(), *map(_form, arguments))
    compiled = _COMPILED.get(variant)
    with torch.cuda.device_of(there):
        if compiled is None:
            compiled = kernel[(num_programs,)](*arguments, **constants)
            if compiled is not None:  # None in the interpreter
                _COMPILED[variant] = compiled
            return
        names = kernel.arg_names[len(arguments) :]
        compiled[(num_programs, 1, 1)](*arguments, *[constants[name] for name in names])


def _form(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.dtype
    if isinstance(argument, int):
        return -(1 << 31) <= argument < 1 << 31  # 32 bits, or 64
    return type(argument)
