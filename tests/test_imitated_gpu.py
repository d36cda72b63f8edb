"""Code that needs a GPU, run on an imitated one (`imitated_gpu`)."""

import json
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
side = torch.cuda.Stream()
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

pinned = host.pin_memory()
imitated_gpu.WAITS.clear()
gpu.copy_(pinned, non_blocking=True), pinned.to("cuda", non_blocking=True), gpu[ids], gpu + 1
assert not imitated_gpu.WAITS
for waits in (
    lambda: host.to("cuda", non_blocking=True),
    lambda: pinned.to("cuda"),
    lambda: gpu.copy_(host, non_blocking=True),
    lambda: gpu.cpu(),
    lambda: gpu.sum().item(),
    lambda: int(ids[0]),
    lambda: bool((gpu == 0).all()),
    lambda: gpu[gpu > 0],
    lambda: gpu[[1, 2]],
    lambda: torch.tensor([1.0], device="cuda"),
    lambda: side.synchronize(),
):
    before = imitated_gpu.WAITS.total()
    waits()
    assert imitated_gpu.WAITS.total() == before + 1, imitated_gpu.WAITS
    torch.cuda.set_sync_debug_mode("error")
    try:
        waits()
    except RuntimeError:
        continue
    finally:
        torch.cuda.set_sync_debug_mode("default")
    raise SystemExit("a wait was not refused")

imitated_gpu.Stream.are_late = True
copied = torch.zeros_like(gpu)
table, event = copy_table([gpu + 1], [copied]), torch.cuda.Event()
with torch.cuda.stream(side):
    copy_items(table, ids, ids)
    event.record()
assert not copied.any()
torch.cuda.current_stream().wait_event(event)
assert copied[:2].all() and not copied[2:].any()
"""
STEP = """
from tests import imitated_gpu
from experiments.gpu.steps import PAGE, decodes, runner_of, shape_of
from hicache.executor.real.reference_model import ReferenceModel

imitated_gpu._interpreted = lambda *_, **__: None  # what is launched is counted, and not run
model = ReferenceModel(shape_of("F S", 8), page_size=PAGE, device="cuda")
runner = runner_of(model, 16)
imitated_gpu.LAUNCHES.clear(), imitated_gpu.WAITS.clear()
runner.compute(decodes(16))
print(imitated_gpu.LAUNCHES, imitated_gpu.WAITS)
assert imitated_gpu.WAITS == {"Stream.synchronize": 1}  # at the end of the step
tables = imitated_gpu.LAUNCHES.pop("_page_table_kernel")
assert tables == 2 and 0 < imitated_gpu.LAUNCHES.total() <= 10 * 8
"""
LOAD_BACK = """
from tests import imitated_gpu
from experiments.gpu import steps
from experiments.gpu.steps import PAGE, decodes, runner_of, shape_of
from hicache.cache.tiers.transfer import LoadBack, Move
from hicache.executor.real import reference_model
from hicache.executor.real.reference_model import ReferenceModel
from hicache.executor.real.verify import Verifier
from tests.executor.one_sequence import OneSequence

reference_model.TOGETHER, steps.NUM_PAGES = 1, 1
imitated_gpu.Stream.are_late = True
model, batch = ReferenceModel(shape_of("F", 2), page_size=PAGE, device="cuda"), decodes(1)
runner, (req,) = runner_of(model, 1), batch.decodes
runner._verifier = Verifier(model, runner.pools.plane)
pages = [0]
OneSequence(model, runner.pools, req.tokens, [pages]).forward(0, req.kv_len)
runner.pools.save([Move(0, pages, pages)])
for waits in (True, False):
    runner.pools.poison(0, 0, pages)
    runner.submit(LoadBack(node=None, num_bytes=0, moves=[Move(0, pages, pages)]))
    if not waits:
        runner._ready = lambda layer: None
    runner.compute(batch)
    verdict = runner._verifier.verify()
    assert (verdict.num_checked, verdict.num_equal) == (1, waits), verdict
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
link_cases.STEPS, link_cases.NUM_ROUNDS = {"GEMM": (4, 4, 4, 2)}, 1
link_cases.BESIDE = (2,)
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


TESTS = """
import sys
import pytest

only = ("-m", "gpu and not soak", "-p", "tests.imitated_gpu", "-p", "no:xdist")
raise SystemExit(pytest.main(["-q", *only, *sys.argv[1:]]))
"""
# a script with its arguments in a process of its own, which begins with torch imported
FORKING = """
import json, os, sys
from pathlib import Path
import torch, torch._dynamo
from tests.quick_interpreter import hasten

hasten()
for name, (script, *arguments) in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        output = os.open(Path(sys.argv[2], name), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv[1:] = arguments
        exec(script)
        sys.exit()
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
SCRIPTS = {
    "the imitation refuses what a GPU refuses": (REFUSED,),
    "16 decodes of 8 layers launch 10 kernels a layer at most and wait once": (STEP,),
    "a step reads what a late stream brings only if its layers wait": (LOAD_BACK,),
    # large pools, tables and pages are for the soak
    "the tests for a GPU pass": (
        *(TESTS, "tests/executor/test_step_on_gpu.py", "tests/kernels/test_on_gpu.py"),
        *("-k", "not past_2_to_the_31 and not large_batch and not 32"),
    ),
}
SOAK = {
    "the bench of copies runs its peers and operations": (BENCH,),
    "all tests of kernels for a GPU pass": (
        TESTS,
        "tests/kernels",
        "tests/executor/test_step_on_gpu.py",
    ),
}


def ran(scripts, folder):
    """The exit code of each script, and what it printed."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    forking = subprocess.run(
        [sys.executable, "-c", FORKING, json.dumps(scripts), folder],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    codes = dict(line.rsplit(" ", 1) for line in forking.stdout.splitlines())
    return {name: (codes[name], (folder / name).read_text()[-8000:]) for name in scripts}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return ran(SCRIPTS, tmp_path_factory.mktemp("imitated"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_holds_on_the_imitation(name, found):
    code, printed = found[name]
    assert code == "0", printed


@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK)
def test_a_long_script_holds_on_the_imitation(name, tmp_path):
    ((code, printed),) = ran({name: SOAK[name]}, tmp_path).values()
    assert code == "0", printed
