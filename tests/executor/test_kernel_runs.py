"""Whole runs on the kernels alone: no operation of torch reads or writes a pool."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel module is imported

from collections import Counter

import pytest
import torch

from hicache.executor.real.paged_kv import PagedKvView
from hicache.executor.real.plane import REFERENCE, interpreted
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.tables import Stretch
from tests.executor.cpu_pools import cpu_pools
from tests.executor.kernels_only import RefusedError, kernels_only
from tests.executor.mixes import run_mix, tiny
from tests.executor.one_sequence import PAGE, TOKENS, OneSequence, shape_of


@pytest.mark.parametrize(
    ("seed", "most", "hits"),
    [
        pytest.param(3, 3, ["device hit", "storage hit"], marks=pytest.mark.soak),
        pytest.param(98, None, ["device hit", "host hit", "storage hit"], marks=pytest.mark.soak),
        pytest.param(126, None, ["device hit", "storage hit"], marks=pytest.mark.soak),
    ],
)
def test_logits_on_kernels_alone_equal_those_of_a_cold_start(seed, most, hits):
    with kernels_only() as mode:
        mix = run_mix(seed, plane=interpreted().wrapped(mode.paused()), most=most)
    assert mix.verdict.num_equal == mix.verdict.num_checked > 0
    assert all(mix.seen[hit] for hit in hits)


def test_an_operation_of_torch_on_a_pool_is_refused():
    with kernels_only(), pytest.raises(RefusedError, match="on a pool"):
        run_mix(0, plane=REFERENCE)


def test_a_layer_with_index_keys_runs_on_kernels_alone():
    config, length, pages = shape_of("FtI", head_dim=16), 2 * PAGE + 3, [[2, 0, 1]] * 4
    model, reference = (ReferenceModel(config, page_size=PAGE) for _ in range(2))
    pools = cpu_pools(config, PAGE, (3, 0, 1, 0))
    expected = OneSequence(reference, pools, TOKENS, pages).in_cuts([length])
    with kernels_only() as mode:
        plane = interpreted().wrapped(mode.paused())
        its = OneSequence(model, cpu_pools(config, PAGE, (3, 0, 1, 0), plane=plane), TOKENS, pages)
        torch.testing.assert_close(its.in_cuts([PAGE + 1, length]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("plane", [REFERENCE, interpreted()], ids=["torch", "triton"])
def test_one_scan_per_layer_captures_the_states_of_a_prefill_in_chunks(plane):
    page, ends = 4, range(4, 12, 4)
    model = ReferenceModel(tiny("M D", page), page_size=page)
    scans = []

    def scan(*given, **more):
        scans.append(given)
        return plane.scan(*given, **more)

    def memory(captures):
        counting = plane._replace(scan=scan)
        pools = cpu_pools(model.config, page, (1, 1, 1 + len(ends)), plane=counting)
        slabs = [*pools.ranks[0].taps, *pools.ranks[0].states]
        for slab in slabs:
            slab.zero_()
        return slabs, OneSequence(model, pools, TOKENS, ((), ()), captures)

    whole, its = memory([(end, slot) for slot, end in enumerate(ends, 1)])
    its.forward(0, ends[-1] + 3)
    assert len(scans) == 2  # one a layer
    cut, its = memory([])
    for slot, end in enumerate(ends, 1):
        its.forward(end - page, end)
        for captured, left in zip(whole, cut, strict=True):
            assert torch.equal(captured[slot], left[0])
            assert left[0].any()


def test_a_step_launches_as_many_kernels_for_many_sequences_as_for_one():
    model, counts = ReferenceModel(tiny("F S M D", 4), page_size=4), []
    model.together = 8
    for num_sequences in (1, 5):
        launches = Counter()

        def counted(launch, launches=launches):
            def run(*given, **more):
                launches[launch.__name__] += 1
                return launch(*given, **more)

            return run

        pools = cpu_pools(model.config, 4, (5, 5, 5), plane=REFERENCE.wrapped(counted))
        each = [
            Stretch(TOKENS, 2, 3, [[number]] * 2, slot=number) for number in range(num_sequences)
        ]
        model.forward(PagedKvView(pools, each, model.together))
        counts.append(launches)
    assert counts[0] == counts[1]
    assert counts[1]["naive_scan"] == 2  # one a recurrent layer
