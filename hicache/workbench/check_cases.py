"""Random transfers for `check`: two pools in guarded memory, and the ids of several launches.

A pool is cut out of an arena with `GUARD_BYTES` of guard on both sides, so that a write beside the
pool is detected and does not crash the process. Pools have one of six layouts of pages, or are a
list of slots of different sizes; all pairs with equal items occur. Rows may be strided, items
padded, addresses aligned to 16 bytes only.

Axes: layer, kv, page, token, head, dim.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

CPU = torch.device("cpu")
Devices = tuple[torch.device, torch.device]  # source, target
GUARD_BYTES = 1 << 17  # more than any tile
ROW_BYTES = (16, 32, 48, 80, 128, 256, 1040)
LONG_ROW_BYTES = (36_880, 70_000)
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A memory layout of a pool of KV pages.

    `axes` lists the axes from the outermost to the innermost.
    """

    axes: str
    other_heads: int = 0  # further heads in the slab; the pool is its first slice
    padding_bytes: int = 0  # after each innermost run of the first axis


LAYOUTS = {
    "layer first": Layout(axes="layer kv page token head dim"),
    "page first": Layout(axes="page layer kv token head dim"),
    "padded pages": Layout(axes="page layer kv token head dim", padding_bytes=48),
    "token rows": Layout(axes="page token layer kv head dim"),
    "heads of pages": Layout(axes="page head layer kv token dim"),
    "head slice": Layout(axes="layer kv page token head dim", other_heads=1),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pool:
    """A pool of pages or states for testing copy kernels, with guard bytes around the pool.

    The pool consists of `buffers`. They are views of `arena`, which also contains the guard bytes.
    """

    arena: Tensor
    buffers: tuple[Tensor, ...]

    def twin(self, arena: Tensor) -> "Pool":
        buffers = tuple(
            arena.view(b.dtype).as_strided(b.shape, b.stride(), b.storage_offset())
            for b in self.buffers
        )
        return Pool(arena=arena, buffers=buffers)

    @property
    def num_items(self) -> int:
        return int(self.buffers[0].shape[0])


class Round(NamedTuple):
    what: str
    src_ids: tuple[int, ...]
    dst_ids: tuple[int, ...]
    num_programs: int | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    name: str
    src: Pool
    dst: Pool
    rounds: tuple[Round, ...]


def cases(num_cases: int, seed: int, *, device: torch.device = CPU) -> Iterator[Case]:
    """Yield random test cases for copy kernels; the same `seed` gives the same cases.

    Args:
        num_cases: number of cases. The first ones cover all pairs of layouts.
        seed: seed of the random choices.
        device: device of the pools. If it is a GPU, one pool of some cases is in pinned host
            memory.
    """
    pairs = [(src, dst) for src in LAYOUTS for dst in LAYOUTS]
    for number in range(num_cases):
        draw = Random(f"{seed}/{number}")
        devices = ((CPU, device), (device, device), (device, CPU))[number % 3]
        if number % 10 == 9:
            yield _slots(number, draw, (device,) if draw.random() < 0.7 else devices)
        else:
            src, dst = pairs[(number - number // 10) % len(pairs)]
            yield _pages(number, draw, devices, src, dst)


def _pages(number: int, draw: Random, devices: Devices, src: str, dst: str) -> Case:
    is_long = draw.random() < 0.1
    sizes = {  # axis lengths common to both pools, dim in bytes
        "layer": 1 if is_long else draw.randint(1, 3),
        "kv": draw.randint(1, 2),
        "token": draw.choice((1, 1, 2, 3, 16)) if not is_long else 1,
        "head": draw.randint(1, 3) if not is_long else 1,
        "dim": draw.choice(LONG_ROW_BYTES if is_long else ROW_BYTES),
    }
    dtype = draw.choice(DTYPES)
    pools = []
    for name, device in zip((src, dst), devices, strict=True):
        pages = sizes | {"page": draw.randint(1, 4 if is_long else 9)}
        pools.append(_pool(LAYOUTS[name], pages, dtype, draw, device))
    item = f"{sizes['token']} × {sizes['head']} × {sizes['dim']} B"
    num_buffers = sizes["layer"] * sizes["kv"]
    name = f"case {number}: {src} to {dst}, {num_buffers} buffers, items of {item}"
    return Case(name=name, src=pools[0], dst=pools[1], rounds=_rounds(draw, *pools))


def _slots(number: int, draw: Random, devices: tuple[torch.device, ...]) -> Case:
    items = [(draw.choice(ROW_BYTES), draw.choice(DTYPES)) for _ in range(draw.randint(1, 4))]
    pools = []
    for device in devices:
        num_slots = draw.randint(2, 9)
        lead = 16 * draw.randrange(4)
        arena = _arena(lead + num_slots * sum(size for size, _ in items), device)
        buffers, start = [], GUARD_BYTES + lead
        for size, dtype in items:
            part = arena[start : start + num_slots * size].view(dtype)
            buffers.append(part.view(num_slots, size // dtype.itemsize))
            start += num_slots * size
        pools.append(Pool(arena=arena, buffers=tuple(buffers)))
    name = f"case {number}: slots of {', '.join(f'{size} B' for size, _ in items)}"
    name += " within one pool" if len(pools) == 1 else ""
    src, dst = pools[0], pools[-1]
    return Case(name=name, src=src, dst=dst, rounds=_rounds(draw, src, dst))


def _pool(
    layout: Layout, sizes: dict[str, int], dtype: torch.dtype, draw: Random, device: torch.device
) -> Pool:
    names = layout.axes.split()
    heads = sizes["head"]
    sizes = sizes | {"head": heads + layout.other_heads, "dim": sizes["dim"] // dtype.itemsize}
    run = math.prod(sizes[name] for name in names[1:])  # elements per index of the first axis
    pitch = run + layout.padding_bytes // dtype.itemsize
    lead = 16 * draw.randrange(4)
    num_bytes = sizes[names[0]] * pitch * dtype.itemsize
    arena = _arena(lead + num_bytes, device)
    start = (GUARD_BYTES + lead) // dtype.itemsize
    slab = arena.view(dtype)[start : start + sizes[names[0]] * pitch]
    slab = slab.view(sizes[names[0]], pitch)[:, :run]
    lengths = {name: sizes[name] for name in names[1:]}
    slab = rearrange(slab, f"{names[0]} ({' '.join(names[1:])}) -> {layout.axes}", **lengths)
    # not one einops pattern, because padded layers do not merge into one axis
    slab = rearrange(slab, f"{layout.axes} -> layer kv page token head dim")
    slab = slab[..., :heads, :]
    return Pool(arena=arena, buffers=tuple(b for layer in slab.unbind(0) for b in layer.unbind(0)))


def _arena(num_bytes: int, device: torch.device) -> Tensor:
    is_pinned = device.type == "cpu" and torch.cuda.is_available()
    size = num_bytes + 2 * GUARD_BYTES
    return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=is_pinned)


def _rounds(draw: Random, src: Pool, dst: Pool) -> tuple[Round, ...]:
    rounds = []
    kinds = draw.sample(("random", "in a row", "backwards", "one", "none"), 2)
    for kind in ("random", "with holes", *kinds):
        sources, targets = list(range(src.num_items)), list(range(dst.num_items))
        if src is dst:  # no item may be a source and a target
            draw.shuffle(sources)
            half = src.num_items // 2
            sources, targets = sorted(sources[:half]), sorted(sources[half:])
        if kind in ("random", "with holes"):
            draw.shuffle(targets)
        count = {"one": 1, "none": 0}.get(kind, draw.randint(1, len(targets)))
        dst_ids = targets[:count]
        if kind in ("in a row", "backwards"):
            src_ids = [sources[i % len(sources)] for i in range(count)]
        else:
            src_ids = draw.choices(sources, k=count)  # with duplicates
        if kind == "backwards":
            src_ids, dst_ids = src_ids[::-1], dst_ids[::-1]
        if kind == "with holes":
            src_ids = [i if draw.random() < 0.6 else -1 for i in src_ids]
            dst_ids = [i if draw.random() < 0.8 else -1 for i in dst_ids]
        what = f"{count} ids {kind}" if count > 1 else f"{count or 'no'} id"
        programs = draw.choice((None, 1, 2, 3, 7))
        rounds.append(Round(what, tuple(src_ids), tuple(dst_ids), programs))
    return tuple(rounds)
