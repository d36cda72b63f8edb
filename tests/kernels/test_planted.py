"""Planted mistakes in kernels that other tests of values do not find without a GPU.

Offsets beyond 2**31: pools lie in sparse mappings, of which only the pages that are touched take
memory. An offset that wraps in 32 bits is still inside of the mapping, and reads zeros there.

The order of barriers and counters: read from what the compiler made of the kernel for sm_90.
"""

import importlib.util
import inspect
import json
import mmap
import os
import subprocess
import sys
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from hicache.kernels import append, attend, copy, load, scan, transcode
from hicache.kernels.load import LoadBuffer, load_of, load_table
from hicache.kernels.scan import ScanWeights
from hicache.kernels.table import copy_table
from hicache.kernels.transcode import Format, code_table, coded_bytes, coded_of

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux
BEFORE, SIZE = 64 << 30, 512 << 30  # bytes of a mapping
MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (append, attend, copy, load, scan, transcode)
}
# from item to item, in elements: with the largest id, and alone, beyond 2**31
APART = {"many items": (1 << 28, 11), "wide items": ((1 << 31) + 64, 3)}


def sparse(shape, apart, dtype, last):
    """A sparse pool of `last` + 1 contiguous items of zeros, `apart` elements after each other."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, SIZE, flags=flags), dtype=dtype)
    strides = torch.empty(shape, device="meta").stride()
    pool = torch.as_strided(memory, (last + 1, *shape), (apart, *strides), BEFORE // dtype.itemsize)
    assert (BEFORE // dtype.itemsize + apart * (last + 1)) * dtype.itemsize < SIZE
    return pool


def pair(shape, case, dtype, draw, *, element=None):
    """A sparse pool and a dense one with the same random items."""
    apart, last = APART[case]
    dense = torch.randn(last + 1, *shape, generator=draw).to(dtype)
    pool = sparse(shape, apart * (element or 1), dtype, last)
    pool.copy_(dense)
    return pool, dense


def kv(case, dtype, draw):
    """A sparse and a dense KV pool [2, P, T, H, D]; the values of a page lie behind its keys."""
    return (each.transpose(0, 1) for each in pair((2, 4, 2, 16), case, dtype, draw))


def ids_of(case):
    last = APART[case][1]
    return torch.tensor([[last, 1, last - 1]], dtype=torch.int32)


def appended(kernels, case, draw):
    keys, values = torch.randn(2, 1, 9, 2, 16, generator=draw).half()
    tiles = torch.tensor([[1, 0, 9, 0]], dtype=torch.int32)
    pools = [*kv(case, torch.float16, draw)]
    kernels.append.append(pools[0], ids_of(case), tiles, keys, values)
    append.naive_append(pools[1], ids_of(case), tiles, keys, values)
    return pools


def attended(kernels, case, draw):
    queries = torch.randn(1, 1, 2, 16, generator=draw).half()
    tiles = torch.tensor([[11, 0, 1, 0]], dtype=torch.int32)
    launches = kernels.attend.attend, attend.attend
    return [
        launch(pool, ids_of(case), tiles, queries, end=12)
        for launch, pool in zip(launches, kv(case, torch.float16, draw), strict=True)
    ]


def encoded(kernels, case, draw):
    last, shape = APART[case][1], (2, 32)
    wide, dense = pair(shape, case, torch.float32, draw)
    coded = sparse((coded_bytes(shape, Format.int8),), APART[case][0], torch.uint8, last)
    src_ids, dst_ids = torch.arange(last + 1).int(), torch.arange(last, -1, -1).int()
    kernels.transcode.encode_items(code_table([wide], [coded], Format.int8), src_ids, dst_ids)
    wanted = coded_of(dense, Format.int8).flip(0)
    return coded[:, : wanted.shape[1]], wanted


def copied(kernels, case, draw):
    last = APART[case][1]
    source, dense = pair((4,), case, torch.int64, draw)
    target = sparse((4,), APART[case][0], torch.int64, last)
    ids = torch.arange(last + 1).int()
    kernels.copy.copy_items(copy_table([source], [target]), ids, ids.flip(0))
    return target, dense.flip(0)


def loaded(kernels, case, draw, *, form=None):
    apart, last = APART[case]
    target, dense = pair((2, 32), case, torch.float32, draw)
    items = torch.randn(dense.shape, generator=draw)
    if form:
        whole = pad(coded_of(items, form), (0, 8))  # to 16·n bytes
        items = transcode.wide_of(whole, (2, 32), form)
    else:
        whole = items.flatten(1).view(torch.uint8)
    source = sparse((whole.shape[1],), apart, torch.uint8, last)
    source.copy_(whole)
    table = load_table([LoadBuffer(0, 0, source, target, form)], 1)
    ids = torch.arange(last + 1).int()
    counters = torch.zeros(1, 2, dtype=torch.int32)
    kernels.load.load_items(table, load_of(table, {0: (ids, ids.flip(0))}), counters)
    return target, items.flip(0)


def scanned(kernels, case, draw):
    last = APART[case][1]
    pools = [pair(shape, case, torch.float32, draw) for shape in ((1, 3, 48), (1, 16, 16))]
    inputs, gates = torch.randn(3, 1, 48, generator=draw), torch.randn(3, 1, 1, generator=draw)
    weights = ScanWeights(torch.randn(4, 1, 48, generator=draw), torch.ones(1), torch.ones(1))
    sequences = torch.tensor([[last, 0, 0, 2, 0]], dtype=torch.int32)
    ends = torch.tensor([[1, last], [3, last - 1]], dtype=torch.int32)
    launches = kernels.scan.scan, scan.scan
    for launch, (taps, states) in zip(launches, zip(*pools, strict=True), strict=True):
        launch(taps, states, sequences, ends, inputs, gates, weights, block=4)
    return [torch.cat([each.flatten(1) for each in side], 1) for side in zip(*pools, strict=True)]


FAMILIES = {
    "append": appended,
    "attend": attended,
    "encode": encoded,
    "copy": copied,
    "plain load": loaded,
    "coded load": partial(loaded, form=Format.int8),
    "scan": scanned,
}


def module_with(name, old, new, folder):
    """A copy of the module of kernels `name`, in which `old` is replaced with `new`."""
    source = inspect.getsource(MODULES[name])
    assert old in source
    path = folder / f"planted_{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="pools lie in host memory")


@interpreted
@pytest.mark.parametrize("case", APART)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_reach_items_beyond_2_to_the_31_elements(family, case, generator):
    got, wanted = FAMILIES[family](SimpleNamespace(**MODULES), case, generator)
    assert torch.equal(got, wanted)


CAST = ".to(tl.int64)"
SRC = "src_id * tl.load(piece + 2, mask=exists, other=0)"
NARROW = {
    "attend: page ids": ("attend", "attend", f"page{CAST} * page_stride", "page * page_stride"),
    "scan: slot of taps": ("scan", "scan", f"+ 1){CAST} * taps", "+ 1) * taps"),
    "copy: source ids": ("copy", "copy", SRC, f"({SRC}).to(tl.int32)"),
}


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("family", "name", "old", "new"), NARROW.values(), ids=NARROW)
def test_a_planted_32_bit_offset_changes_the_result(family, name, old, new, generator, tmp_path):
    kernels = MODULES | {name: module_with(name, old, new, tmp_path)}
    got, wanted = FAMILIES[family](SimpleNamespace(**kernels), "many items", generator)
    assert not torch.equal(got, wanted)


# compiles kernels as they are and with each mistake; prints their memory operations in order, in
# Triton's intermediate form and in PTX
ORDER = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_planted import MODULES, ORDERED, module_with
from hicache.workbench.codegen_cases import cases
from hicache.workbench.stand_in import stand_in

stand_in()
cases = {case.name: case for case in cases()}
IR = re.compile(r"barrier|tt[.](?:load|store).*?tt[.]ptr<(\\w+)>|tt[.]atomic_rmw add, (\\w+, \\w+)")
PTX = re.compile(r"bar[.]sync|st[.]global|atom[.]global[.]\\S*")
said = {}
for label, (case_name, name, old, new) in ORDERED.items():
    case = cases[case_name]
    module = module_with(name, old, new, Path(sys.argv[2]))
    kernel = getattr(module, case.kernel.__name__)
    made = kernel.warmup(*case.arguments, grid=(8,), **case.constants).asm
    said[label] = [[each.group(0) for each in form.finditer(made[kind])]
                   for form, kind in ((IR, "ttir"), (PTX, "ptx"))]
print(json.dumps(said))
"""
LOAD, WAIT, SCAN = (
    "load-back of pages, states and taps",
    "wait for a layer",
    "scan of Mamba-2, heads of 64 × 128 keys",
)
BARRIER, RELAXED = "tl.debug_barrier()", 'sem="relaxed"'
RIGHT = {
    "load": (LOAD, "load", BARRIER, BARRIER),
    "wait": (WAIT, "load", BARRIER, BARRIER),
    "scan": (SCAN, "scan", BARRIER, BARRIER),
}
WRONG = {
    "load: no barrier before a layer's counter": (LOAD, "load", BARRIER, "pass"),
    "wait: the counter is read relaxed": (WAIT, "load", 'sem="acquire"', RELAXED),
    "scan: no barrier before its taps": (SCAN, "scan", f"{BARRIER}  # all threads have", "pass  #"),
}
ORDERED = RIGHT | WRONG
COUNTERS = {LOAD: ["acq_rel, gpu", "release, gpu"], WAIT: ["acquire, gpu"], SCAN: ["acq_rel, gpu"]}


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    here = Path(__file__).parent
    command = [sys.executable, "-W", "ignore", "-c", ORDER, here, tmp_path_factory.mktemp("order")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout, run.stderr
    return json.loads(run.stdout)


def is_ordered(label, operations):
    """True if counters use the right memory order and barriers precede counters and taps."""
    atomics = [each.rpartition("add, ")[2] for each in operations if "atomic" in each]
    guarded = [
        before
        for before, each in pairwise(operations)
        if "acq_rel" in each or ("store" in each and "bf16" in each and "scan" in label)
    ]
    return atomics == COUNTERS[ORDERED[label][0]] and set(guarded) <= {"barrier"}


@pytest.mark.parametrize("label", RIGHT)
def test_compiled_kernels_have_barriers_before_counters_and_taps(label, orders):
    operations, machine = orders[label]
    assert is_ordered(label, operations)
    for place, each in enumerate(machine):
        if "acq_rel" in each:  # after the last store of any thread, which may stand further below
            assert "bar.sync" in takewhile(lambda it: "st.global" not in it, machine[:place][::-1])


@pytest.mark.parametrize("label", WRONG)
def test_a_planted_missing_barrier_or_relaxed_counter_is_found(label, orders):
    assert not is_ordered(label, orders[label][0])
