"""Random transfers equal a copy made by torch: layouts, ids, maps, ranks; 5,000 of them as soak.

The pools and ids are those of `check`: all pairs of six layouts, slices of the heads, odd rows,
slots of different sizes, duplicate sources, holes.
"""

from functools import partial
from random import Random

import pytest
import torch
from einops import rearrange

from hicache.kernels import copy, copy_table
from hicache.workbench.check import check
from hicache.workbench.check_cases import cases
from hicache.workbench.contract import ours

LAYOUTS = {  # of a host pool; the first axes of a page are told apart by a view of its own
    "layer first": "layer kv page token head dim",
    "page first": "page layer kv token head dim",
    "token rows": "page token layer kv head dim",
    "heads of pages": "page head layer kv token dim",
    "heads of layers": "layer kv head page token dim",
    "packed": "page kv head token layer dim",
}
AXES = "layer kv page token head dim"


def sizes(few, many):
    """A few cases in every run, and many more when there is time."""
    return [few, pytest.param(many, marks=pytest.mark.soak)]


def i32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def in_torch(src, dst):
    """What a machine without a GPU runs."""
    return partial(copy.naive_copy_items, copy_table(src, dst))


def assert_right(verdict, num_cases):
    assert verdict.passes, str(verdict)
    assert verdict.num_right + len(verdict.declined) == num_cases
    assert not verdict.declined


@pytest.mark.parametrize("num_cases", sizes(10, 1000))  # of four transfers each
def test_random_transfers_equal_torch(num_cases, device):
    assert_right(check(ours, num_cases=num_cases, seed=1, device=device), num_cases)


def test_random_transfers_without_a_gpu_equal_torch():
    assert_right(check(in_torch, num_cases=10, seed=1), 10)


def test_what_a_device_copies_lies_on_it_on_one_side_at_least():
    for case in cases(40, 1, device=torch.device("meta")):
        devices = {buffer.device.type for pool in (case.src, case.dst) for buffer in pool.buffers}
        assert "meta" in devices, case.name


def copied(src, dst, src_ids, dst_ids):
    """What the target buffers hold after a copy, one item at a time."""
    expected = [buffer.cpu().clone() for buffer in dst]
    for buffer, source in zip(expected, src, strict=True):
        for src_id, dst_id in zip(src_ids, dst_ids, strict=True):
            if src_id >= 0 and dst_id >= 0:
                buffer[dst_id] = source[src_id].cpu()
    return expected


@pytest.mark.parametrize("num_cases", sizes(5, 250))
def test_random_transfers_and_their_checksums_equal_torch(num_cases, device):
    for number, case in enumerate(cases(num_cases, 2)):
        generator = torch.Generator().manual_seed(number)
        case.dst.arena.zero_()
        case.src.arena.random_(0, 256, generator=generator)
        src = [buffer.to(device) for buffer in case.src.buffers]
        dst = src if case.src is case.dst else [buffer.to(device) for buffer in case.dst.buffers]
        table = copy_table(src, dst)
        for launch in case.rounds:
            expected = copied(src, dst, launch.src_ids, launch.dst_ids)
            ids = i32(launch.src_ids, device), i32(launch.dst_ids, device)
            twin = copy_table([b.cpu() for b in src], [b.clone() for b in expected])
            sums = copy.naive_copy_items_with_checksum(twin, *(each.cpu() for each in ids))
            got = copy.copy_items_with_checksum(table, *ids, num_programs=launch.num_programs)
            assert torch.equal(got.cpu(), sums), case.name
            for buffer, wanted in zip(dst, expected, strict=True):
                assert torch.equal(
                    buffer.cpu().contiguous().view(torch.uint8),
                    wanted.contiguous().view(torch.uint8),
                ), f"{case.name}, {launch.what}"


def host_pool(layout, sizes_of, dtype, *, is_pinned):
    """A slab in a layout, seen as [layer, kv, page, token, head, dim]."""
    names = LAYOUTS[layout].split()
    slab = torch.zeros([sizes_of[name] for name in names], dtype=dtype, pin_memory=is_pinned)
    return rearrange(slab, f"{LAYOUTS[layout]} -> {AXES}")


def buffers_of(pool, heads=slice(None)):
    return [buffer[:, :, heads] for layer in pool.unbind(0) for buffer in layer.unbind(0)]


def slice_of(rank, num_ranks, num_heads):
    share = num_heads // num_ranks
    return slice(rank * share, (rank + 1) * share)


@pytest.mark.parametrize("num_cases", sizes(3, 150))
def test_pages_survive_the_way_through_other_numbers_of_ranks(num_cases, device):
    """8 heads on one, 2, 4 or 8 ranks, to a host pool, and from there to another number of them."""
    for number in range(num_cases):
        draw = Random(f"ranks {number}")
        sizes_of = {
            "layer": draw.randint(1, 2),
            "kv": 2,
            "page": draw.randint(2, 4),
            "token": draw.choice((1, 2, 3, 16)),
            "head": 8,
            "dim": draw.choice((8, 16, 24, 40, 64)),
        }
        dtype = draw.choice((torch.bfloat16, torch.float16, torch.int16))
        shape = [sizes_of[name] for name in AXES.split()]
        generator = torch.Generator().manual_seed(number)
        pages = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
        pages = pages.view(dtype)
        layout = draw.choice(list(LAYOUTS))
        host = host_pool(layout, sizes_of, dtype, is_pinned=device.type == "cuda")
        order = draw.sample(range(shape[2]), shape[2])
        ids, there = i32(range(shape[2]), device), i32(order, device)
        counts = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4, 8))
        for rank in range(counts[0]):
            heads = slice_of(rank, counts[0], 8)
            pool = pages[..., heads, :].contiguous().to(device)
            table = copy_table(buffers_of(pool), buffers_of(host, heads))
            copy.copy_items(table, ids, there, num_programs=draw.randint(1, 3))
        for rank in range(counts[1]):
            heads = slice_of(rank, counts[1], 8)
            wanted = pages[..., heads, :].contiguous()
            pool = torch.zeros_like(wanted, device=device)
            table = copy_table(buffers_of(host, heads), buffers_of(pool))
            copy.copy_items(table, there, ids, num_programs=draw.randint(1, 3))
            got = pool.cpu().view(torch.int16)
            assert torch.equal(got, wanted.view(torch.int16)), (number, counts)
