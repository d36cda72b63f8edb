"""Whole runs on the kernels alone: no operation of torch reads or writes a pool."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported

import pytest

from hicache.executor.real.plane import REFERENCE, interpreted
from tests.executor.kernels_only import RefusedError, kernels_only
from tests.executor.mixes import run_mix


@pytest.mark.parametrize(
    ("seed", "most", "hits"),
    [
        (94, 3, ["device hit", "storage hit"]),
        pytest.param(7, None, ["device hit", "host hit", "storage hit"], marks=pytest.mark.soak),
        pytest.param(11, None, ["device hit", "storage hit"], marks=pytest.mark.soak),
    ],
)
def test_logits_equal_a_cold_start_on_kernels_alone(seed, most, hits):
    with kernels_only() as mode:
        mix = run_mix(seed, plane=interpreted().wrapped(mode.pausing), most=most)
    assert mix.verdict.num_equal == mix.verdict.num_checked > 0
    assert all(mix.seen[hit] for hit in hits)


def test_an_operation_of_torch_on_a_pool_is_refused():
    with kernels_only(), pytest.raises(RefusedError, match="on a pool"):
        run_mix(0, plane=REFERENCE)
