"""Detects whether bytes that a transfer writes are written twice or also read.

A piece of all items of a pool is an arithmetic progression of intervals of equal size, one stride
apart. One row per piece describes millions of pages, so checking a table of thousands of pieces
takes milliseconds.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Progressions(NamedTuple):
    """Sets of equally long memory intervals at equal distances; each field is [sets] int64.

    Interval i of a set begins at byte `start + i * stride` and has `size` bytes. A set has
    `num_items` intervals. `is_target` is 1 if a transfer writes these bytes, and 0 if the transfer
    reads them.
    """

    start: Tensor
    stride: Tensor
    num_items: Tensor
    size: Tensor
    is_target: Tensor  # 1 or 0


def refuse_overlaps(names: Sequence[str], sets: Iterable[Sequence[Tensor]]) -> None:
    """Raise ValueError if a transfer writes a byte twice, or writes a byte that it reads.

    Each item of `sets` has the fields of `Progressions`: sets of memory intervals that the transfer
    reads or writes. All items are checked together. `names` has the buffer of each set, for the
    message.
    """
    found = first_overlap(Progressions(*map(torch.cat, zip(*sets, strict=True))))
    if found is not None:
        raise ValueError(f"{names[found[0]]} and {names[found[1]]} overlap")


def first_overlap(progressions: Progressions) -> tuple[int, int] | None:
    """Return the indices of two sets of memory intervals that share a byte; None if there are none.

    At least one of the two sets is written by a transfer. Two sets with different strides count as
    overlapping if their address ranges overlap.
    """
    order = torch.argsort(progressions.start)
    sorted_ = Progressions(*(column[order] for column in progressions))
    start, stride, num_items, size, is_target = sorted_
    target = is_target == 1
    end = (start + (num_items - 1) * stride + size).cummax(0).values
    begins = torch.ones_like(target)  # a group of overlapping reaches
    begins[1:] = start[1:] >= end[:-1]
    group = begins.cumsum(0) - 1
    num_groups = int(group[-1]) + 1

    def most_of_group(values: Tensor) -> Tensor:
        empty = torch.zeros(num_groups, dtype=torch.int64)
        return empty.scatter_reduce(0, group, values, "amax")[group]

    several = (torch.bincount(group)[group] > 1) & (most_of_group(is_target) == 1)
    period = most_of_group(torch.maximum(torch.where(num_items > 1, stride, 0), size))
    strange = several & (num_items > 1) & (stride != period)
    if bool(strange.any()):
        place = int(strange.int().argmax())
        others = (group == group[place]) & ((stride != stride[place]) | (num_items == 1))
        return int(order[place]), int(order[int(others.int().argmax())])
    low, high, owner = _modulo(start - start[begins][group], size, period, group)
    target = target[owner]
    before_of_targets = _reach_before(torch.where(target, high, -1))
    shared = low < torch.where(target, _reach_before(high), before_of_targets)
    if not bool(shared.any()):
        return None
    place = int(shared.int().argmax())
    others = (high[:place] > low[place]) & (target[:place] | target[place])
    return int(order[owner[int(others.int().argmax())]]), int(order[owner[place]])


def _modulo(
    start: Tensor, size: Tensor, period: Tensor, group: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # sorted by the low end; an interval that crosses the period is split in two
    first = start % period
    beyond = torch.nonzero(first + size > period).flatten()
    owner = torch.cat([torch.arange(len(start)), beyond])
    low = torch.cat([first, torch.zeros_like(beyond)])
    high = torch.cat([(first + size).minimum(period), (first + size - period)[beyond]])
    offset = group[owner] * int(period.max())
    order = torch.argsort(low + offset)
    return (low + offset)[order], (high + offset)[order], owner[order]


def _reach_before(high: Tensor) -> Tensor:
    return torch.cat([torch.full_like(high[:1], -1), high.cummax(0).values[:-1]])
