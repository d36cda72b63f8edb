import numpy as np
import pytest

from hicache.workload.runs import Runs, append_run, cut_runs, is_prefix, runs_len, to_spans
from tests.workload.traces import ids

RUNS: Runs = [(10, 3), (5, 1), (20, 4)]
IDS = [10, 11, 12, 5, 20, 21, 22, 23]


def test_a_run_that_goes_on_is_merged() -> None:
    runs: Runs = [(10, 3)]
    append_run(runs, 13, 2)
    assert runs == [(10, 5)]


def test_a_run_of_nothing_is_left_out() -> None:
    runs: Runs = []
    append_run(runs, 13, 0)
    assert runs == []


@pytest.mark.parametrize("begin", range(10))
@pytest.mark.parametrize("end", range(10))
def test_a_cut_is_a_slice_of_the_ids(begin: int, end: int) -> None:
    assert ids(to_spans(cut_runs(RUNS, begin, end))).tolist() == IDS[begin:end]


def test_the_length_counts_tokens() -> None:
    assert runs_len(RUNS) == 8


@pytest.mark.parametrize("length", range(9))
def test_every_beginning_is_a_prefix(length: int) -> None:
    assert is_prefix(cut_runs(RUNS, 0, length), RUNS)


@pytest.mark.parametrize(
    "head", [[(10, 2), (5, 1)], [(10, 4)], [(11, 1)], [*RUNS, (30, 1)], [(10, 3), (5, 2)]]
)
def test_other_ids_are_no_prefix(head: Runs) -> None:
    assert not is_prefix(head, RUNS)


def test_spans_hold_little_endian_int32_ids() -> None:
    assert to_spans(RUNS).to_bytes() == np.array(IDS, "<i4").tobytes()


def test_no_runs_are_empty_spans() -> None:
    assert (len(to_spans([])), to_spans([]).to_bytes()) == (0, b"")
