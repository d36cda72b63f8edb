"""Machine code of the kernels, compiled for sm_90 without a GPU.

Compilation needs processes without TRITON_INTERPRET; tests here read what such a process printed.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sass import line, printed

from hicache.workbench import codegen
from hicache.workbench.codegen_cases import cases

# compiles all kernels for launches whose arguments differ in every way that serving makes them
# differ
VARIANTS = """
import json, torch
from hicache.workbench.codegen_cases import cases
from hicache.workbench.stand_in import stand_in

stand_in()
compiled = {}
def is_stride(case, value):  # of a pool or of weights, of which a model has a few
    tensors = [each for each in case.arguments if isinstance(each, torch.Tensor)]
    strides = [stride for each in tensors for stride in each.stride()]
    has_strides = any(word in case.name for word in ("append", "attention", "scan"))
    return has_strides and value in strides

for case in cases():
    for number in (1, 16, 17, 1 << 20):  # where a number of things stands, an odd one and others
        for start in (0, 1):  # where a tensor stands, one that begins on no round address
            arguments = [
                number if isinstance(each, int) and not is_stride(case, each)
                else each[start:] if isinstance(each, torch.Tensor) and each.dtype == torch.int32
                else each
                for each in case.arguments
            ]
            kernel = case.kernel.warmup(*arguments, grid=(8,), **case.constants)
            compiled.setdefault(case.name, set()).add(kernel.hash)
print(json.dumps({name: len(each) for name, each in compiled.items()}))
"""
TUNED = """
import contextlib, io
os.chdir(sys.argv[3])
sys.argv[1:] = ["--json", "--kernel", "tuned:Small"]
with contextlib.redirect_stdout(io.StringIO()) as out:
    with contextlib.redirect_stderr(io.StringIO()) as error:
        codegen.main()
print(json.dumps({**json.loads(out.getvalue()), "not_compiled": error.getvalue()}))
"""
# a case of each kernel; the soak has all
CHOSEN = [
    "pages of 64 KiB and more, Mamba slots",
    "pages with checksum",
    "bf16 to int8, pages of 16 × 8 heads",
    "load-back of int8 to bf16, pages of 16 × 8 heads",
    "wait for a layer",
    "append to pages of 16 × 8 heads",
    "decode attention, pages of 64 × 8 heads",
    "merge of splits, decode",
    "scan of gated delta, heads of 128 × 128 keys",
    "page table from spans",
]
# every script in a process of its own, which begins with torch imported
FORKING = """
import json, os, sys
from pathlib import Path
import torch
from hicache.workbench import codegen, codegen_cases

scripts, folder, chosen = json.loads(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[4])
its_cases = [case for case in codegen_cases.cases() if not chosen or case.name in chosen]
codegen.cases = codegen_cases.cases = lambda: its_cases
for name, script in scripts.items():
    if os.fork() == 0:
        os.dup2(os.open(folder / f"{name}.json", os.O_WRONLY | os.O_CREAT), 1)
        exec(script)
        break
    os.wait()
"""
SCRIPTS = {
    "reports": "sys.argv[1:] = ['--json']; codegen.main()",
    "own": (
        "for name in ('pages of 128 KiB', 'pages of 4 KiB'):\n    del codegen.SHAPES[name]\n"
        "sys.argv[1:] = ['--json', '--kernel', 'hicache.workbench.contract:ours']; codegen.main()"
    ),
    "oracle": (
        "os.chdir(sys.argv[3] + '/../../docs/examples'); "
        "sys.argv[1:] = ['--json', '--kernel', 'my_attention:Decode']; codegen.main()"
    ),
    "tuned": TUNED,
    "variants": VARIANTS,
}


def printed_by(scripts, chosen, folder):
    """Run `scripts` with the `chosen` kernel cases ([]: all); return the JSON that each printed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    told = [json.dumps(scripts), str(folder), str(Path(__file__).parent), json.dumps(chosen)]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, *told],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    texts = {name: (folder / f"{name}.json").read_text() for name in scripts}
    assert all(texts.values()), run.stderr
    return {name: json.loads(text) for name, text in texts.items()}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return printed_by(SCRIPTS, CHOSEN, tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module", params=["chosen", pytest.param("all", marks=pytest.mark.soak)])
def reports(request, tmp_path_factory):
    if request.param == "chosen":
        return request.getfixturevalue("said")["reports"]
    scripts = {"reports": SCRIPTS["reports"]}
    return printed_by(scripts, [], tmp_path_factory.mktemp("all"))["reports"]


def test_every_configuration_of_an_autotuned_kernel_is_reported(said):
    names = [each["name"] for each in said["tuned"]["reports"]]
    assert [name.partition("[")[2].split(", num_ctas")[0] for name in names] == [
        f"BLOCK: {block}, num_warps: {warps}" for block in (256, 1024) for warps in (2, 4)
    ]
    assert "does not compile: _double_small [BLOCK: 2048, num" in said["tuned"]["not_compiled"]


def test_every_kernel_is_reported_and_its_machine_code_is_within_its_limits(reports):
    names = [each["name"] for each in reports["reports"]]
    assert names in (CHOSEN, [case.name for case in cases()])
    assert set(CHOSEN) <= set(names)
    assert reports["violations"] == []


def test_every_kernel_that_moves_kv_has_64_kib_per_sm_in_flight_in_each_loop_turn(reports):
    for each in reports["reports"]:
        name = each["name"]
        if any(word in name for word in ("scan", "page table", "wait", "merge")):
            continue
        assert each["programs_of_sm"] * each["flight_bytes"] >= 64 * 1024, name
        if not any(word in name for word in ("append", "heads of 64", "fp32")):
            assert each["flight_bytes"] >= 64 * 1024, name  # of a program
        if "bf16 to int8" in name:
            assert each["gb_per_s"]["device"] > 29  # of the kernel's prototype
        if "int8 to bf16" in name or "int8 to fp32" in name:
            assert each["gb_per_s"]["link"] > 12.7


def test_no_arguments_that_serving_passes_compile_a_second_variant(said):
    assert said["variants"] == dict.fromkeys(CHOSEN, 1)


LOOP = [
    line("S2R R2, SR_TID.X", lands_on=0),
    ".L_x_0",
    line("@P0 LDG.E.64 R2, desc[UR4][R0.64]", lands_on=0, waits_for=[0]),
    line("LDG.E.EF.128 R4, desc[UR4][R2.64]", lands_on=1, waits_for=[0]),
    line("LDG.E.EF.128 R8, desc[UR4][R2.64+0x10]", lands_on=2),
    line("MOV R12, R4", waits_for=[1]),
    line("STG.E.128 desc[UR4][R6.64], R8", waits_for=[2]),
    line("STG.E desc[UR4][R6.64], R12"),
    line("STL [R1], R4"),
    line("@!P1 BRA `(.L_x_0)"),
    line("BAR.SYNC.DEFER_BLOCKING 0x0"),
    line("EXIT"),
]
DESCRIBED = """
x
  payload loads 2 × 128 bit; stores 1 × 32 bit, 1 × 128 bit; index loads 1
  40 registers, 1 spills, 8 B stack, 64 B shared memory, 1 barriers, 11 instructions, 8 a turn
  in flight every turn: 4 KiB a program, 48 KiB an SM; 4 warps a program, 12 programs an SM
  a program: 4.86 GB/s at 700 ns, 2.84 GB/s at 1300 ns, 1.91 GB/s at 2000 ns; drained by \
MOV R12, R4"""


def read(lines, usage="REG:40 STACK:8 SHARED:0"):
    return codegen.read_sass("x", printed(*lines), usage, num_warps=4, shared_bytes=64)


def test_a_report_describes_machine_code():
    report = read(LOOP)
    assert codegen._described(report) == DESCRIBED
    report = dataclasses.replace(report, flight_bytes=0)
    assert "no steady loop: bytes in flight are not known; 4 warps" in codegen._described(report)
    report = read([line("EXIT")])
    assert codegen._described(report).endswith("a program: moves nothing")
    assert (report.flight_bytes, report.turn_instructions, report.drained_by) == (0, 0, "")
    with pytest.raises(RuntimeError, match=r"no REG:.* in the output of cuobjdump"):
        read([line("EXIT")], "")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"payload_loads": {64: 16}}, "payload loads of 128 bits"),
        ({"stores": {64: 8, 128: 4}}, "payload stores of 128 bits"),
        ({"registers": 200}, "at most 64 registers, got 200"),
        ({"stack_bytes": 8}, "at most 0 bytes of stack, got 8"),
        ({"spill_accesses": 1}, "at most 0 spill accesses"),
        ({"shared_bytes": 16}, "at most 0 bytes of shared memory"),
        ({"barriers": 2}, "at most 0 barriers"),
        ({"flight_bytes": 60 << 10, "programs_of_sm": 3}, "bytes in flight a program"),
        ({"programs_of_sm": 1}, "bytes in flight an SM"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_report_beyond_a_limit_is_a_violation_that_names_the_limit(change, sentence, reports):
    fields = dict(reports["reports"][0])
    for name in ("payload_loads", "stores"):
        fields[name] = {int(bits): count for bits, count in fields[name].items()}
    report, limits = codegen.Report(**fields), cases()[0].limits
    assert report.violations(limits) == []
    (violation,) = dataclasses.replace(report, **change).violations(limits)
    assert sentence in violation
    no_width = dataclasses.replace(limits, payload_bits=None)
    found = dataclasses.replace(report, **change).violations(no_width)
    assert len(found) == ("of 128 bits" not in sentence)


def test_users_kernels_are_reported_at_their_sizes(said):
    reports = said["own"]["reports"]
    assert [report["flight_bytes"] for report in reports] == [64 * 1024] * 2
    (report,) = said["oracle"]["reports"]
    assert report["name"] == "_decode_kernel, 8 heads, 4,096 tokens"
    assert report["spill_accesses"] == 0 < report["payload_loads"]["128"]


def test_codegen_refuses_to_run_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"):
        codegen.compile_case(cases()[0])


@pytest.mark.parametrize(
    ("arguments", "code", "violations"),
    [
        ([], 1, "x: at most 0 bytes of stack, got 8"),
        (["--kernel", "mine"], 0, ""),  # is held to no limit
        (["--kernel", "other"], 2, ""),
    ],
)
def test_the_command_prints_reports_and_whether_limits_hold(
    arguments, code, violations, monkeypatch, capsys
):
    def launched_by(name):
        if name != "mine":
            raise ValueError(f"no kernel {name}")
        return [read(LOOP)]

    monkeypatch.setattr(codegen, "cases", lambda: cases()[:1])
    monkeypatch.setattr(codegen, "compile_case", lambda case: read(LOOP))
    monkeypatch.setattr(codegen, "launched_by", launched_by)
    for form in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["codegen", *arguments, *form])
        assert codegen.main() == code
        said = capsys.readouterr()
        if code == 2:
            assert (said.out, said.err) == ("", "no kernel other\n")
        elif form:
            document = json.loads(said.out)
            assert [each["name"] for each in document["reports"]] == ["x"]
            assert (violations in document["violations"]) is bool(violations)
        else:
            assert said.out.startswith("triton ")
            assert DESCRIBED in said.out
            assert violations in said.out
    monkeypatch.setattr(codegen, "cases", list)
    monkeypatch.setattr("sys.argv", ["codegen"])
    assert codegen.main() == 0
    assert capsys.readouterr().out.endswith("\nall limits hold\n")


def test_a_kernel_that_launches_nothing_is_refused_with_its_reasons(monkeypatch):
    def declining(src, dst):
        assert len(src) == len(dst) == 2
        raise ValueError("too wide")

    driver = SimpleNamespace(loaded=[], not_compiled=[])
    monkeypatch.setattr(codegen, "stand_in", lambda: driver)
    reasons = "; ".join(f"{shape}: too wide" for shape in codegen.SHAPES)
    for kernel, sentence in (
        (declining, reasons),
        (lambda src, dst: lambda src_ids, dst_ids: None, "nothing is known"),
    ):
        monkeypatch.setattr(codegen, "named", {"mine:it": kernel}.__getitem__)
        with pytest.raises(ValueError, match=f"^mine:it launched no kernel: {sentence}$"):
            codegen.launched_by("mine:it")


def test_a_failed_cuda_tool_is_an_error_with_its_message(monkeypatch, tmp_path):
    monkeypatch.setattr(codegen, "TOOLS", tmp_path)
    (tmp_path / "bad").write_text("#!/bin/sh\necho ' its words ' >&2; exit 3\n")
    (tmp_path / "bad").chmod(0o755)
    with pytest.raises(RuntimeError, match=r"^bad failed: its words$"):
        codegen._tool("bad")
