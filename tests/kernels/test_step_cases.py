"""The bench of load-back, encode, append, attention and scan verifies what it measures."""

import pytest
import torch

from hicache.workbench.bench import step_cases
from hicache.workbench.bench.measure import KIB, Bench
from hicache.workbench.bench.session import Session


@pytest.fixture
def session():
    if torch.cuda.is_available():
        pytest.skip("sizes are toys without a GPU only")
    device = torch.device("cpu")
    return Session(
        Bench(device, device_bytes=64 * KIB, host_bytes=64 * KIB, num_layers=2, repeats=1)
    )


CASES = {
    "loads": ("load", 6 * 4 + 1),
    "encodes": ("encode", 4 * 4),
    "appends": ("append", 2 * 2),
    "attention": ("attend", 4),
    "scans": ("scan", 3),
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_verifies_every_launch_that_it_times(name, session):
    getattr(step_cases, name)(session)
    op, count = CASES[name]
    assert [record.op for record in session.records] == [op] * count


def test_bytes_of_a_load_back_are_those_that_leave_the_host(session):
    plain, coded = (
        step_cases.load_back(session.bench, form, has_states=False).num_bytes
        for form in (None, step_cases.Format.int8)
    )
    assert plain <= 64 * KIB
    page, page_coded = 4 * 2 * 64 * 2, 4 * 2 * 64 + 4 * 2 * 4
    assert plain % page == coded % page_coded == 0


FAULTS = {
    "loads": "load_items",
    "encodes": "encode_items",
    "appends": "append",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_that_does_nothing_fails_its_case(name, session, monkeypatch):
    monkeypatch.setattr(step_cases, FAULTS[name], lambda *arguments, **options: None)
    with pytest.raises(RuntimeError, match="differs"):
        getattr(step_cases, name)(session)


def test_attention_to_other_tokens_fails_its_case(session, monkeypatch):
    attend = step_cases.attend

    def shifted(pool, table, *arguments, **options):
        return attend(pool, table.flip(1), *arguments, **options)

    monkeypatch.setattr(step_cases, "attend", shifted)
    with pytest.raises(RuntimeError, match=r"error .* of the largest value"):
        step_cases.attention(session)
