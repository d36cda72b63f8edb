"""The copy kernel against a naive copy, byte for byte, over the whole pool and its guard items.

Every case keeps items of both pools out of the ids: a write outside of its item lands in one.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hicache.kernels import (
    copy,
    copy_table,
    index,
    layer_first_buffers,
    page_first_buffers,
)
from hicache.kernels.table import TILE_WORDS, WORD_BYTES

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32, torch.int8]
NUM_PAGES = 9


def as_bytes(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


def naive_copy(src, dst, src_ids, dst_ids):
    """One item at a time, each buffer a list of items."""
    expected = [buffer.cpu().clone() for buffer in dst]
    for src_buffer, buffer in zip(src, expected, strict=True):
        for src_id, dst_id in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
            if src_id >= 0 and dst_id >= 0:
                buffer[dst_id] = src_buffer[src_id].cpu()
    return expected


def assert_copies(src, dst, src_ids, dst_ids, **launch):
    """Copy with the kernel, compare all of the target with a naive copy."""
    expected = naive_copy(src, dst, src_ids, dst_ids)
    before = [as_bytes(buffer).clone() for buffer in src]
    copy.copy_items(copy_table(src, dst), src_ids, dst_ids, **launch)
    if src_ids.is_cuda:
        torch.cuda.synchronize()  # pinned memory may be looked at without waiting for the device
    for got, wanted in zip(dst, expected, strict=True):
        assert torch.equal(as_bytes(got), as_bytes(wanted))
    for got, wanted in zip(src, before, strict=True):
        assert torch.equal(as_bytes(got), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 128])
def test_pages_change_layout_on_the_way_to_the_host(dtype, page_size, random_bytes, poisoned, ids):
    pages = random_bytes(2, 2, NUM_PAGES, page_size, 2, 32, dtype=dtype)
    host = poisoned(NUM_PAGES, 2, 2, page_size, 2, 32, dtype=dtype, host=True)
    assert_copies(
        layer_first_buffers(pages), page_first_buffers(host), ids([7, 1, 4]), ids([2, 6, 3])
    )


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_pages_change_layout_on_the_way_back(page_size, random_bytes, poisoned, ids):
    host = random_bytes(NUM_PAGES, 3, 2, page_size, 2, 64, host=True)
    pages = poisoned(3, 2, NUM_PAGES, page_size, 2, 64)
    assert_copies(
        page_first_buffers(host), layer_first_buffers(pages), ids([2, 6, 3]), ids([7, 1, 4])
    )


@pytest.mark.parametrize("item_bytes", [16, 48, 16 * 617, 65536, 65536 + 16, 3 * 65536 + 4096])
@pytest.mark.parametrize("num_items", [0, 1, 5])
def test_items_of_any_multiple_of_16_bytes(item_bytes, num_items, random_bytes, poisoned, ids):
    src, dst = random_bytes(8, item_bytes), poisoned(8, item_bytes)
    assert_copies([src], [dst], ids([6, 2, 5, 1, 3][:num_items]), ids([1, 4, 3, 6, 2][:num_items]))


@pytest.mark.parametrize("num_programs", [1, 3, 64])
def test_any_number_of_programs_shares_the_work(num_programs, random_bytes, poisoned, ids):
    src, dst = random_bytes(12, 2 * 32768 + 512), poisoned(12, 2 * 32768 + 512)
    assert_copies([src], [dst], ids([9, 2, 5, 7]), ids([1, 4, 3, 10]), num_programs=num_programs)


def test_rows_are_scattered_one_by_one(random_bytes, poisoned, ids, generator):
    src, dst = random_bytes(2, 2, 10, 16, 2, 64), poisoned(2, 2, 10, 16, 2, 64)
    order = torch.randperm(158, generator=generator)
    pools = [[each.flatten(0, 1) for each in layer_first_buffers(slab)] for slab in (src, dst)]
    assert_copies(*pools, ids(order[:77] + 1), ids(order[77:154] + 1))


@pytest.mark.parametrize("there", [True, False], ids=["to the host", "back"])
def test_a_slice_of_the_heads_is_a_pool(there, random_bytes, ids):
    heads = random_bytes(NUM_PAGES, 16, 8, 64, dtype=torch.float16)[:, :, 2:4]
    rank = random_bytes(NUM_PAGES, 16, 2, 64, dtype=torch.float16, host=True)
    src, dst = (heads, rank) if there else (rank, heads)
    assert_copies([src], [dst], ids([7, 1, 4]), ids([2, 6, 3]))


def test_duplicate_sources_are_copied_to_each_target(random_bytes, poisoned, ids):
    src, dst = random_bytes(6, 4096), poisoned(6, 4096)
    assert_copies([src], [dst], ids([3, 3, 1, 3]), ids([0, 1, 2, 4]))


@pytest.mark.parametrize("item_bytes", [256, 32768])
def test_holes_on_either_side_move_nothing(item_bytes, random_bytes, poisoned, ids):
    src, dst = random_bytes(8, item_bytes), poisoned(8, item_bytes)
    assert_copies([src], [dst], ids([-1, 2, 5, 1, -1]), ids([1, -1, 3, 6, -1]))


def test_slots_of_all_layers_go_in_one_launch(random_bytes, poisoned, ids):
    conv = [random_bytes(7, 3, 96, dtype=torch.bfloat16) for _ in range(3)]
    ssm = [random_bytes(7, 4, 64, 32, dtype=torch.float32) for _ in range(3)]
    into = [poisoned(*t.shape, dtype=t.dtype) for t in (*conv, *ssm)]
    assert_copies([*conv, *ssm], into, ids([1, -1, 4]), ids([3, 2, 5]))


def test_a_slot_is_copied_on_write_within_its_pool(random_bytes, ids):
    slots = [random_bytes(6, 160), random_bytes(6, 40000)]
    expected = naive_copy(slots, slots, ids([1, 4]), ids([3, 2]))
    copy.copy_items(copy_table(slots, slots), ids([1, 4]), ids([3, 2]))
    for got, wanted in zip(slots, expected, strict=True):
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("case", ["pages", "rows", "slots", "holes"])
def test_the_reference_equals_a_naive_copy(case, random_bytes, poisoned, ids):
    shapes = {
        "pages": [(9, 4096)] * 4,
        "rows": [(9, 48)] * 3,
        "slots": [(9, 160), (9, 40000)],
        "holes": [(9, 4096)],
    }[case]
    src = [random_bytes(*shape).cpu() for shape in shapes]
    dst = [poisoned(*shape).cpu() for shape in shapes]
    src_ids = ids([2, -1, 7, 3] if case == "holes" else [2, 5, 7, 2]).cpu()
    dst_ids = ids([0, 1, 2, -1] if case == "holes" else [0, 1, 2, 8]).cpu()
    expected = naive_copy(src, dst, src_ids, dst_ids)
    copy.naive_copy_items(copy_table(src, dst), src_ids, dst_ids)
    assert all(torch.equal(a, b) for a, b in zip(dst, expected, strict=True))


@pytest.mark.parametrize("item_bytes", [48, 4096, 40000])
def test_a_checksum_equals_its_reference(item_bytes, random_bytes, poisoned, ids):
    src = [random_bytes(7, item_bytes), random_bytes(7, 96)]
    dst = [poisoned(7, item_bytes), poisoned(7, 96)]
    src_ids, dst_ids = ids([3, -1, 5, 3]), ids([1, 2, 0, 4])
    expected = naive_copy(src, dst, src_ids, dst_ids)
    got = copy.copy_items_with_checksum(copy_table(src, dst), src_ids, dst_ids)
    in_host = copy_table([b.cpu() for b in src], [b.clone() for b in expected])
    wanted = copy.naive_copy_items_with_checksum(in_host, src_ids.cpu(), dst_ids.cpu())
    assert torch.equal(got.cpu(), wanted)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(dst, expected, strict=True))


def test_a_checksum_does_not_depend_on_layout_or_grid(random_bytes, poisoned, ids):
    pages, host = random_bytes(2, 2, 5, 16, 2, 32), poisoned(5, 2, 2, 16, 2, 32, host=True)
    there = copy_table(layer_first_buffers(pages), page_first_buffers(host))
    in_one = copy_table([host.flatten(1)], [poisoned(5, 2, 2, 16, 2, 32).flatten(1)])
    first = copy.copy_items_with_checksum(there, ids([4, 1]), ids([0, 3]), num_programs=1)
    second = copy.copy_items_with_checksum(in_one, ids([0, 3]), ids([2, 1]), num_programs=7)
    assert torch.equal(first, second)


@pytest.mark.parametrize("change", ["bit", "order"])
def test_a_checksum_sees_a_changed_bit_and_a_changed_order(change, random_bytes, poisoned, ids):
    src, dst = random_bytes(3, 4096), poisoned(3, 4096)
    table = copy_table([src], [dst])
    before = copy.copy_items_with_checksum(table, ids([1]), ids([2]))
    if change == "bit":
        src[1, 77] ^= 4
    else:
        src[1, :16] = src[1, :16].roll(8)
    after = copy.copy_items_with_checksum(table, ids([1]), ids([2]))
    assert not torch.equal(before, after)


def test_the_comparison_fails_when_a_byte_is_wrong(random_bytes, poisoned, ids, monkeypatch):
    src, dst = random_bytes(4, 256), poisoned(4, 256)

    def wrong_copy(table, src_ids, dst_ids):
        copy.naive_copy_items(table, src_ids, dst_ids)
        dst[0, 0] ^= 1

    monkeypatch.setattr(copy, "copy_items", wrong_copy)
    with pytest.raises(AssertionError):
        assert_copies([src], [dst], ids([1]), ids([2]))


class OnDevice:
    """Stands for a kernel, and accepts launches on the device of their first tensor only."""

    def __init__(self, monkeypatch):
        self.current, self.num_launches = [], 0
        monkeypatch.setattr(torch.cuda, "device_of", self.device_of)

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


def test_kernels_are_launched_on_the_device_of_their_tensors(random_bytes, ids, monkeypatch):
    kernel = OnDevice(monkeypatch)
    pool = random_bytes(4, 64)
    monkeypatch.setattr(copy, "_copy_kernel", kernel)
    copy.copy_items(copy_table([pool], [pool]), ids([0]), ids([1]))
    monkeypatch.setattr(index, "_page_table_kernel", kernel)
    index.page_table(ids([3]), ids([0, 1]).view(1, 2), ids([0, 1]), num_columns=1)
    assert kernel.num_launches == 2


def test_few_programs_cross_a_link_and_many_stay_within(monkeypatch):
    monkeypatch.setattr(copy, "num_sms", lambda device: 132)
    pool = torch.zeros(2, 64)
    within = copy_table([pool], [pool.clone()])
    across = replace(within, dst=tuple(each.to("meta") for each in within.dst))
    assert [copy.programs_of(within, tiles, None) for tiles in (0, 1, 300)] == [1, 1, 264]
    assert [copy.programs_of(across, tiles, None) for tiles in (1, 3, 300)] == [1, 3, 4]
    assert [copy.programs_of(across, 300, wanted) for wanted in (1, 9, 400)] == [1, 9, 300]


def test_programs_run_one_at_a_time_without_a_gpu():
    assert copy.num_sms(torch.device("cpu")) == 1


def test_beside_a_gpu_there_are_as_many_programs_as_multiprocessors(monkeypatch):
    counts = {torch.device("cuda", 0): 132, torch.device("cuda", 1): 78}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=counts[device]),
    )
    copy.num_sms.cache_clear()
    assert [copy.num_sms(device) for device in counts] == [132, 78]
    copy.num_sms.cache_clear()


def test_a_transfer_of_too_many_lines_is_refused():
    pool = torch.zeros(2, 64)  # an item is one line of 32 words
    table = copy_table([pool], [pool.clone()])
    lines_of_a_tile = TILE_WORDS // 32
    wanted = (1 << 30) - 1, (1 << 30) // lines_of_a_tile
    assert copy.lines_and_tiles_of(table, (1 << 30) - 1) == wanted
    with pytest.raises(ValueError, match="a transfer of 1073741824 lines is too long"):
        copy.lines_and_tiles_of(table, 1 << 30)


@pytest.mark.parametrize(
    ("item_bytes", "lines", "steps", "width"),
    [(16, 4096, 1, 2), (256, 256, 2, 16), (2048, 32, 8, 32), (65536, 1, 8, 1024)],
)
def test_a_thread_reads_lines_in_steps_of_at_least_128_bytes(item_bytes, lines, steps, width):
    pool = torch.zeros(2, item_bytes, dtype=torch.uint8)
    shape = copy.tile_shape(copy_table([pool], [pool.clone()]))
    assert shape == {"TOGETHER": 1, "LINES": lines, "STEPS": steps, "WIDTH": width}


@pytest.mark.parametrize("item_bytes", [16, 256, 2048, 4096, 65536, 3 * 65536])
def test_one_item_of_many_buffers_fills_its_tiles(item_bytes):
    pools = torch.zeros(2, 64, 2, item_bytes, dtype=torch.uint8)
    table = copy_table(pools[0].unbind(0), pools[1].unbind(0))
    _, num_tiles = copy.lines_and_tiles_of(table, 1)
    assert num_tiles == -(-64 * item_bytes // (TILE_WORDS * WORD_BYTES))
