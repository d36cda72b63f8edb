"""Interface of a copy kernel for `check`, `bench` and `codegen`: a function of two pools.

    def my_copy(src, dst):                  # the buffers of two pools, as `copy_table` takes them
        ...                                 # work done once per pair: tables, addresses
        def launch(src_ids, dst_ids, *, num_programs=None):
            ...                             # item src_ids[i] of src goes to item dst_ids[i] of dst
        return launch

    python -m hicache.workbench.check my_file:my_copy

No registration is needed: the name is `module:attribute`, or an entry point of the group
`hicache.copy_kernels`. Buffers are tensors whose first axis is the item; an item of buffer b has
equally many bytes in both pools. A negative id on either side is a hole. A kernel declines
transfers that it does not support with a ValueError or a NotImplementedError that says why.

A kernel that is not a copy is a class with an oracle (`own`).

The launch may have a method `bind(src_ids, dst_ids, num_programs)` that does the host's work for a
list of ids once and returns the rest as a function; the bench then times only the rest.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hicache.kernels import copy
from hicache.kernels.table import copy_table
from hicache.workbench.own import OwnKernel

GROUP = "hicache.copy_kernels"
DECLINED = (ValueError, NotImplementedError)


class CopyLaunch(Protocol):
    """Copies items between the two pools it was made for, on the current stream."""

    def __call__(
        self, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
    ) -> object:
        """Copy.

        Args:
            src_ids: [G] int32 on the device that copies. Duplicates are allowed; < 0 is a hole.
            dst_ids: [G] int32 likewise, without duplicates.
            num_programs: number of programs that share the work, if the kernel lets callers choose.
        """


class CopyKernel(Protocol):
    def __call__(self, src: Sequence[Tensor], dst: Sequence[Tensor]) -> CopyLaunch:
        """Prepare once for a pair of pools, each a list of as many buffers [items, ...]."""


def ours(src: Sequence[Tensor], dst: Sequence[Tensor]) -> CopyLaunch:
    return partial(copy.copy_items, copy_table(src, dst))


def bound(
    launch: CopyLaunch, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> Callable[[], object]:
    """Return the launch for these ids, after the work that is done once per list of ids."""
    bind = getattr(launch, "bind", None)
    if bind is None:
        return partial(launch, src_ids, dst_ids, num_programs=num_programs)
    rest: Callable[[], object] = bind(src_ids, dst_ids, num_programs)
    return rest


def named(name: str) -> CopyKernel | OwnKernel:
    """Return the kernel called `module:attribute`, or the entry point of that name.

    A class is instantiated: a kernel with its own oracle (`own`). Modules are found as `python`
    finds them, in the working directory first.

    Raises:
        ValueError: the name is unknown, or its object cannot be called.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module, colon, attribute = name.partition(":")
    if colon:
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"no copy kernel {name}: {error}") from error
    else:
        points = entry_points(group=GROUP, name=name)
        if not points:
            raise ValueError(
                f"a copy kernel is named module:attribute or is an entry point of {GROUP}, "
                f"got {name!r}"
            )
        found = next(iter(points)).load()
    found = found() if isinstance(found, type) else found
    if isinstance(found, OwnKernel):
        return found
    if not callable(found):
        raise ValueError(
            f"{name} must be a function of two pools or a class with an oracle, "
            f"got {type(found).__name__}"
        )
    kernel: CopyKernel = found
    return kernel
