"""Checks of the ids that launchers receive. Each error names the actual and the required value.

Every call checks shape, dtype and device. The values of ids are checked if they lie in host memory:
reading ids from a device waits for it. A negative id is a hole: its item is skipped.
"""

from typing import Protocol

import torch
from torch import Tensor


class Sides(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def num_src_items(self) -> int: ...

    @property
    def num_dst_items(self) -> int: ...

    @property
    def in_place(self) -> bool: ...


def check_form(ids: Tensor, *, name: str, device: torch.device) -> None:
    if ids.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {ids.dtype}")
    if ids.dim() != 1 or not ids.is_contiguous():
        raise ValueError(f"{name} must be one contiguous axis, got shape {tuple(ids.shape)}")
    if ids.device != device:
        raise ValueError(f"{name} must be on {device}, got {ids.device}")


def check_copy_form(src_ids: Tensor, dst_ids: Tensor, *, device: torch.device) -> None:
    check_form(src_ids, name="source ids", device=device)
    check_form(dst_ids, name="target ids", device=device)
    if src_ids.shape != dst_ids.shape:
        raise ValueError(f"{len(src_ids)} source ids do not match {len(dst_ids)} target ids")


def check_copy_ids(table: Sides, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Raise ValueError if pages must not be copied from the ids `src_ids` to the ids `dst_ids`.

    An id must not be out of range, and a target id must not occur twice. If source and target are
    the same pool, no id may be both a source and a target. Negative ids are skipped.
    """
    for name, ids, limit in (
        ("source", src_ids, table.num_src_items),
        ("target", dst_ids, table.num_dst_items),
    ):
        if len(ids) and int(ids.max()) >= limit:
            raise ValueError(f"{name} ids must be below {limit}, got {int(ids.max())}")
    moved = (src_ids >= 0) & (dst_ids >= 0)
    targets = dst_ids[moved].sort().values
    twice = targets[1:][targets[1:] == targets[:-1]]
    if len(twice):
        raise ValueError(f"target id {int(twice[0])} is written more than once")
    if table.in_place:
        both = targets[torch.isin(targets, src_ids[moved])]
        if len(both):
            raise ValueError(f"id {int(both[0])} is both a source and a target in one pool")
