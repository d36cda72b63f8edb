"""Triton's interpreter without work that it repeats.

It makes a table of numpy's dtypes anew for each look-up, describes the shape of each tensor anew,
patches the language again for each call of one function by another, although the launch has
patched it, and computes in 64 bits whether integers overflow, for assertions that it leaves out.
"""

import math
from dataclasses import replace
from typing import Any

from triton.language import core, standard
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction


def _called_by_a_kernel(function: InterpretedFunction, *arguments: Any, **named: Any) -> Any:
    if core.is_builtin(core.full):  # a launch patches what a kernel sees, and no `core`
        interpreter._patch_lang(standard.zeros.fn)
    return function.rewrite()(*arguments, **named)


def hasten() -> None:
    """Replace what is slow; results are the same."""
    InterpretedFunction.__call__ = _called_by_a_kernel
    anew, kept = interpreter._get_np_dtype, {}

    def looked_up(dtype: Any) -> Any:
        name = dtype.element_ty.name if dtype.is_block() else dtype.name
        if name not in kept:
            kept[name] = anew(dtype)
        return kept[name]

    interpreter._get_np_dtype = looked_up
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # with it, assertions are made
    builder.options = replace(builder.options, sanitize_overflow=False)
    _keep_shapes()


def _keep_shapes() -> None:
    shapes: dict[tuple[int, ...], Any] = {}
    types: dict[tuple[int, ...], Any] = {}
    describe = core.block_type.__init__

    def type_of(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
        if sizes not in types:
            describe(self, element_ty, shape)
            types[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = types[sizes]
        self.name = f"<{text}, {element_ty}>"

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            numel = core.constexpr(math.prod(sizes))
            shapes[sizes] = numel, core.tuple([core.constexpr(each) for each in sizes])
        self.numel, self.shape = shapes[sizes]

    core.block_type.__init__ = type_of
    core.tensor.__init__ = tensor_of
