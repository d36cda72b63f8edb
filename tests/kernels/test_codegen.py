"""Machine code of the kernels, compiled for sm_90 without a GPU.

Compilation needs processes without TRITON_INTERPRET, so each test here reads what one printed.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.workbench import codegen, scoreboard, stand_in
from hicache.workbench.codegen_cases import cases

# compiles the copy kernel once for each `tl.multiple_of` in it, with that one deleted; then as it
# is, for launches whose arguments differ in every way that serving makes them differ
VARIANTS = """
import ast, dataclasses, importlib.util, inspect, json, sys
from pathlib import Path
import torch
from triton import language as tl
from hicache.kernels import copy
from hicache.workbench import codegen
from hicache.workbench.codegen_cases import cases
from hicache.workbench.bench import peers

class Delete(ast.NodeTransformer):
    def __init__(self, wanted):
        self.wanted, self.seen = wanted, 0
    def visit_Call(self, node):
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "multiple_of"):
            return node
        self.seen += 1
        return node.args[0] if self.seen == self.wanted else node

case = cases()[0]
violations, wanted = {}, 0
while True:
    delete = Delete(wanted)
    source = ast.unparse(delete.visit(ast.parse(inspect.getsource(copy))))
    if wanted > delete.seen:
        break
    path = folder / f"copy_without_{wanted}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report = codegen.compile_case(case._replace(kernel=module._copy_kernel))
    violations[wanted] = report.violations(case.limits)
    wanted += 1

pieces, ids = torch.zeros(64, 6, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
compiled = {}
def launch(case, *arguments):
    kernel = case.kernel.warmup(*arguments, grid=(8,), **case.constants)
    compiled.setdefault(case.name, set()).add(kernel.hash)

def is_stride(case, value):  # of a pool or of weights, of which a model has a few
    tensors = [each for each in case.arguments if isinstance(each, torch.Tensor)]
    strides = [stride for each in tensors for stride in each.stride()]
    has_strides = any(word in case.name for word in ("append", "attention", "scan"))
    return has_strides and value in strides

for case in cases():
    for number in (1, 16, 17, 1 << 20):  # where a number of things stands, an odd one and others
        for start in (0, 1):  # where a tensor stands, one that begins on no round address
            launch(case, *(
                number if isinstance(each, int) and not is_stride(case, each)
                else each[start:] if isinstance(each, torch.Tensor) and each.dtype == torch.int32
                else each
                for each in case.arguments
            ))
sys.path.insert(0, sys.argv[3])
import loops

def loop(kernel, words):
    report = codegen.compile_case(case._replace(
        name="loop", kernel=kernel, arguments=(pieces, 64),
        constants={"WORDS": words, "num_warps": 8},
    ))
    return dataclasses.asdict(report) | {"violations": report.violations(case.limits)}

case = cases()[0]
two_deep = loop(loops.two_deep_kernel, 4096)
staged = loop(loops.staged_kernel, 2048)
peer = peers._pointer_copy_kernel.warmup(
    pieces, pieces, pieces, 64, WORD=tl.int16, BLOCK=8192, grid=(8,), num_warps=8
)
two_byte_stores = peer.asm["ptx"].count("st.global.b16")
print(json.dumps({
    "violations": violations,
    "compiled": {name: len(each) for name, each in compiled.items()},
    "two_byte_stores": two_byte_stores,
    "two_deep": two_deep,
    "staged": staged,
}))
"""
NUM_PROMISES = 5  # source and target address, source and target offset, number of words


WARM = """
import json, torch
from hicache.kernels import copy, copy_table, index, ops
from hicache.workbench.stand_in import stand_in

driver = stand_in()
kernels = copy._copy_kernel, index._page_table_kernel
def num_compiled():
    return [len(kernel.device_caches[0][0]) for kernel in kernels]

table = copy_table([torch.zeros(9, 4096)], [torch.zeros(9, 4096)])
ops.warm_up(table)
warm, loaded = num_compiled(), len(driver.loaded)
driver.num_launches = 0
for start in range(4):
    ids = torch.arange(8, dtype=torch.int32)[start:]
    copy.copy_items(table, ids, ids)
    copy.copy_items_with_checksum(table, ids, ids)
    index.page_table(ids, ids[:2].view(1, 2), ids[:2], num_columns=3 + start)
print(json.dumps({
    "warm": warm, "served": num_compiled(), "launches": driver.num_launches,
    "loaded": [loaded, len(driver.loaded)],
}))
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
    "token rows of 256 B (1 head × 128 × bf16)",
    "pages with checksum",
    "bf16 to int8, pages of 16 × 8 heads",
    "bf16 to fp4, pages of 16 × 8 heads",
    "load-back of pages, states and taps",
    "load-back of int8 to bf16, pages of 16 × 8 heads",
    "load-back of fp4 to fp32, states",
    "wait for a layer",
    "append to pages of 16 × 8 heads",
    "decode attention, pages of 64 × 8 heads",
    "merge of splits, decode",
    "prefill attention, heads of 192",
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
        "sys.argv[1:] = ['--json', '--kernel', 'hicache.workbench.contract:ours']; codegen.main()"
    ),
    "oracle": (
        "os.chdir(sys.argv[3] + '/../../docs/examples'); "
        "sys.argv[1:] = ['--json', '--kernel', 'my_attention:Decode']; codegen.main()"
    ),
    "tuned": TUNED,
    "variants": VARIANTS,
    "warm": WARM,
}


def printed_by(scripts, chosen, folder):
    """What each of the scripts printed."""
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


def test_every_configuration_of_an_autotuned_kernel_is_read(said):
    names = [each["name"] for each in said["tuned"]["reports"]]
    assert [name.partition("[")[2].split(", num_ctas")[0] for name in names] == [
        f"BLOCK: {block}, num_warps: {warps}" for block in (256, 1024) for warps in (2, 4)
    ]
    assert "does not compile: _double_small [BLOCK: 2048, num" in said["tuned"]["not_compiled"]


@pytest.fixture(scope="module")
def variants(said):
    return said["variants"]


@pytest.fixture
def without_a_promise(variants):
    return variants["violations"]


def test_every_kernel_keeps_its_limits(reports):
    assert reports["violations"] == []


def test_every_case_is_reported(reports):
    names = [each["name"] for each in reports["reports"]]
    assert names in (CHOSEN, [case.name for case in cases()])
    assert set(CHOSEN) <= set(names)


def named_with(reports, *words):
    """The reports of cases with one of these words in their name."""
    found = [r for r in reports["reports"] if any(word in r["name"] for word in words)]
    assert found, words
    return found


def test_every_plain_copy_moves_128_bits_at_a_time_through_registers_alone(reports):
    for report in named_with(reports, "Mamba slots", "token rows", "of 4 KiB", "2 of 8 heads"):
        assert list(report["payload_loads"]) == list(report["stores"]) == ["128"]
        assert report["shared_bytes"] == report["barriers"] == 0
        assert report["programs_of_sm"] == 2


def test_nothing_spills(reports):
    for report in reports["reports"]:
        assert report["spill_accesses"] == report["stack_bytes"] == 0, report["name"]


def test_the_copy_kernel_with_all_promises_passes(without_a_promise):
    assert without_a_promise["0"] == []


@pytest.mark.parametrize("promise", range(1, NUM_PROMISES + 1))
def test_deleting_an_alignment_promise_breaks_a_limit(promise, without_a_promise):
    assert any("of 128 bits" in sentence for sentence in without_a_promise[str(promise)])


def test_no_promise_goes_untested(without_a_promise):
    assert len(without_a_promise) == 1 + NUM_PROMISES


def test_no_launch_compiles_a_second_variant(variants):
    assert set(variants["compiled"]) == set(CHOSEN)
    assert set(variants["compiled"].values()) == {1}


def test_the_two_byte_peer_moves_two_bytes_at_a_time(variants):
    assert variants["two_byte_stores"] > 0


def test_every_kernel_that_moves_kv_has_64_kib_an_sm_in_flight_in_every_turn(reports):
    others = named_with(reports, "scan", "page table", "wait", "merge")
    for each in (each for each in reports["reports"] if each not in others):
        assert each["programs_of_sm"] * each["flight_bytes"] >= 64 * 1024, each["name"]
        if not any(word in each["name"] for word in ("append", "heads of 64", "fp32")):
            assert each["flight_bytes"] >= 64 * 1024, each["name"]  # of a program


def test_every_coded_copy_is_at_least_as_fast_as_its_prototype(reports):
    for report in named_with(reports, "bf16 to int8"):
        assert report["gb_per_s"]["device"] > 29
    for report in named_with(reports, "int8 to bf16", "int8 to fp32"):
        assert report["gb_per_s"]["link"] > 12.7


def test_the_loop_that_drains_every_turn_is_refused(variants):
    report = variants["two_deep"]
    assert report["payload_loads"] == {"128": 16}  # in the text, two tiles are on their way
    assert report["flight_bytes"] == 32 * 1024
    assert "MOV" in report["drained_by"]
    assert any("65536 bytes in flight a program" in each for each in report["violations"])


def test_a_pipeline_through_shared_memory_is_followed(variants):
    report = variants["staged"]
    assert report["flight_bytes"] == 3 * 16 * 1024
    assert set(report["payload_loads"]) == {"128"}
    assert report["shared_bytes"] == 3 * 16 * 1024


def control(stall=1, lands_on=7, is_read_on=7, waits_for=0):
    return stall | lands_on << 5 | is_read_on << 8 | waits_for << 11


def disassembly(*lines):
    text = ""
    for place, line in enumerate(lines):
        if isinstance(line, str):
            text += f"{line}:\n"
            continue
        words, control_codes = line
        text += f"        /*{16 * place:04x}*/  {words} ; /* 0x{0:016x} */\n"
        text += f"                                 /* 0x{control_codes << 41:016x} */\n"
    return text


LOOP = [
    ("S2R R2, SR_TID.X", control(lands_on=0)),
    ".L_x_0",
    ("@P0 LDG.E.64 R2, desc[UR4][R0.64]", control(lands_on=0, waits_for=1)),
    ("LDG.E.EF.128 R4, desc[UR4][R2.64]", control(lands_on=1, waits_for=1)),
    ("LDG.E.EF.128 R8, desc[UR4][R2.64+0x10]", control(lands_on=2)),
    ("MOV R12, R4", control(waits_for=2)),
    ("STG.E.128 desc[UR4][R6.64], R8", control(waits_for=4)),
    ("STG.E desc[UR4][R6.64], R12", control()),
    ("STL [R1], R4", control()),
    ("@!P1 BRA `(.L_x_0)", control()),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", control()),
    ("EXIT", control()),
]


def test_a_disassembly_is_counted_and_walked():
    report = codegen.read_sass(
        "x", disassembly(*LOOP), "REG:40 STACK:8 SHARED:0", num_warps=4, shared_bytes=64
    )
    gb_per_s = report.gb_per_s
    assert report == codegen.Report(
        name="x",
        num_warps=4,
        payload_loads={128: 2},
        stores={128: 1, 32: 1},
        index_loads=1,
        registers=40,
        stack_bytes=8,
        spill_accesses=1,
        shared_bytes=64,
        barriers=1,
        num_instructions=11,
        programs_of_sm=12,
        flight_bytes=32 * 128,
        turn_instructions=8,
        gb_per_s=gb_per_s,
        drained_by="MOV R12, R4",
    )
    # a turn: ids, then words; nothing of it overlaps
    for where, latency in codegen.LATENCIES_NS.items():
        assert gb_per_s[where] == pytest.approx(32 * 128 / (latency + 140), rel=0.02)


DESCRIBED = """
x
  payload loads 2 × 128 bit; stores 1 × 32 bit, 1 × 128 bit; index loads 1
  40 registers, 1 spills, 8 B stack, 64 B shared memory, 1 barriers, 11 instructions, 8 a turn
  in flight every turn: 4 KiB a program, 48 KiB an SM; 4 warps a program, 12 programs an SM
  a program: 4.86 GB/s at 700 ns, 2.84 GB/s at 1300 ns, 1.91 GB/s at 2000 ns; drained by \
MOV R12, R4"""


def test_a_report_is_described():
    sizes = {"num_warps": 4, "shared_bytes": 64}
    report = codegen.read_sass("x", disassembly(*LOOP), "REG:40 STACK:8 SHARED:0", **sizes)
    assert codegen._described(report) == DESCRIBED
    report = dataclasses.replace(report, flight_bytes=0)
    assert "no steady loop: bytes in flight are not known; 4 warps" in codegen._described(report)
    still = [("EXIT", control())]
    report = codegen.read_sass("y", disassembly(*still), "REG:9 STACK:0 SHARED:0", **sizes)
    assert codegen._described(report).endswith("a program: moves nothing")
    assert (report.flight_bytes, report.turn_instructions, report.drained_by) == (0, 0, "")
    with pytest.raises(RuntimeError, match=r"no REG:.* in the output of cuobjdump"):
        codegen.read_sass("z", disassembly(*still), "", **sizes)


def test_a_load_whose_register_is_written_again_is_no_payload():
    again = [
        ("LDG.E.128 R4, desc[UR4][R2.64]", control(lands_on=0)),
        ("MOV R4, RZ", control(waits_for=1)),
        ("MOV R5, RZ", control()),
        ("STG.E.64 desc[UR4][R6.64], R4", control()),
        ("EXIT", control()),
    ]
    assert scoreboard.payload_of(scoreboard.read(disassembly(*again))) == set()
    kept = [again[0], ("@P0 MOV R4, RZ", control(waits_for=1)), *again[2:]]
    assert scoreboard.payload_of(scoreboard.read(disassembly(*kept))) == {0}


def test_words_are_followed_around_the_loop():
    carried = [
        ".L_x_0",
        ("STG.E.128 desc[UR4][R6.64], R4", control()),
        ("LDG.E.128 R8, desc[UR4][R2.64]", control(lands_on=0)),
        *((f"MOV R{4 + k}, R{8 + k}", control(waits_for=1)) for k in range(4)),
        ("@P0 BRA `(.L_x_0)", control()),
        ("EXIT", control()),
    ]
    assert scoreboard.payload_of(scoreboard.read(disassembly(*carried))) == {1}


def test_what_passes_no_register_is_refused():
    moved = [("UTMALDG.2D [UR8], [UR4]", control()), ("EXIT", control())]
    with pytest.raises(ValueError, match="the model knows no UTMALDG"):
        scoreboard.steady(scoreboard.read(disassembly(*moved)), set(), num_warps=1, payload_ns=700)


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared_bytes", "wanted"),
    [(64, 16, 0, 2), (65, 16, 0, 1), (32, 8, 0, 8), (32, 4, 48 << 10, 4), (16, 1, 0, 32)],
)
def test_programs_of_a_multiprocessor(registers, num_warps, shared_bytes, wanted):
    got = scoreboard.programs_of_sm(
        registers=registers, num_warps=num_warps, shared_bytes=shared_bytes
    )
    assert got == wanted


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"payload_loads": {64: 16}}, "payload loads of 128 bits"),
        ({"stores": {64: 8, 128: 4}}, "payload stores of 128 bits"),
        ({"registers": 200}, "at most 64 registers, got 200"),
        ({"spill_accesses": 1}, "at most 0 spill accesses"),
        ({"shared_bytes": 16}, "at most 0 bytes of shared memory"),
        ({"barriers": 2}, "at most 0 barriers"),
        ({"flight_bytes": 60 << 10, "programs_of_sm": 3}, "bytes in flight a program"),
        ({"programs_of_sm": 1}, "bytes in flight an SM"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_each_limit_can_be_broken(change, sentence, reports):
    fields = dict(reports["reports"][0])
    for name in ("payload_loads", "stores"):
        fields[name] = {int(bits): count for bits, count in fields[name].items()}
    report = codegen.Report(**fields)
    limits = cases()[0].limits
    assert report.violations(limits) == []
    (violation,) = dataclasses.replace(report, **change).violations(limits)
    assert sentence in violation


def test_a_kernel_of_ones_own_is_described(said):
    reports = said["own"]["reports"]
    assert len(reports) == 4
    assert {report["flight_bytes"] for report in reports} == {64 * 1024}


def test_a_kernel_with_an_oracle_is_described_at_its_own_sizes(said):
    (report,) = said["oracle"]["reports"]
    assert report["name"] == "_decode_kernel, 8 heads, 4,096 tokens"
    assert report["spill_accesses"] == 0 < report["payload_loads"]["128"]


def test_nothing_is_compiled_or_loaded_after_a_warm_up(said):
    found = said["warm"]
    assert found["launches"] == 4 * 3
    assert found["served"] == found["warm"] == [2, 1]  # copies with and without checksums
    assert found["loaded"] == [3, 3]


def test_codegen_refuses_to_run_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"):
        codegen.compile_case(cases()[0])


@pytest.fixture
def described(monkeypatch, capsys):
    """Runs the command on reports that are given, and returns its exit code and what it printed."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["codegen", *arguments])
        return codegen.main(), capsys.readouterr()

    sizes = {"num_warps": 4, "shared_bytes": 64}
    usage = "REG:40 STACK:8 SHARED:0"
    report = codegen.read_sass("x", disassembly(*LOOP), usage, **sizes)
    monkeypatch.setattr(codegen, "cases", lambda: cases()[:1])
    monkeypatch.setattr(codegen, "compile_case", lambda case: report)
    monkeypatch.setattr(codegen, "launched_by", {"mine": [report]}.__getitem__)
    return run


def test_a_broken_limit_is_named_and_makes_the_exit_code_1(described):
    code, printed = described()
    assert code == 1
    assert DESCRIBED in printed.out
    assert "x: at most 0 bytes of stack, got 8" in printed.out
    code, printed = described("--json")
    assert code == 1
    assert "x: at most 0 bytes of stack, got 8" in json.loads(printed.out)["violations"]


def test_a_kernel_of_ones_own_is_held_to_no_limit(described, monkeypatch):
    code, printed = described("--kernel", "mine")
    assert code == 0
    assert printed.out.endswith(DESCRIBED + "\n")

    def refuse(name):
        raise ValueError(f"no kernel {name}")

    monkeypatch.setattr(codegen, "launched_by", refuse)
    code, printed = described("--kernel", "other")
    assert (code, printed.err) == (2, "no kernel other\n")


def test_a_case_is_compiled_for_the_stand_in_and_read(monkeypatch):
    asked = []

    def warmup(*arguments, **more):
        asked.append((arguments, more))
        metadata = SimpleNamespace(num_warps=8, shared=96)
        return SimpleNamespace(asm={"cubin": b"code"}, metadata=metadata)

    case = cases()[0]._replace(
        name="mine", kernel=SimpleNamespace(warmup=warmup), arguments=(1, 2), constants={"B": 3}
    )
    monkeypatch.setattr(codegen, "stand_in", lambda: asked.append("stand in"))
    monkeypatch.setattr(codegen, "read_cubin", lambda loaded: loaded)
    assert codegen.compile_case(case) == stand_in.Loaded("mine", b"code", 8, 96)
    assert asked == ["stand in", ((1, 2), {"grid": (8,), "B": 3})]


def launched(monkeypatch, kernel):
    """What is read of a kernel that leaves its launches with a driver."""
    driver = SimpleNamespace(loaded=[], not_compiled=[])
    monkeypatch.setattr(codegen, "stand_in", lambda: driver)
    monkeypatch.setattr(codegen, "named", lambda name: kernel(driver, name))
    monkeypatch.setattr(codegen, "read_cubin", lambda loaded: loaded)
    return codegen.launched_by("mine:it")


def test_each_launch_over_each_shape_is_read_and_what_is_declined_is_left_out(monkeypatch):
    asked = []

    def kernel(driver, name):
        assert name == "mine:it"

        def prepare(src, dst):
            if len(asked) == 1:
                asked.append(None)
                raise NotImplementedError("not these")

            def launch(src_ids, dst_ids):
                asked.append((src_ids.tolist(), dst_ids.tolist()))
                assert len(src) == len(dst) == 2
                assert all(len(buffer) == 8 for buffer in (*src, *dst))
                for part in ("one", "two"):
                    driver.loaded.append(stand_in.Loaded(part, b"", 4, 0))

            return launch

        return prepare

    reports = launched(monkeypatch, kernel)
    shapes = list(codegen.SHAPES)
    del shapes[1]
    assert [each.name for each in reports] == [
        f"{part}, {shape}" for shape in shapes for part in ("one", "two")
    ]
    ids = list(range(8))
    assert [each for each in asked if each] == [(ids, ids[::-1])] * 3


def test_a_kernel_that_launches_nothing_is_refused_with_its_reasons(monkeypatch):
    def declining(driver, name):
        def prepare(src, dst):
            raise ValueError("too wide")

        return prepare

    reasons = "; ".join(f"{shape}: too wide" for shape in codegen.SHAPES)
    with pytest.raises(ValueError, match=f"^mine:it launched no kernel: {reasons}$"):
        launched(monkeypatch, declining)
    with pytest.raises(ValueError, match=r"^mine:it launched no kernel: nothing is known$"):
        launched(monkeypatch, lambda *_: lambda src, dst: lambda src_ids, dst_ids: None)


def test_a_cubin_is_read_by_the_tools_of_triton(monkeypatch):
    asked = []

    def tool(name, *arguments):
        asked.append((name, *arguments[:-1]))
        assert Path(arguments[-1]).read_bytes() == b"code"
        return f"said by {name}"

    monkeypatch.setattr(codegen, "_tool", tool)
    monkeypatch.setattr(codegen, "read_sass", lambda *given, **more: (given, more))
    given, more = codegen.read_cubin(stand_in.Loaded("mine", b"code", 8, 96))
    assert given == ("mine", "said by nvdisasm", "said by cuobjdump")
    assert more == {"num_warps": 8, "shared_bytes": 96}
    assert asked == [("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-hex", "-c")]


def test_a_tool_that_fails_is_an_error_with_its_words(monkeypatch, tmp_path):
    monkeypatch.setattr(codegen, "TOOLS", tmp_path)
    for name, text in (("good", 'echo "$1 $2"'), ("bad", "echo ' its words ' >&2; exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert codegen._tool("good", "-a", "b") == "-a b\n"
    with pytest.raises(RuntimeError, match=r"^bad failed: its words$"):
        codegen._tool("bad")


def test_what_holds_is_said(described, monkeypatch):
    report = codegen.compile_case(None)
    limits = dataclasses.replace(cases()[0].limits, payload_bits=None)
    assert len(report.violations(limits)) > 2  # none of them of the width of accesses
    assert not [each for each in report.violations(limits) if "bits" in each]
    monkeypatch.setattr(codegen.Report, "violations", lambda self, limits: [])
    code, printed = described()
    assert code == 0
    assert printed.out.startswith("triton ")
    assert printed.out.endswith("\nall limits hold\n")
    code, printed = described("--json")
    document = json.loads(printed.out)
    assert (code, document["violations"]) == (0, [])
    assert [each["name"] for each in document["reports"]] == ["x"]


def test_the_tools_are_where_triton_has_them():
    assert (codegen.TOOLS / "nvdisasm").is_file()
    assert (codegen.TOOLS / "cuobjdump").is_file()
