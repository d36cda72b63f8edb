"""Buffers of a slab pool: one view per layer and K or V, whose first axis is the item.

A pool is one allocation. The device pool is layer-first, because attention reads one layer at a
time. The host pool is page-first, because storage reads and writes whole pages. Both functions list
the same buffers in the same order, so a copy table between them is a change of layout.

Axes: layer, kv (K and V, or 1), page, token (of a page), head, dim.
"""

from einops import rearrange
from torch import Tensor


def layer_first_buffers(slab: Tensor) -> tuple[Tensor, ...]:
    """Return one view [page, token, head, dim] per layer and per K or V of a layer-first pool.

    `slab`, the memory of the pool, is [layer, kv, page, token, head, dim].
    """
    buffers = rearrange(slab, "layer kv page token head dim -> (layer kv) page token head dim")
    return buffers.unbind(0)


def page_first_buffers(slab: Tensor) -> tuple[Tensor, ...]:
    """Return one view [page, token, head, dim] per layer and per K or V of a page-first pool.

    `slab`, the memory of the pool, is [page, layer, kv, token, head, dim].
    """
    buffers = rearrange(slab, "page layer kv token head dim -> (layer kv) page token head dim")
    return buffers.unbind(0)
