"""The bench of load-back, encode, append, attention and scan verifies what it measures."""

import pytest
import torch

from hicache.workbench.bench import step_cases
from hicache.workbench.bench.measure import KIB, Bench
from hicache.workbench.bench.session import Session

CASES = {  # operations, launches that are timed, the kernel
    "loads": ("load", 6 * 4, "load_items"),
    "encodes": ("encode", 4 * 4, "encode_items"),
    "appends": ("append", 2 * 2, "append"),
    "attention": ("attend", 4, "attend"),
    "scans": ("scan", 3, None),
}


@pytest.fixture
def session():
    if torch.cuda.is_available():
        pytest.skip("sizes are small without a GPU only")
    sizes = {"device_bytes": 64 * KIB, "host_bytes": 64 * KIB, "num_layers": 2, "repeats": 1}
    return Session(Bench(torch.device("cpu"), **sizes))


@pytest.mark.parametrize("name", CASES)
def test_a_bench_case_verifies_every_launch_that_it_times(name, session, monkeypatch):
    op, count, kernel = CASES[name]
    getattr(step_cases, name)(session)
    assert [record.op for record in session.records] == [op] * count
    if kernel is None:
        return
    right = getattr(step_cases, kernel)

    def wrong(pool, table, *arguments, **options):
        # attention to other tokens; other kernels do nothing
        is_attention = name == "attention"
        return right(pool, table.flip(1), *arguments, **options) if is_attention else None

    monkeypatch.setattr(step_cases, kernel, wrong)
    with pytest.raises(RuntimeError, match=r"differs|error .* of the largest value"):
        getattr(step_cases, name)(session)


def test_bytes_of_a_load_back_are_those_that_leave_the_host(session):
    plain, coded = (
        step_cases.load_back(session.bench, form, has_states=False).num_bytes
        for form in (None, step_cases.Format.int8)
    )
    assert plain <= 64 * KIB
    page, page_coded = 4 * 2 * 64 * 2, 4 * 2 * 64 + 4 * 2 * 4
    assert plain % page == coded % page_coded == 0


def test_attention_counts_the_bytes_of_a_decode_and_the_operations_of_a_prefill(session):
    step_cases.attention(session)
    cache = 2 * 64 * 2 * 32 * 4  # keys and values of 64 tokens: two heads, 32 float32 each
    pairs = sum(range(33, 65))  # tokens that the rows of the prefill attend to
    assert [each.num_bytes for each in session.records] == [
        2 * cache,
        cache,
        cache,
        2 * 2 * 4 * 32 * pairs // 1000,  # two products, four query heads
    ]
