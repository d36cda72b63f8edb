"""What engines call around a launch: check and send ids, compile ahead.

A launch goes to the current stream, allocates its result only, and never waits. Callers order the
streams, and keep pools alive until a copy is done.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hicache.kernels import copy, index
from hicache.kernels.checks import Sides, check_copy_form, check_copy_ids
from hicache.kernels.table import CopyTable


def send_ids(*pairs: tuple[Sides, Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Check the page ids of several transfers, and send them to the device in one copy.

    The results are source and target ids on the device, in the order of `pairs`, for `copy_items`,
    which checks nothing. They also fit another tensor-parallel rank, if its pools have as many
    pages.

    Args:
        pairs: for each transfer, the two pools, the source ids and the target ids. Ids are [pages]
            int32 in host memory. All transfers use the same device. Source ids may occur twice.
            An item whose source or target id is negative is not copied.

    Raises:
        ValueError: ids have a wrong shape, dtype or device, an id is out of range, a target id
            occurs twice, or an id is a source and a target in one pool.
    """
    host = torch.device("cpu")
    for table, src_ids, dst_ids in pairs:
        check_copy_form(src_ids, dst_ids, device=host)
        check_copy_ids(table, src_ids, dst_ids)
    if not pairs:
        return []
    ids = send([each for _, *both in pairs for each in both], pairs[0][0].device)
    return list(zip(ids[::2], ids[1::2], strict=True))


def send(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Send one-dimensional tensors of one dtype to a device, all in one copy from pinned memory."""
    if device.type == "cpu" or not parts:
        return list(parts)
    lengths = [len(part) for part in parts]
    pinned = torch.empty(sum(lengths), dtype=parts[0].dtype, pin_memory=True)
    torch.cat(list(parts), out=pinned)
    return list(torch.split(pinned.to(device, non_blocking=True), lengths))


def warm_up(*tables: CopyTable) -> None:
    """Compile and load all kernels that copy pages of these tables or build page tables.

    No launch during serving then waits for the compiler or the driver. The pools of a table must
    not all be in host memory.
    """
    for table in tables:
        none = torch.zeros(0, dtype=torch.int32, device=table.device)
        copy.copy_items(table, none, none)
        copy.copy_items_with_checksum(table, none, none)
    for device in {table.device for table in tables}:
        zero = torch.zeros(2, dtype=torch.int32, device=device)  # one request without pages
        index.page_table(zero, zero.view(1, 2), zero, num_columns=1)
