"""The data plane of a real run: the Triton kernels, or their PyTorch references."""

from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

from torch import Tensor

from hicache.kernels import copy, index, load, transcode
from hicache.kernels.append import append, naive_append
from hicache.kernels.attend import attend, naive_attend
from hicache.kernels.scan import naive_scan, scan


class Plane(NamedTuple):
    copy_items: Callable[..., None]
    copy_items_with_checksum: Callable[..., Tensor]
    encode_items: Callable[..., None]
    load_items: Callable[..., None]
    append: Callable[..., None]
    attend: Callable[..., Tensor]
    scan: Callable[..., Tensor]
    page_table: Callable[..., Tensor]

    def wrapped(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> "Plane":
        return Plane(*map(wrap, self))


TRITON = Plane(
    copy.copy_items,
    copy.copy_items_with_checksum,
    transcode.encode_items,
    load.load_items,
    append,
    attend,
    scan,
    index.page_table,
)
REFERENCE = Plane(
    copy.naive_copy_items,
    copy.naive_copy_items_with_checksum,
    transcode.naive_encode_items,
    load.naive_load_items,
    naive_append,
    naive_attend,
    naive_scan,
    index.naive_page_table,
)


def interpreted() -> Plane:
    """Return the kernels, run by Triton's interpreter on the CPU.

    The interpreter has global state, so a lock allows only one launch at a time.
    """
    lock = Lock()

    def locked(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: object, **options: object) -> Any:
            with lock:
                return launch(*arguments, **options)

        return run

    return TRITON.wrapped(locked)
