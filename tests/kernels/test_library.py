"""The operators of torch: their contract, and what they copy in compiled and exported programs."""

import pytest
import torch

from hicache.kernels import copy, library, ops, reference


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def pools():
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, 256, (2, 6, 512), generator=generator, dtype=torch.uint8)
    return src, torch.zeros(6, 2, 512, dtype=torch.uint8)


def operators():
    src, dst = pools()
    fields = (list(src), list(dst.unbind(1)), i32(3, 5), i32(0, 4))
    return {
        "copy_items": (fields, {}),
        "copy_items_with_checksum": (fields, {}),
        "page_table": (
            (i32(4, 5, 6), i32(0, 2, 1, 2).view(2, 2), i32(0, 1, 2)),
            {"num_columns": 4},
        ),
        "window_table": (
            (i32(1, 2, 3, 4).view(1, 4), i32(50), i32(0, 3, 2, 1, 4)),
            {"page_size": 16, "window_len": 32},
        ),
    }


@pytest.mark.parametrize("name", list(operators()))
def test_each_operator_keeps_the_contract_of_torch(name):
    arguments, options = operators()[name]
    torch.library.opcheck(
        getattr(library, name),
        arguments,
        options,
        test_utils=("test_schema", "test_faketensor"),
    )


class Copies(torch.nn.Module):
    """Copies two buffers into the two halves of each item of a slab, and reads the slab."""

    def forward(self, src, slab, src_ids, dst_ids):
        targets = list(slab.unbind(1))
        torch.ops.hicache.copy_items(list(src.unbind(0)), targets, src_ids, dst_ids)
        return slab.sum(dtype=torch.int64)


def compiled(module, arguments):
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def exported(module, arguments):
    return torch.export.export(module, arguments).module()


def decomposed(module, arguments):
    return torch.export.export(module, arguments).run_decompositions().module()


@pytest.fixture
def by_kernel(monkeypatch):
    """The kernels themselves, in the interpreter: on a CPU the reference would stand in."""
    monkeypatch.setattr(
        ops,
        "reference",
        type("Kernels", (), {
            "copy_items": staticmethod(copy.copy_items),
            "copy_items_with_checksum": staticmethod(copy.copy_items_with_checksum),
        }),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own
@pytest.mark.parametrize("program", [None, compiled, exported, decomposed])
@pytest.mark.usefixtures("by_kernel")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU: test_on_gpu")
def test_a_program_copies_what_the_call_copies(program):
    module = Copies()
    src, slab = pools()
    arguments = (src, slab, i32(3, 5), i32(0, 4))
    expected = slab.clone()
    reference.copy_items(library.copy_table(list(src), list(expected.unbind(1))), *arguments[2:])
    run = program(module, arguments) if program else module
    assert int(run(*arguments)) == int(expected.sum(dtype=torch.int64))
    assert torch.equal(slab, expected)
