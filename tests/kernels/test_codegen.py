"""Machine code of the kernels, compiled for sm_90 without a GPU.

Compilation needs processes without TRITON_INTERPRET, so each test here reads what one printed.
"""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from hicache.kernels import codegen

# compiles the copy kernel once for each `tl.multiple_of` in it, with that one deleted; then as it
# is, for launches whose arguments differ in every way that serving makes them differ
VARIANTS = """
import ast, dataclasses, importlib.util, inspect, json, sys
from pathlib import Path
import torch
from triton import language as tl
from hicache.kernels import codegen, copy, peers

class Delete(ast.NodeTransformer):
    def __init__(self, wanted):
        self.wanted, self.seen = wanted, 0
    def visit_Call(self, node):
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "multiple_of"):
            return node
        self.seen += 1
        return node.args[0] if self.seen == self.wanted else node

case = codegen.cases()[0]
violations, wanted = {}, 0
while True:
    delete = Delete(wanted)
    source = ast.unparse(delete.visit(ast.parse(inspect.getsource(copy))))
    if wanted > delete.seen:
        break
    path = Path(sys.argv[1]) / f"copy_without_{wanted}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report = codegen.compile_case(dataclasses.replace(case, kernel=module._copy_kernel))
    violations[wanted] = report.violations(case.limits)
    wanted += 1

pieces, ids = torch.zeros(64, 6, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
compiled = {}
def launch(case, *arguments):
    kernel = case.kernel.warmup(*arguments, grid=(8,), **case.constants)
    compiled.setdefault(case.name, set()).add(kernel.hash)

for case in codegen.cases():
    for number in (1, 16, 17, 1 << 20):  # where a number of things stands, an odd one and others
        for start in (0, 1):  # where a tensor stands, one that begins on no round address
            launch(case, *(
                number if isinstance(each, int)
                else each[start:] if isinstance(each, torch.Tensor) and each.dtype == torch.int32
                else each
                for each in case.arguments
            ))
peer = peers._pointer_copy_kernel.warmup(
    pieces, pieces, 64, 256, WORD=tl.int16, BLOCK=8192, grid=(8,), num_warps=8
)
two_byte_stores = peer.asm["ptx"].count("st.global.b16")
print(json.dumps({
    "violations": violations,
    "compiled": {name: len(each) for name, each in compiled.items()},
    "two_byte_stores": two_byte_stores,
}))
"""
NUM_PROMISES = 5  # source and target address, source and target offset, number of words


def in_a_process_that_compiles(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def reports():
    return in_a_process_that_compiles("-m", "hicache.kernels.codegen", "--json")


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    return in_a_process_that_compiles("-c", VARIANTS, str(tmp_path_factory.mktemp("patched")))


@pytest.fixture
def without_a_promise(variants):
    return variants["violations"]


def test_every_kernel_keeps_its_limits(reports):
    assert reports["violations"] == []


def test_every_case_is_reported(reports):
    assert [r["name"] for r in reports["reports"]] == [case.name for case in codegen.cases()]


def test_every_copy_moves_128_bits_at_a_time_through_registers_alone(reports):
    copies = [r for r in reports["reports"] if r["payload_loads"] and "checksum" not in r["name"]]
    assert len(copies) == 7
    for report in copies:
        assert list(report["payload_loads"]) == list(report["stores"]) == ["128"]
        assert report["shared_bytes"] == report["shared_accesses"] == report["barriers"] == 0
        assert report["spill_accesses"] == report["stack_bytes"] == 0


def test_the_copy_kernel_with_all_promises_passes(without_a_promise):
    assert without_a_promise["0"] == []


@pytest.mark.parametrize("promise", range(1, NUM_PROMISES + 1))
def test_deleting_an_alignment_promise_breaks_a_limit(promise, without_a_promise):
    assert any("of 128 bits" in sentence for sentence in without_a_promise[str(promise)])


def test_no_promise_goes_untested(without_a_promise):
    assert len(without_a_promise) == 1 + NUM_PROMISES


def test_no_launch_compiles_a_second_variant(variants):
    assert set(variants["compiled"]) == {case.name for case in codegen.cases()}
    assert set(variants["compiled"].values()) == {1}


def test_the_two_byte_peer_moves_two_bytes_at_a_time(variants):
    assert variants["two_byte_stores"] > 0


def test_a_disassembly_is_counted():
    sass = """
        /*0000*/ LDG.E R0, desc[UR4][R2.64] ;
        /*0010*/ @P0 LDG.E.EF.128 R4, desc[UR4][R2.64] ;
        /*0020*/ @!UP1 LDG.E.EF.64 R8, desc[UR4][R2.64+0x10] ;
        /*0030*/ STL [R1], R4 ;
        /*0040*/ @P0 STG.E.128 desc[UR4][R6.64], R4 ;
        /*0050*/ BAR.SYNC.DEFER_BLOCKING 0x0 ;
    """
    report = codegen.read_sass("x", sass, "REG:40 STACK:8 SHARED:0", shared_bytes=64)
    assert report == codegen.Report(
        name="x",
        payload_loads={128: 1, 64: 1},
        stores={128: 1},
        index_loads=1,
        registers=40,
        stack_bytes=8,
        spill_accesses=1,
        shared_bytes=64,
        shared_accesses=0,
        barriers=1,
        flight_bytes=24,
        num_instructions=6,
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"payload_loads": {64: 16}}, "payload loads of 128 bits"),
        ({"stores": {64: 8, 128: 4}}, "payload stores of 128 bits"),
        ({"registers": 200}, "at most 112 registers, got 200"),
        ({"spill_accesses": 1}, "at most 0 spill accesses"),
        ({"shared_bytes": 16}, "at most 0 bytes of shared memory"),
        ({"barriers": 2}, "at most 0 barriers"),
        ({"flight_bytes": 64}, "at least 128 bytes in flight"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_each_limit_can_be_broken(change, sentence, reports):
    fields = dict(reports["reports"][0])
    for name in ("payload_loads", "stores"):
        fields[name] = {int(bits): count for bits, count in fields[name].items()}
    report = codegen.Report(**fields)
    limits = codegen.cases()[0].limits
    assert report.violations(limits) == []
    (violation,) = dataclasses.replace(report, **change).violations(limits)
    assert sentence in violation


def test_codegen_refuses_to_run_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"):
        codegen.compile_case(codegen.cases()[0])
