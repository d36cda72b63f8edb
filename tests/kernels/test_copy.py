"""Copies of items between pools: the kernel and its reference against PyTorch, byte for byte.

`check` draws random transfers: all pairs of six layouts, slices of the heads, odd rows, slots of
different sizes, duplicate sources, holes; 1,000 of them as soak.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from on_gpu import ON_GPU

from hicache.kernels import copy, copy_table, index
from hicache.kernels.table import TILE_WORDS, WORD_BYTES
from hicache.workbench.check import check
from hicache.workbench.check_cases import cases
from hicache.workbench.codegen_cases import COPIES
from hicache.workbench.contract import ours

POISON = 0xA5
SIZES = COPIES | {f"{size} B": (size, 1) for size in (16, 48, 16 * 617, 65536 + 16, 3 * 65536)}


def sizes(few, many):
    """Numbers of cases for parametrize: `few` in every run, and `many` in soak runs only."""
    return [few, pytest.param(many, marks=pytest.mark.soak)]


def in_torch(src, dst):
    """The reference copy in PyTorch between two pools, as `check` takes a kernel."""
    return partial(copy.naive_copy_items, copy_table(src, dst))


def assert_right(verdict, num_cases):
    assert verdict.passes, str(verdict)
    assert (verdict.num_right, verdict.declined) == (num_cases, [])


@pytest.mark.parametrize("num_cases", sizes(10, 1000))  # of four transfers each
def test_random_transfers_equal_torch(num_cases, device):
    assert_right(check(ours, num_cases=num_cases, seed=1, device=device), num_cases)


def test_random_transfers_by_the_reference_equal_torch():
    assert_right(check(in_torch, num_cases=10, seed=1), 10)


@pytest.mark.parametrize("num_cases", sizes(5, 250))
def test_checksums_of_random_transfers_equal_those_of_the_reference(num_cases, device):
    for case in cases(num_cases, 2):
        case.src.arena.random_(0, 256, generator=torch.Generator().manual_seed(num_cases))
        src = [buffer.to(device) for buffer in case.src.buffers]
        dst = src if case.src is case.dst else [buffer.to(device) for buffer in case.dst.buffers]
        for launch in case.rounds:
            ids = [torch.tensor(e, dtype=torch.int32) for e in (launch.src_ids, launch.dst_ids)]
            twins = [[buffer.cpu().clone() for buffer in pool] for pool in (src, dst)]
            sums = copy.naive_copy_items_with_checksum(copy_table(*twins), *ids)
            got = copy.copy_items_with_checksum(
                copy_table(src, dst), *(e.to(device) for e in ids), num_programs=launch.num_programs
            )
            assert torch.equal(got.cpu(), sums), case.name


def copied(name, direction, device, draw, *, has_sums=False):
    """Copy random items; return how many target bytes differ, the checksums and expected ones."""
    size, rows = SIZES[name]
    count = min((16 << 20) // size, 8192) if ON_GPU else 5
    source = torch.randint(
        0, 256, (2, count, rows, 2 * size // rows), generator=draw, dtype=torch.uint8
    )
    target = torch.full_like(source, POISON)
    sources, targets = (torch.randperm(count, generator=draw).int() for _ in range(2))
    targets[1] = -1  # a hole
    moved, row = targets >= 0, size // rows
    expected = target.clone()
    expected[:, targets[moved], :, :row] = source[:, sources[moved], :, :row]
    on = lambda pool, is_host: pool.pin_memory() if is_host and ON_GPU else pool.to(device)  # noqa: E731
    source, target = on(source, direction == "from host"), on(target, direction == "to host")
    src, dst = ([each[..., :row] for each in pool] for pool in (source, target))
    launch = copy.copy_items_with_checksum if has_sums else copy.copy_items
    sums = launch(copy_table(src, dst), sources.to(device), targets.to(device))
    if ON_GPU:
        torch.cuda.synchronize()
    wanted = None
    if has_sums:
        words = torch.cat([each.cpu().flatten(1).view(torch.int64) for each in src], dim=1)
        wanted = torch.where(moved, copy.checksums(words)[sources], 0)
    return int((target.cpu() != expected).sum()), sums, wanted


@pytest.mark.parametrize("direction", ["within", "to host", "from host"] if ON_GPU else ["within"])
@pytest.mark.parametrize("name", SIZES)
def test_copied_items_equal_their_sources(name, direction, device, generator):
    assert copied(name, direction, device, generator)[0] == 0


@pytest.mark.parametrize("name", ["48 B", "9872 B", [*COPIES][-1]])
def test_checksums_do_not_depend_on_the_layout_of_items(name, device, generator):
    differing, sums, wanted = copied(name, "within", device, generator, has_sums=True)
    assert differing == 0
    assert torch.equal(sums.cpu(), wanted)
    assert len(set(wanted.tolist())) == len(wanted)


def test_a_checksum_changes_with_a_bit_and_with_the_order_of_words(device, generator, ids):
    src = torch.randint(0, 256, (4, 4096), generator=generator, dtype=torch.uint8)
    src[1:3] = src[0]
    src[1, 77] ^= 4
    src[2, :16] = src[2, :16].roll(8)
    table = copy_table([src.to(device)], [torch.zeros_like(src, device=device)])
    sums = copy.copy_items_with_checksum(table, ids([0, 1, 2, 0]), ids([0, 1, 2, 3])).tolist()
    assert len(set(sums)) == 3
    assert sums[0] == sums[3]


class OnDevice:
    """Stands for a kernel, and accepts launches on the device of their first tensor only."""

    def __init__(self):
        self.current, self.num_launches = [], 0

    @contextmanager
    def device_of(self, tensor):
        self.current.append(tensor.device)
        yield
        self.current.pop()

    def __getitem__(self, grid):
        def launch(tensor, *arguments, **constants):
            assert self.current == [tensor.device]
            self.num_launches += 1

        return launch


def test_kernels_are_launched_on_the_device_of_their_tensors(device, ids, monkeypatch):
    kernel, pool = OnDevice(), torch.zeros(4, 64, device=device)
    monkeypatch.setattr(torch.cuda, "device_of", kernel.device_of)
    monkeypatch.setattr(copy, "_copy_kernel", kernel)
    copy.copy_items(copy_table([pool], [pool]), ids([0]), ids([1]))
    monkeypatch.setattr(index, "_page_table_kernel", kernel)
    index.page_table(ids([3]), ids([0, 1]).view(1, 2), ids([0, 1]), num_columns=1)
    assert kernel.num_launches == 2


def table_of(item_bytes, num_buffers=1):
    pools = torch.zeros(2, num_buffers, 2, item_bytes, dtype=torch.uint8)
    return copy_table(pools[0].unbind(0), pools[1].unbind(0))


def test_copies_over_a_link_use_few_programs_and_copies_within_a_device_many(monkeypatch):
    counts = {"cuda:0": 132, "cuda:1": 78}
    properties = lambda device: SimpleNamespace(multi_processor_count=counts[str(device)])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    copy.num_sms.cache_clear()
    assert [copy.num_sms(torch.device(name)) for name in ("cpu", *counts)] == [1, 132, 78]
    copy.num_sms.cache_clear()
    monkeypatch.setattr(copy, "num_sms", lambda device: 132)
    within = table_of(256)
    across = replace(within, dst=tuple(each.to("meta") for each in within.dst))
    assert [copy.programs_of(within, tiles, None) for tiles in (0, 1, 300)] == [1, 1, 264]
    assert [copy.programs_of(across, tiles, None) for tiles in (1, 3, 300)] == [1, 3, 4]
    assert [copy.programs_of(across, 300, wanted) for wanted in (1, 9, 400)] == [1, 9, 300]
    with pytest.raises(ValueError, match="at least one program wanted, got 0"):
        copy.programs_of(within, 10, 0)


def test_a_transfer_of_too_many_lines_is_refused():
    table = table_of(256)  # an item is one line of 32 words
    wanted = (1 << 30) - 1, (1 << 30) // (TILE_WORDS // 32)
    assert copy.lines_and_tiles_of(table, (1 << 30) - 1) == wanted
    with pytest.raises(ValueError, match="a transfer of 1073741824 lines is too long"):
        copy.lines_and_tiles_of(table, 1 << 30)


@pytest.mark.parametrize(
    ("item_bytes", "lines", "steps", "width"),
    [(16, 4096, 1, 2), (256, 256, 2, 16), (2048, 32, 8, 32), (65536, 1, 8, 1024)],
)
def test_a_thread_reads_lines_in_steps_of_128_bytes_and_items_fill_tiles(
    item_bytes, lines, steps, width
):
    shape = {"TOGETHER": 1, "LINES": lines, "STEPS": steps, "WIDTH": width}
    assert copy.tile_shape(table_of(item_bytes)) == shape
    _, num_tiles = copy.lines_and_tiles_of(table_of(item_bytes, num_buffers=64), 1)
    assert num_tiles == -(-64 * item_bytes // (TILE_WORDS * WORD_BYTES))
