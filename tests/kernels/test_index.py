"""The page table kernel and its reference, compared with loops in Python."""

import itertools

import pytest
import torch

from hicache.kernels.index import naive_page_table, page_table


@pytest.fixture(params=[page_table, naive_page_table])
def make_table(request, device):
    if request.param is naive_page_table and device.type == "cuda":
        pytest.skip("the reference serves CPU tensors")
    return request.param


def rows_of(page_ids, spans, request_spans, num_columns):
    rows = []
    for first, last in itertools.pairwise(request_spans):
        pages = [page_ids[i] for start, n in spans[first:last] for i in range(start, start + n)]
        pages = [max(page, 0) for page in pages][:num_columns]
        rows.append(pages + [0] * (num_columns - len(pages)))
    return rows


@pytest.mark.parametrize("num_columns", [0, 1, 7, 1300])
def test_a_page_table_lists_the_pages_of_spans_in_order(num_columns, make_table, ids, generator):
    page_ids = torch.randint(-1, 5000, (900,), generator=generator).tolist()
    spans = [(0, 3), (10, 0), (5, 4), (100, 790), (400, 30), (2, 1)]
    request_spans = [0, 3, 3, 4, 6]  # the second request has no span
    got = make_table(ids(page_ids), ids(spans), ids(request_spans), num_columns=num_columns, hole=0)
    assert got.tolist() == rows_of(page_ids, spans, request_spans, num_columns)
    none = make_table(ids([]), ids(torch.zeros(0, 2)), ids([0]), num_columns=num_columns)
    assert none.shape == (0, num_columns)


def test_the_page_table_kernel_writes_nothing_outside_its_table(ids, device, monkeypatch):
    empty, slabs = torch.empty, []

    def guarded(*shape, dtype, device):
        size = shape[0] * shape[1]
        slabs.append(torch.full((size + 64,), -5, dtype=dtype, device=device))
        return slabs[-1][32 : 32 + size].view(shape)

    pages, spans = ids([[4, 5, 6], [7, 8, 9]]), ids([[0, 3], [3, 3]])
    monkeypatch.setattr(torch, "empty", guarded)
    found = page_table(pages.flatten(), spans, ids([0, 1, 2]), num_columns=3)
    monkeypatch.setattr(torch, "empty", empty)
    assert found.tolist() == pages.tolist()
    assert slabs[0][:32].tolist() == slabs[0][-32:].tolist() == [-5] * 32


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("spans", "sentence"),
    [
        (i32(0, 1), "spans must be \\[S, 2\\] and contiguous, got shape \\(2,\\)"),
        (i32(0, 1, 2).view(1, 3), "spans must be"),
        (i32(0, 1, 0, 1).view(2, 2).T, "spans must be|one contiguous axis"),
        (torch.zeros(1, 2), "spans must be int32"),
    ],
)
def test_spans_with_a_wrong_shape_stride_or_dtype_are_refused(spans, sentence):
    with pytest.raises(ValueError, match=sentence):
        page_table(i32(1, 2), spans, i32(0, 1), num_columns=4)
