"""Page tables against loops in Python."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from hicache.kernels import index


@pytest.fixture(params=["kernel", "reference"])
def plane(request, device):
    """The index operations, as kernels and as the reference that stands in for them."""
    if request.param == "reference" and device.type == "cuda":
        pytest.skip("the reference serves CPU tensors")
    prefix = "naive_" if request.param == "reference" else ""
    return SimpleNamespace(
        page_table=getattr(index, f"{prefix}page_table"),
    )


def wanted_rows(page_ids, spans, request_spans, num_columns, hole):
    rows = []
    for first, last in itertools.pairwise(request_spans):
        pages = [page_ids[i] for start, n in spans[first:last] for i in range(start, start + n)]
        pages = [hole if page < 0 else page for page in pages][:num_columns]
        rows.append(pages + [hole] * (num_columns - len(pages)))
    return rows


@pytest.mark.parametrize("num_columns", [1, 7, 40, 1300])
def test_a_page_table_lays_spans_one_after_another(num_columns, plane, ids, generator):
    page_ids = torch.randint(-1, 5000, (900,), generator=generator).tolist()
    spans = [(0, 3), (10, 0), (5, 4), (100, 790), (400, 30), (2, 1)]
    request_spans = [0, 3, 3, 4, 6]  # the second request has no span
    got = plane.page_table(
        ids(page_ids), ids(spans), ids(request_spans), num_columns=num_columns, hole=0
    )
    assert got.tolist() == wanted_rows(page_ids, spans, request_spans, num_columns, 0)


def test_a_page_table_of_no_requests_is_empty(plane, ids):
    got = plane.page_table(ids([]), ids(torch.zeros(0, 2)), ids([0]), num_columns=4, hole=0)
    assert got.shape == (0, 4)


def test_the_kernel_writes_its_table_alone(ids, device, monkeypatch):
    empty, slabs = torch.empty, []

    def guarded(*shape, dtype, device):
        size = shape[0] * shape[1]
        slabs.append(torch.full((size + 64,), -5, dtype=dtype, device=device))
        return slabs[-1][32 : 32 + size].view(shape)

    pages = ids([[4, 5, 6], [7, 8, 9]])
    monkeypatch.setattr(torch, "empty", guarded)
    spans = ids([[0, 3], [3, 3]])
    found = index.page_table(pages.flatten(), spans, ids([0, 1, 2]), num_columns=3)
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
def test_spans_of_another_form_are_refused(spans, sentence):
    with pytest.raises(ValueError, match=sentence):
        index.page_table(i32(1, 2), spans, i32(0, 1), num_columns=4)


def test_tables_of_the_least_size_are_made(plane, ids):
    pages, spans, bounds = ids([1]), ids([[0, 1]]), ids([0, 1])
    assert plane.page_table(pages, spans, bounds, num_columns=0).shape == (1, 0)
    assert plane.page_table(pages, spans, bounds, num_columns=2).tolist() == [[1, 0]]
