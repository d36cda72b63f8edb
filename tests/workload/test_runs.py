"""Runs of consecutive token ids: joined, cut and compared like the ids themselves."""

import numpy as np
import pytest

from hicache.workload.runs import Runs, append_run, cut_runs, is_prefix, runs_len, to_spans

RUNS: Runs = [(10, 3), (5, 1), (20, 4)]
IDS = [10, 11, 12, 5, 20, 21, 22, 23]


def ids_of(runs: Runs) -> list[int]:
    spans = to_spans(runs)
    ids = np.frombuffer(spans.to_bytes(), "<i4").tolist()
    assert len(spans) == runs_len(runs) == len(ids)
    return ids


def test_appended_runs_are_merged_and_empty_ones_left_out():
    runs: Runs = [(10, 3)]
    append_run(runs, 13, 2)
    append_run(runs, 15, 0)
    append_run(runs, 20, 1)
    assert runs == [(10, 5), (20, 1)]


@pytest.mark.parametrize("begin", range(10))
def test_a_cut_of_runs_is_the_slice_of_their_ids(begin):
    for end in range(10):
        assert ids_of(cut_runs(RUNS, begin, end)) == IDS[begin:end]
        assert is_prefix(cut_runs(RUNS, 0, end), RUNS)


@pytest.mark.parametrize(
    "head", [[(10, 2), (5, 1)], [(10, 4)], [(11, 1)], [*RUNS, (30, 1)], [(10, 3), (5, 2)]]
)
def test_runs_of_other_ids_are_not_a_prefix(head):
    assert not is_prefix(head, RUNS)
