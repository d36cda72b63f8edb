"""The public calls of `hicache.kernels`, and the errors that refuse wrong arguments."""

import ast
import sys
from pathlib import Path

import pytest
import torch

import hicache.kernels as kernels
from hicache.kernels import copy, copy_table, index, ops


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
def test_wrong_ids_are_refused(src_ids, dst_ids, sentence, table):
    with pytest.raises(ValueError, match=sentence):
        kernels.send_ids((table, src_ids, dst_ids))


def test_ids_of_each_transfer_are_checked_and_sent_in_order(pools, table):
    pairs = (table, i32(3, 5), i32(0, 4)), (table, i32(1), i32(2))
    sent = kernels.send_ids(*pairs)
    assert [[ids.tolist() for ids in pair] for pair in sent] == [[[3, 5], [0, 4]], [[1], [2]]]
    assert kernels.send_ids() == []
    with pytest.raises(ValueError, match="target id 2 is written more than once"):
        kernels.send_ids(pairs[0], (table, i32(1, 0), i32(2, 2)))
    within = copy_table([pools[0]], [pools[0]])
    with pytest.raises(ValueError, match="id 3 is both a source and a target in one pool"):
        kernels.send_ids((within, i32(1, 3), i32(3, 4)))


def test_a_warm_up_launches_each_kernel_without_moving_data(table, monkeypatch):
    launched = []

    def watched(module, name):
        run = getattr(module, name)

        def launch(*arguments, **options):
            launched.append((name, [len(each) for each in arguments if torch.is_tensor(each)]))
            return run(*arguments, **options)

        monkeypatch.setattr(module, name, launch)

    watched(copy, "copy_items")
    watched(index, "page_table")
    kernels.warm_up(table)
    # with and without checksums
    assert launched == [("copy_items", [0, 0])] * 2 + [("page_table", [2, 1, 2])]


def test_the_package_needs_only_torch_triton_and_einops():
    allowed = {"torch", "triton", "einops", "hicache"} | sys.stdlib_module_names
    for path in Path(ops.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:  # what importing it imports
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                assert not name.startswith("hicache.") or name.startswith("hicache.kernels")


def test_several_tensors_of_ids_are_sent_in_one_copy_with_their_lengths(monkeypatch):
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


def test_a_copy_of_no_ids_is_allowed_and_copies_nothing(pools, table):
    kernels.copy_items(table, i32(), i32())
    assert kernels.copy_items_with_checksum(table, i32(), i32()).tolist() == []
    assert not pools[1].any()
