"""Copy tables: the buffers they accept or refuse, and the pieces that items are cut into."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import hicache.kernels as kernels
from hicache.kernels import copy_table
from hicache.kernels.overlap import Progressions, first_overlap


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def buffer(*shape, dtype=torch.uint8):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("src", "dst", "sentence"),
    [
        ([], [], "as many source as target buffers"),
        ([buffer(4, 16)], [buffer(4, 16)] * 2, "got 1 and 2"),
        ([buffer(4, 32)], [buffer(4, 16)], "a source item has 32 bytes, a target item 16"),
        ([buffer(80)[8:].view(4, 18)[:, :16]], [buffer(4, 16)], "address must be a multiple of 16"),
        ([buffer(4, 24)[:, :16]], [buffer(4, 16)], "stride between items must be a multiple of 16"),
        ([buffer(4, 24)], [buffer(4, 24)], "stride between items must be a multiple of 16"),
        ([buffer(4, 32)[:, :8]], [buffer(4, 8)], "item size must be a multiple of 16 bytes: 8"),
        ([buffer(4, 32)[:, ::2]], [buffer(4, 16)], "contiguous rows of 16·n bytes wanted, got 1"),
        ([buffer(4, 96).view(4, 4, 24)[..., :16]], [buffer(4, 64)], "rows 16·n bytes apart wanted"),
        ([buffer(4, 3, 32)[..., :16]], [buffer(4, 2, 48)[..., :24]], "items of one shape wanted"),
        ([torch.tensor(1)], [buffer(4, 16)], "at least one item of at least a byte wanted"),
        ([buffer(0, 16)], [buffer(4, 16)], "at least one item of at least a byte wanted"),
        ([buffer(1, 16).expand(4, 16)], [buffer(4, 16)], "parts of 1 bytes lie 0 bytes apart"),
        ([buffer(4, 1, 16).expand(4, 2, 16)], [buffer(4, 32)], "lie 0 bytes apart"),
        ([buffer(4, 16)], [buffer(4, 16).to("meta")], "must be pinned|address"),
        ([buffer(64).as_strided([2, 2, 16], [32, 8, 1])], [buffer(2, 32)], "lie 8 bytes apart"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_buffers_that_the_kernels_do_not_support_are_refused(src, dst, sentence):
    with pytest.raises(ValueError, match=sentence):
        copy_table(src, dst)


def test_storage_that_is_not_aligned_to_words_is_refused():
    # a view that is aligned to 16 bytes all the same
    memory = bytearray(4096)
    start = next(
        at
        for at in range(16)
        if torch.frombuffer(memory, dtype=torch.uint8)[at:].data_ptr() % 8 == 4
    )
    whole = torch.frombuffer(memory, dtype=torch.uint8, offset=start)
    aligned = whole[-whole.data_ptr() % 16 :][: 4 * 64].view(4, 64)
    assert aligned.data_ptr() % 16 == 0
    with pytest.raises(ValueError, match="address of its storage must be a multiple of 8 bytes"):
        copy_table([aligned], [buffer(4, 64)])


def pools():
    """Two dicts of source and target buffers: written bytes overlap in the first only."""
    slab, (one, other), flat = buffer(8, 2, 64), buffer(2, 8, 64), buffer(640)
    heads, by_head, a = buffer(4, 6, 32), buffer(6, 4, 32), buffer(8, 64)
    three = [buffer(4, 3, 32), buffer(4, 3, 32)]
    shifted = [flat[start : start + 512].view(8, 64) for start in (0, 16)]
    overlapping = {
        "shifted by less than an item": (shifted[:1], shifted[1:]),
        "a swap": ([one, other], [other, one]),
        "a target twice": ([one, other], [slab[:, 0], slab[:, 0]]),
        "a target and a part of it": ([a, one[:, :32]], [slab[:, 0], slab[:, 0, :32]]),
        "one row in common": ([buffer(4, 4, 32), three[0]], [heads[:, :4], heads[:, 3:]]),
        "another buffer's source": ([slab[:, 0], slab[:, 1]], [a, slab[:, 0]]),
        "strides that differ": ([buffer(2, 64), a], [slab[::4, 0], slab[:, 0]]),
        "in its own storage": ([flat[:256].view(4, 64)], [flat[128:384].view(4, 64)]),
    }
    apart = {
        "neighbors": ([one], [other]),
        "interleaved": ([slab[:, 0]], [slab[:, 1]]),
        "itself": ([one, other], [one, other]),
        "a source twice": ([one, one], [slab[:, 0], slab[:, 1]]),
        "slices of the heads": (three, [heads[:, :3], heads[:, 3:]]),
        "items within the heads": (three, [by_head[k : k + 3].transpose(0, 1) for k in (0, 3)]),
        "other items of one buffer": ([one[:4]], [one[4:]]),
    }
    return overlapping, apart


OVERLAPPING, APART = pools()


@pytest.mark.parametrize("case", OVERLAPPING.values(), ids=OVERLAPPING)
def test_targets_that_share_a_byte_with_another_buffer_are_refused(case):
    sentence = r"target buffer . and .* overlap|and target buffer . overlap"
    with pytest.raises(ValueError, match=sentence):
        copy_table(*case)


@pytest.mark.parametrize("case", APART.values(), ids=APART)
def test_targets_that_share_no_byte_with_another_buffer_are_accepted(case):
    copy_table(*case)


def test_rows_that_source_and_target_share_are_copied_in_place():
    kib = 1 << 10
    memory = torch.arange(64 * kib, dtype=torch.int64).view(torch.uint8)
    # buffers that begin at different addresses, and whose second rows are the same memory
    src = memory.as_strided([4, 2, kib], [16 * kib, 6 * kib, 1], 0)
    dst = memory.as_strided([4, 2, kib], [16 * kib, 4 * kib, 1], 2 * kib)
    table = copy_table([src], [dst])
    before = memory.clone()
    with pytest.raises(ValueError, match="id 1 is both a source and a target in one pool"):
        kernels.send_ids((table, i32(0, 1), i32(1, 2)))
    kernels.naive_copy_items(table, i32(0, 1), i32(2, 3))
    assert torch.equal(dst[2:], before.as_strided([2, 2, kib], [16 * kib, 6 * kib, 1], 0))


def test_a_table_counts_the_items_of_its_source_and_its_target():
    src, dst = [buffer(6, 64), buffer(4, 32)], [buffer(5, 64), buffer(9, 32)]
    table = copy_table(src, dst)
    assert (table.num_src_items, table.num_dst_items, table.item_bytes) == (4, 5, 96)
    assert not table.crosses_link
    back = copy_table(dst, src)
    assert (back.num_src_items, back.num_dst_items) == (5, 4)


def test_the_stride_of_an_axis_of_length_one_is_ignored():
    wide = buffer(2, 24)
    copy_table([wide[:1, :16]], [buffer(1, 16)])
    one = buffer(4, 16).as_strided([4, 1, 16], [16, 0, 1])
    assert copy_table([one], [buffer(4, 16)]).item_bytes == 16


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([8192], 8192),
        ([4096], 4096),
        ([16384], 8192),
        ([2304], 512),  # 16 tokens of 1152 bytes: one piece of 4096 words would waste 44 %
        ([256], 256),
        ([2], 2),
        ([48, 80000], 8192),  # what is small beside the rest may waste
        ([82], 32),  # 656 bytes: narrower pieces would waste less, and break up bursts
    ],
)
def test_pieces_are_the_widest_that_waste_few_lanes(words, wanted):
    buffers = [buffer(2, 8 * count) for count in words]
    assert copy_table(buffers, [b.clone() for b in buffers]).piece_words == wanted


def test_a_slice_of_the_heads_is_cut_at_its_rows():
    pages, rank = buffer(3, 16, 8, 64), buffer(3, 16, 2, 64)
    table = copy_table([pages[:, :, 2:4]], [rank])
    assert table.piece_words == 16
    assert table.pieces_together == len(table.pieces) == 16
    assert table.src[0].shape == table.dst[0].shape == (3, 16, 16)
    first, second = table.pieces[:2].tolist()
    assert first[0] == pages.data_ptr() + 2 * 64
    assert [b - a for a, b in zip(first, second, strict=True)] == [8 * 64, 2 * 64, 0, 0, 0, 16]


def test_a_table_of_addresses_is_cached_until_its_buffers_are_freed():
    pools = [buffer(4, 64), buffer(4, 64)]
    pieces = copy_table([pools[0]], [pools[1]]).pieces
    others = [buffer(4, 64) for _ in range(100)]
    for other in others:
        copy_table([other], [pools[1]])
    assert copy_table([pools[0]], [pools[1]]).pieces is pieces
    addresses = weakref.ref(pieces)
    del pieces, pools[0]
    gc.collect()
    assert addresses() is None


def at(name, **more):
    return SimpleNamespace(device=torch.device(name), **more)


PINNED, LOOSE = (at("cpu", is_pinned=lambda is_it=is_it: is_it) for is_it in (True, False))
FIRST, SECOND = at("cuda:0"), at("cuda:1")


@pytest.mark.parametrize(
    ("src", "dst", "sentence"),
    [
        ([FIRST, PINNED], [SECOND, FIRST], "wanted, got buffers on cpu, cuda:0, cuda:1"),
        ([PINNED, LOOSE], [FIRST, FIRST], "^source buffer 1: host memory that a device copies"),
        ([FIRST, FIRST], [PINNED, LOOSE], "^target buffer 1: host memory that a device copies"),
    ],
)
def test_buffers_of_two_devices_and_memory_that_is_not_pinned_are_refused(src, dst, sentence):
    with pytest.raises(ValueError, match=sentence):
        copy_table(src, dst)


@pytest.mark.parametrize(
    ("other", "overlaps"),
    [
        ((16, 128, 2, 16, 1), True),  # steps differently through one stretch
        ((16, 128, 2, 16, 0), False),  # no target
        ((16, 64, 2, 16, 1), False),
        ((208, 128, 2, 16, 1), False),  # another stretch
        ((207, 128, 2, 16, 1), True),
        *(((16, stride, 1, 48, 1), False) for stride in (16, 64, 1000)),  # of a single interval
        *(((16, stride, 1, 49, 1), True) for stride in (16, 64, 1000)),
        ((500, 16, 1, 48, 1), False),
    ],
)
def test_strided_intervals_overlap_only_if_they_share_a_byte(other, overlaps):
    steps_64 = (0, 64, 4, 16, 0)  # [0, 16), [64, 80), [128, 144), [192, 208)
    found = first_overlap(Progressions(*torch.tensor([steps_64, other]).T))
    assert (found and set(found)) == ({0, 1} if overlaps else None)
