"""Interface of a copy kernel for `check`, `bench` and `codegen`: a function of two pools.

    def my_copy(src, dst):                  # the buffers of two pools, as `copy_table` takes them
        ...                                 # work done once per pair: tables, addresses
        def launch(src_ids, dst_ids, *, num_programs=None):
            ...                             # item src_ids[i] of src goes to item dst_ids[i] of dst
        return launch

    python -m hicache.workbench.check my_file:my_copy

No registration is needed: the name is `module:attribute`. Buffers are tensors whose first axis is
the item; an item of buffer b has equally many bytes in both pools. A negative id on either side is
a hole. A kernel declines transfers that it does not support with a ValueError or a
NotImplementedError that says why.

A kernel that is not a copy is a class with an oracle (`own`).

The launch may have a method `bind(src_ids, dst_ids, num_programs)` that does the host's work for a
list of ids once and returns the rest as a function; the bench then times only the rest.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hicache.kernels import copy
from hicache.kernels.table import copy_table
from hicache.workbench.own import OwnKernel

DECLINED = (ValueError, NotImplementedError)


class CopyLaunch(Protocol):
    """A function that copies items between two fixed pools, on the current stream.

    An item is a page, a token row or a Mamba slot.
    """

    def __call__(
        self, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
    ) -> object:
        """Copy the items `src_ids` of the source pool to the items `dst_ids` of the target pool.

        Args:
            src_ids: [items] int32 on the copying device. Duplicates are allowed. A pair with a
                negative id is skipped.
            dst_ids: [items] int32 on the copying device, without duplicates.
            num_programs: number of programs that share the work. None means the kernel's choice. A
                kernel may ignore the number.
        """


class CopyKernel(Protocol):
    def __call__(self, src: Sequence[Tensor], dst: Sequence[Tensor]) -> CopyLaunch:
        """Prepare copies from the pool `src` to the pool `dst`; return the function that copies.

        A pool is a list of buffers [items, ...]. Both pools have the same number of buffers.
        """


def ours(src: Sequence[Tensor], dst: Sequence[Tensor]) -> CopyLaunch:
    return partial(copy.copy_items, copy_table(src, dst))


def bound(
    launch: CopyLaunch, src_ids: Tensor, dst_ids: Tensor, *, num_programs: int | None = None
) -> Callable[[], object]:
    """Return a function without arguments that copies the items `src_ids` to the items `dst_ids`.

    Work that the host does once per list of ids is done now, if the kernel supports that.
    """
    bind = getattr(launch, "bind", None)
    if bind is None:
        return partial(launch, src_ids, dst_ids, num_programs=num_programs)
    rest: Callable[[], object] = bind(src_ids, dst_ids, num_programs)
    return rest


def named(name: str) -> CopyKernel | OwnKernel:
    """Import and return the kernel with the given name, `module:attribute`.

    If the name refers to a class, the result is an instance. The working directory is searched
    first.

    Raises:
        ValueError: the name is unknown, or its object cannot be called.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no kernel {name}, expected module:attribute: {error}") from error
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
