"""The public calls: dispatch, refusals in one sentence, operators of torch."""

import ast
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hicache.kernels as kernels
from hicache.kernels import copy, copy_table, index, ops, reference


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
    rows = names["device_pool"].flatten(2, 3)
    assert torch.equal(names["rows"].flatten(2, 3)[:, :, :3], rows[:, :, [7, 3, 12]])
    assert torch.equal(names["ssm"][:3], names["ssm"][[7, 3, 12]])
    assert torch.equal(names["ssm"][13], names["ssm"][7])


def test_a_list_of_ids_is_refused_in_one_sentence(table):
    with pytest.raises(TypeError, match="source ids must be a tensor of int32, got list"):
        kernels.copy_pages(table, [1], [0])


@pytest.mark.parametrize("call", [kernels.copy_pages, kernels.copy_pages_with_checksum])
def test_each_copy_serves_cpu_pools(call, pools, table):
    src, dst = pools
    call(table, i32(3, -1, 5), i32(0, 1, 4))
    expected = torch.zeros_like(src)
    expected[[0, 4]] = src[[3, 5]]
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
        kernels.copy_pages(table, i32(1, 3), i32(3, 4))


def test_a_refused_copy_has_moved_nothing(pools, table):
    with pytest.raises(ValueError, match="below 6"):
        kernels.copy_pages(table, i32(1, 9), i32(0, 1))
    assert not pools[1].any()


def test_a_warm_up_on_a_cpu_compiles_nothing(table):
    kernels.warm_up(table, page_size=16)


def test_a_warm_up_launches_each_kernel_once_over_nothing(table, monkeypatch):
    launched = []

    def watched(module, name):
        run = getattr(module, name)

        def launch(*arguments, **options):
            launched.append((name, [len(each) for each in arguments if torch.is_tensor(each)]))
            return run(*arguments, **options)

        monkeypatch.setattr(module, name, launch)

    watched(copy, "copy_items")
    watched(copy, "copy_items_with_checksum")
    watched(index, "page_table")
    watched(index, "window_table")
    ops._launch_over_nothing([table], page_size=16)
    assert launched == [
        ("copy_items", [0, 0]),
        ("copy_items_with_checksum", [0, 0]),
        ("copy_items", [0, 0]),  # by which the checksum's kernel is launched
        ("page_table", [2, 1, 2]),
        ("window_table", [1, 1, 2]),
    ]


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (copy, "copy_items"),
        (copy, "copy_items_with_checksum"),
        (index, "page_table"),
        (index, "window_table"),
    ],
)
def test_a_reference_has_the_arguments_and_defaults_of_its_kernel(kernel, name):
    wanted = inspect.signature(getattr(kernel, name)).parameters
    for each in inspect.signature(getattr(reference, name)).parameters.values():
        assert (each.kind, each.default) == (wanted[each.name].kind, wanted[each.name].default)


def page_tables(page_ids, spans, request_spans, num_columns=4):
    return kernels.page_table(page_ids, spans, request_spans, num_columns=num_columns)


def windows(pages, seq_lens, full_to_swa):
    return kernels.window_table(pages, seq_lens, full_to_swa, page_size=4, window_len=8)


@pytest.mark.parametrize(
    ("call", "arguments", "sentence"),
    [
        (page_tables, (i32(1, 2, 3), i32(2, 2).view(1, 2), i32(0, 1)), "ends of spans .* below 4"),
        (page_tables, (i32(1, 2, 3), i32(-1, 2).view(1, 2), i32(0, 1)), "spans must be at least 0"),
        (page_tables, (i32(1, 2, 3), i32(1, -2).view(1, 2), i32(0, 1)), "spans must be at least 0"),
        (
            page_tables,
            (i32(1, 2), i32(0, 2).view(1, 2), i32(0, 2)),
            "request spans must be below 2",
        ),
        (page_tables, (i32(1, 2), i32(0, 2).view(1, 2), i32(1, 0)), "must not fall"),
        (page_tables, (i32(1, 2), i32(0, 2).view(1, 2), i32()), "bounds of requests wanted"),
        (page_tables, (i32(1, 2), i32(0, 2).view(1, 2), i32(0, 1), -1), "got -1 columns"),
        (windows, (i32(1, 2).view(2, 1), i32(4), i32(0, 1, 2)), "1 sequence lengths .* 2 rows"),
        (windows, (i32(1, 3).view(2, 1), i32(4, 4), i32(0, 1, 2)), "page table must be below 3"),
        (
            windows,
            (i32(1, 2).view(2, 1), i32(4, 5), i32(0, 1, 2)),
            "lengths must be below 5, got 5",
        ),
        (windows, (i32(1, 2).view(2, 1), i32(4, -1), i32(0, 1, 2)), "lengths must be at least 0"),
    ],
)
def test_index_operations_refuse_what_would_be_read_past_its_end(call, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(*arguments)


@pytest.mark.parametrize(("page_size", "window_len"), [(0, 8), (4, 0)])
def test_sizes_of_nothing_are_refused(page_size, window_len):
    with pytest.raises(ValueError, match=f"got page {page_size}, window {window_len}"):
        kernels.window_table(
            i32(0).view(1, 1), i32(1), i32(0), page_size=page_size, window_len=window_len
        )


def test_tables_of_the_least_size_are_made():
    empty = page_tables(i32(1), i32(0, 1).view(1, 2), i32(0, 1), 0)
    assert empty.shape == (1, 0)
    assert page_tables(i32(1), i32(0, 1).view(1, 2), i32(0, 1), 2).tolist() == [[1, 0]]
    window = kernels.window_table(i32(0).view(1, 1), i32(1), i32(7), page_size=1, window_len=1)
    assert window.tolist() == [[7]]


@pytest.mark.parametrize(
    ("spans", "sentence"),
    [
        (i32(0, 1), "spans must be \\[S, 2\\] and contiguous, got shape \\(2,\\)"),
        (i32(0, 1, 2).view(1, 3), "spans must be"),
        (i32(0, 1, 0, 1).view(2, 2).T, "spans must be|one contiguous axis"),
        (torch.zeros(1, 2), "spans must be int32"),
    ],
)
def test_spans_of_another_form_are_refused(spans, sentence):
    with pytest.raises(ValueError, match=sentence):
        page_tables(i32(1, 2), spans, i32(0, 1))


def test_ids_are_sent_for_each_pair_in_its_place(table):
    pairs = (table, i32(3, 5), i32(0, 4)), (table, i32(1), i32(2))
    sent = kernels.send_ids(*pairs)
    assert [[ids.tolist() for ids in pair] for pair in sent] == [[[3, 5], [0, 4]], [[1], [2]]]
    assert kernels.send_ids() == []
    with pytest.raises(ValueError, match="target id 2 is written more than once"):
        kernels.send_ids(pairs[0], (table, i32(1, 0), i32(2, 2)))


@pytest.mark.parametrize("num_programs", [0, -4])
def test_no_programs_are_refused(num_programs, table):
    with pytest.raises(ValueError, match="at least one program wanted"):
        kernels.copy.programs_of(table, 10, num_programs)


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


class Plane:
    """Remembers what each call is handed."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *given, **more: self.calls.append((name, given, more)) or name


def test_what_is_asked_is_handed_to_the_plane(table, monkeypatch):
    plane = Plane()
    monkeypatch.setattr(ops, "reference", plane)
    kernels.copy_pages(table, i32(2, 1), i32(0, 2), num_programs=3)
    assert kernels.copy_pages_with_checksum(table, i32(2), i32(0), num_programs=5) == (
        "copy_items_with_checksum"
    )
    (name, given, more), (name_of_sum, its_given, its_more) = plane.calls
    assert (name, name_of_sum) == ("copy_items", "copy_items_with_checksum")
    assert given[0] is its_given[0] is table
    assert [ids.tolist() for ids in given[1:]] == [[2, 1], [0, 2]]
    assert more == {"num_programs": 3}
    assert [ids.tolist() for ids in its_given[1:]] == [[2], [0]]
    assert its_more == {"num_programs": 5}


def test_trusted_ids_are_not_looked_at(table, monkeypatch):
    plane = Plane()
    monkeypatch.setattr(ops, "reference", plane)
    ids = i32(77), i32(77, 77)
    kernels.copy_pages(table, *ids, trusted=True)
    kernels.copy_pages_with_checksum(table, *ids, trusted=True)
    assert [given[1:] for _, given, _ in plane.calls] == [ids, ids]


def test_index_operations_hand_on_sizes_and_hole(monkeypatch):
    plane = Plane()
    monkeypatch.setattr(ops, "reference", plane)
    pages, spans, bounds = i32(1, 2), i32(0, 2).view(1, 2), i32(0, 1)
    kernels.page_table(pages, spans, bounds, num_columns=3, hole=9)
    table = i32(1, 1).view(1, 2)
    kernels.window_table(table, i32(8), i32(0, 7), page_size=4, window_len=6, hole=8)
    assert [each[2] for each in plane.calls] == [
        {"num_columns": 3, "hole": 9},
        {"page_size": 4, "window_len": 6, "hole": 8},
    ]
    assert plane.calls[0][1] == (pages, spans, bounds)


def test_only_tables_beside_a_gpu_are_warmed_up(table, monkeypatch):
    warmed = []
    monkeypatch.setattr(
        ops, "_launch_over_nothing", lambda tables, *, page_size: warmed.append((tables, page_size))
    )
    there = SimpleNamespace(device=torch.device("cuda", 0))
    kernels.warm_up(table, there, table, page_size=16)
    kernels.warm_up(table, page_size=8)
    assert warmed == [([there], 16), ([], 8)]


def test_parts_are_sent_in_one_piece_and_come_back_in_their_lengths(monkeypatch):
    parts = [i32(1, 2), i32(), i32(3)]
    assert [a is b for a, b in zip(ops.send(parts, torch.device("cpu")), parts, strict=True)] == [
        True
    ] * 3
    sent = []
    empty = torch.empty

    def pinned(size, *, dtype, pin_memory):
        sent.append((size, dtype, pin_memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    # to another device than the host, of which tensors keep no values
    found = ops.send(parts, torch.device("meta"))
    assert sent == [(3, torch.int32, True)]
    assert [len(each) for each in found] == [2, 0, 1]
    assert {each.device.type for each in found} == {"meta"}
    assert ops.send([], torch.device("meta")) == []


def test_no_ids_are_allowed(pools, table):
    kernels.copy_pages(table, i32(), i32())
    assert kernels.copy_pages_with_checksum(table, i32(), i32()).tolist() == []
    assert not pools[1].any()
