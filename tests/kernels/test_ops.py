"""The public calls: dispatch, refusals in one sentence, operators of torch."""

import ast
import ctypes
import sys
from pathlib import Path

import pytest
import torch

import hicache.kernels as kernels
from hicache.kernels import copy_engine, copy_table, library, reference


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def pools():
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, 256, (6, 4096), generator=generator, dtype=torch.uint8)
    return src, torch.zeros_like(src)


@pytest.fixture
def table(pools):
    return copy_table(*([pool] for pool in pools))


def test_the_example_of_the_readme_runs():
    page = Path(kernels.__file__).parent / "README.md"
    code = page.read_text().partition("```python\n")[2].partition("```")[0]
    names = {}
    exec(code, names)
    pages = names["device_pool"][:, :, [7, 3, 12]].transpose(1, 2).transpose(0, 1)
    assert torch.equal(names["host_pool"][:3], pages.cpu())


def test_a_list_of_ids_is_refused_in_one_sentence(table):
    with pytest.raises(TypeError, match="source ids must be a tensor of int32, got list"):
        kernels.copy_pages(table, [1], [0])


@pytest.mark.parametrize(
    "call", [kernels.copy_pages, kernels.copy_rows, kernels.copy_slots, kernels.copy_window]
)
def test_each_copy_serves_cpu_pools(call, pools, table):
    src, dst = pools
    call(table, i32(3, -1, 5), i32(0, 1, 4))
    expected = torch.zeros_like(src)
    expected[[0, 4]] = src[[3, 5]]
    assert torch.equal(dst, expected)


def test_a_window_copy_is_translated(pools, table):
    src, dst = pools
    kernels.copy_window(table, i32(2, 0), i32(1, 5), src_map=i32(-1, 0, 4))
    expected = torch.zeros_like(src)
    expected[1] = src[4]
    assert torch.equal(dst, expected)


def test_copied_pages_have_the_checksum_of_the_way_back(pools, table):
    there = kernels.copy_pages_with_checksum(table, i32(3, 5), i32(0, 4))
    back = kernels.copy_pages_with_checksum(table.reversed(), i32(4, 0), i32(1, 2))
    assert torch.equal(there, back.flip(0))


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "sentence"),
    [
        (torch.tensor([1.0]), i32(0), "source ids must be int32, got torch.float32"),
        (torch.tensor([1]), i32(0), "source ids must be int32, got torch.int64"),
        (i32(1), torch.tensor([0], dtype=torch.int16), "target ids must be int32"),
        (i32(1, 2), i32(0), "2 source ids do not match 1 target ids"),
        (torch.zeros(1, 1, dtype=torch.int32), i32(0), "one contiguous axis"),
        (torch.zeros(4, dtype=torch.int32)[::2], i32(0, 1), "one contiguous axis"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), i32(0), "must be on cpu, got meta"),
        (i32(6), i32(0), "source ids must be below 6, got 6"),
        (i32(0), i32(6), "target ids must be below 6, got 6"),
        (i32(0, 1), i32(3, 3), "target id 3 is written more than once"),
    ],
    ids=str,
)
def test_ids_that_lie_are_refused(src_ids, dst_ids, sentence, table):
    with pytest.raises(ValueError, match=sentence):
        kernels.copy_pages(table, src_ids, dst_ids)


def test_overlapping_source_and_target_slots_are_refused(pools):
    table = copy_table([pools[0]], [pools[0]])
    with pytest.raises(ValueError, match="id 3 is both a source and a target in one pool"):
        kernels.copy_slots(table, i32(1, 3), i32(3, 4))


def test_a_refused_copy_has_moved_nothing(pools, table):
    with pytest.raises(ValueError, match="below 6"):
        kernels.copy_pages(table, i32(1, 9), i32(0, 1))
    assert not pools[1].any()


def test_an_id_outside_of_the_map_is_refused(table):
    with pytest.raises(ValueError, match="source ids must be below 3, got 3"):
        kernels.copy_window(table, i32(3), i32(0), src_map=i32(0, 1, 2))


def test_a_map_that_leaves_the_pool_is_refused(table):
    with pytest.raises(ValueError, match="source ids must be below 6, got 77"):
        kernels.copy_window(table, i32(1), i32(0), src_map=i32(0, 77))


def test_a_map_of_the_wrong_dtype_is_refused(table):
    with pytest.raises(ValueError, match="source map must be int32"):
        kernels.copy_window(table, i32(1), i32(0), src_map=torch.tensor([0, 1]))


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
        ([buffer(4, 32)[:, ::2]], [buffer(4, 16)], "contiguous items wanted"),
        ([buffer(16, 4).T], [buffer(4, 16)], "contiguous items wanted"),
        ([torch.tensor(1)], [buffer(4, 16)], "at least one axis wanted"),
        ([buffer(1, 16).expand(4, 16)], [buffer(4, 16)], "items of 16 bytes lie 0 bytes apart"),
        ([buffer(4, 16)], [buffer(4, 16).to("meta")], "must be pinned|address"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_buffers_that_break_a_promise_are_refused(src, dst, sentence):
    with pytest.raises(ValueError, match=sentence):
        copy_table(src, dst)


def test_items_that_overlap_with_a_shift_are_refused():
    slab = buffer(640)
    with pytest.raises(ValueError, match="source and target items overlap, 16 bytes apart"):
        copy_table([slab[:512].view(8, 64)], [slab[16:528].view(8, 64)])


def test_interleaved_buffers_of_one_slab_are_accepted():
    slab = torch.arange(8 * 64, dtype=torch.int64).view(8, 2, 32)
    expected = slab.clone()
    expected[5, 1] = slab[2, 0]
    kernels.copy_pages(copy_table([slab[:, 0]], [slab[:, 1]]), i32(2), i32(5))
    assert torch.equal(slab, expected)


@pytest.mark.parametrize("num_programs", [0, -4])
def test_no_programs_are_refused(num_programs, table):
    with pytest.raises(ValueError, match="at least one program wanted"):
        kernels.copy.programs_of(table, 10, num_programs)


def test_a_part_outside_of_the_table_is_refused(table):
    with pytest.raises(ValueError, match=r"buffers \[0, 2\) wanted, the table has 1"):
        table.part(0, 2)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([4096], 4096),
        ([16384], 4096),
        ([2304], 512),  # 16 tokens of 1152 bytes: one piece of 4096 words would waste 44 %
        ([256], 256),
        ([2], 2),
        ([48, 40000], 4096),  # what is small beside the rest may waste
        ([82], 32),  # 656 bytes: narrower pieces would waste less, and break up bursts
    ],
)
def test_pieces_are_as_wide_as_wastes_little(words, wanted):
    buffers = [buffer(2, 8 * count) for count in words]
    assert copy_table(buffers, [b.clone() for b in buffers]).piece_words == wanted


def test_pieces_cover_each_item_once():
    src = [buffer(3, 100_000), buffer(3, 160)]
    table = copy_table(src, [b.clone() for b in src])
    places = []
    for _, _, _, _, words, first in table.pieces.tolist():
        places += range(first, first + words)
    assert places == list(range(table.item_bytes // 8))


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_runs_merge_neighbours_where_both_sides_are_contiguous(layout, pools):
    src, dst = pools
    if layout == "strided":
        src, dst = src[:, :1024], dst[:, :1024]
    table = copy_table([src], [dst])
    src_ids, dst_ids = i32(1, 2, 3, -1, 5, 0), i32(0, 1, 2, 5, 3, 4)
    runs = copy_engine.contiguous_runs(table, src_ids, dst_ids)
    assert len(runs.num_bytes) == (3 if layout == "contiguous" else 5)
    assert int(runs.num_bytes.sum()) == 5 * table.item_bytes
    expected = dst.clone()
    expected[[0, 1, 2, 3, 4]] = src[[1, 2, 3, 5, 0]]
    for from_address, to_address, size in zip(*map(torch.Tensor.tolist, runs), strict=True):
        ctypes.memmove(to_address, from_address, size)
    assert torch.equal(dst, expected)


def test_no_ids_make_no_runs(table):
    runs = copy_engine.contiguous_runs(table, i32(), i32())
    assert [len(column) for column in runs] == [0, 0, 0]


def operators(table):
    fields = (table.pieces, list(table.src), list(table.dst), i32(3, 5), i32(0, 4))
    return {
        "copy_items": (*fields, None, None, table.piece_words, None),
        "copy_items_with_checksum": (*fields, table.piece_words, None),
        "page_table": (i32(4, 5, 6), i32(0, 2, 1, 2).view(2, 2), i32(0, 1, 2), 4, 0),
        "window_table": (i32(1, 2, 3, 4).view(1, 4), i32(50), i32(0, 3, 2, 1, 4), 16, 32, 0),
        "translate_pages": (i32(1, -1), i32(0, 9), 0),
    }


@pytest.mark.parametrize("name", list(operators(copy_table([buffer(1, 16)], [buffer(1, 16)]))))
def test_each_operator_keeps_the_contract_of_torch(name, table):
    torch.library.opcheck(
        getattr(library, name),
        operators(table)[name],
        test_utils=("test_schema", "test_faketensor"),
    )


def test_an_operator_copies_what_the_call_copies(pools, table):
    src, dst = pools
    torch.ops.hicache.copy_items(*operators(table)["copy_items"])
    expected = torch.zeros_like(src)
    expected[[0, 4]] = src[[3, 5]]
    assert torch.equal(dst, expected)


def test_the_package_needs_only_torch_triton_and_einops():
    allowed = {"torch", "triton", "einops", "hicache"} | sys.stdlib_module_names
    for path in Path(reference.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:  # what importing it imports
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                assert not name.startswith("hicache.") or name.startswith("hicache.kernels")
