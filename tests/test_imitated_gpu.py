"""What only beside a GPU would run, run on an imitated one (`imitated_gpu`)."""

import os
import subprocess
import sys

import pytest

REFUSED = """
import torch
from tests import imitated_gpu
from hicache.kernels import copy_table
from hicache.kernels.copy import copy_items

gpu, host = torch.zeros(4, 64, device="cuda"), torch.zeros(4, 64)
ids, host_ids = (torch.arange(2, dtype=torch.int32, device=side) for side in ("cuda", "cpu"))
assert (gpu + 1)[:, 2:].is_cuda and not gpu.cpu().is_cuda and gpu.sum().item() == 0
table, side = copy_table([gpu], [torch.empty_like(gpu)]), torch.cuda.Stream()
with torch.cuda.stream(side):
    copy_items(table, ids, ids)
assert imitated_gpu.RECORDED == [(table.pieces.data_ptr(), side)]
for refused in (
    lambda: gpu + host,
    lambda: host[ids],
    lambda: host.index_select(0, ids),
    lambda: gpu.numpy(),
    lambda: torch.rand(4, device="cuda", generator=torch.Generator()),
    lambda: copy_table([gpu], [host]),
    lambda: copy_items(copy_table([gpu], [torch.empty_like(gpu)]), host_ids, host_ids),
):
    try:
        refused()
    except (RuntimeError, TypeError, ValueError):
        continue
    raise SystemExit("nothing was refused")
"""
MIX = """
from tests import imitated_gpu
from hicache.executor.real import reference_model
from hicache.executor.real.plane import TRITON
from tests.executor.kernels_only import kernels_only
from tests.executor.mixes import run_mix

reference_model.TOGETHER = 2  # the interpreter pays for each tile
with kernels_only() as mode:
    mix = run_mix(188, device="cuda", plane=TRITON.wrapped(mode.paused()), most=5)
assert all(mix.seen[each] for each in ("LoadBack", "fence", "CopyState")), mix.seen
assert mix.verdict.num_equal == mix.verdict.num_checked > 0, mix.verdict
"""
BENCH = """
import sys
from itertools import product
from tests import imitated_gpu
from hicache.workbench.bench import __main__ as bench, link_cases, measure
from hicache.workbench.bench.measure import DIRECTIONS, Bench
from hicache.workbench.bench.peers import PEERS
from hicache.workbench.contract import DECLINED

measure.CACHE_BYTES, measure.WARM_UP_S, bench.NUM_LAYERS = 1 << 16, 0, 1
bench.MIB, link_cases.MIB = 1 << 19, 1 << 12
link_cases.STEPS, link_cases.NUM_ROUNDS = {"GEMM": (64, 64, 64, 2)}, 1
small = Bench(imitated_gpu.GPU, device_bytes=1 << 18, host_bytes=1 << 16, num_layers=1, repeats=1)
declined = {"device": set(), "to_device": set(), "to_host": {"vllm_blocks"}}
for direction, other in product(DIRECTIONS, ("layer_first", "page_first")):
    transfer = small.transfer(direction, 2, 2048, num_bytes=1 << 14, other=other)
    found = set()
    for name, kernel in PEERS.items():
        try:
            launch = transfer.by(kernel)
        except DECLINED:
            found.add(name)
        else:
            with small.stream():
                small.verify(transfer, launch)
    assert found == declined[direction], (direction, found)
sizes = ["--device-mib", "1", "--host-mib", "1", "--repeats", "1"]
sys.argv = ["bench", *sizes, "--op", "interference", "--op", "launches"]
raise SystemExit(bench.main())
"""


def passes(*arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    ran = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


def test_it_refuses_what_a_gpu_would():
    passes("-c", REFUSED)


def test_logits_are_equal_through_kernels_and_streams():
    passes("-c", MIX)


def test_peers_move_the_bytes_and_what_runs_beside_copies_runs():
    passes("-c", BENCH)


@pytest.mark.slow
def test_the_tests_of_the_kernels_pass():
    only = ("-m", "gpu and not soak", "-p", "tests.imitated_gpu", "-p", "no:xdist")
    passes("-m", "pytest", "-q", *only, "tests/kernels")
