"""The check of a user's copy kernel finds planted faults, names them, and passes right kernels."""

import re
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
import wrong_copies

from hicache.workbench import check as check_module
from hicache.workbench import contract
from hicache.workbench.check import _programs_in_order, check, main
from hicache.workbench.check_cases import GUARD_BYTES, LAYOUTS, Case, Pool, Round, cases
from hicache.workbench.check_faults import Seen

HERE = Path(__file__).parent
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not used")


@pytest.mark.usefixtures("in_the_examples")
def test_right_copy_kernels_pass_the_check():
    verdict = check(wrong_copies.right, num_cases=12, seed=1)
    assert verdict.passes
    assert verdict.num_right + len(verdict.declined) == 12
    assert check(contract.named("my_copy:my_copy"), num_cases=6).passes
    assert "right in" in str(verdict)


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("missing", "missing", "never written"),
        ("stray", "stray", "in the guard behind the target pool"),
        ("stale", "stale", "the ids of an earlier launch"),
        ("overlap", "overlap", "belong to another place"),
        ("hole", "stray", "which is no target"),
        ("stale_content", "stale", "are of an earlier launch"),
        ("source_eater", "stray", "the source was written to"),
        ("raising", "raised", "by zero (wrong_copies.py, line "),
    ],
)
def test_a_planted_fault_is_found_and_named(name, kind, sentence):
    verdict = check(getattr(wrong_copies, name), num_cases=3, seed=1)
    assert not verdict.passes
    assert sentence in verdict.faults[kind].sentence
    on_record = (HERE / "verdicts.txt").read_text()
    printed = re.sub(r"line \d+", "line", str(verdict))
    assert f"{name}\n{printed}\n\n" in on_record
    if name != "stray":  # what runs into the next item is wrong there as well
        assert list(verdict.faults) == [kind]


@triton.jit
def _masked_kernel(ids_ptr, SIZE: tl.constexpr):
    item = tl.arange(0, SIZE)
    mask = (item < 8) & (tl.load(ids_ptr) >= 0)  # a block and a number: Triton compiles it
    tl.store(ids_ptr + item, tl.load(ids_ptr + item, mask=mask, other=0), mask=mask)


def masked(src, dst, *, size):
    return lambda src_ids, dst_ids, *, num_programs=None: _masked_kernel[(1,)](src_ids, SIZE=size)


@pytest.mark.parametrize(
    ("kernel", "code", "sentence"),
    [
        (
            wrong_copies.picky,
            1,
            "^declined: 2 cases, the first case 0: .*moon wanted\nWRONG: it takes no case$",
        ),
        (
            wrong_copies.assembly,
            3,
            "cannot run; a GPU can. The first: case 0: .*\nright in 0 cases$",
        ),
        (wrong_copies.typo, 1, "no_such_operation"),
        (partial(masked, size=16), 3, "not checked: 2 cases"),  # the interpreter raises ValueError
        (partial(masked, size=15), 1, "raised: .*ValueError"),  # no power of two: the kernel's
    ],
)
def test_limits_of_the_interpreter_are_not_reported_as_faults_of_a_kernel(kernel, code, sentence):
    verdict = check(kernel, num_cases=2)
    assert (verdict.exit_code, verdict.passes) == (code, False)
    assert re.search(sentence, str(verdict), re.DOTALL)
    assert ("WRONG" in str(verdict)) is (code == 1)


def test_a_seed_draws_the_same_cases_and_faults_as_before():
    """So that a fault that was reported with its case and seed can be reproduced."""

    def place(pool):
        base = pool.arena.data_ptr()
        return [
            (b.dtype, tuple(b.shape), b.stride(), b.data_ptr() - base) for b in pool.buffers
        ] + [len(pool.arena)]

    drawn = [
        (case.name, place(case.src), place(case.dst), case.src is case.dst, case.rounds)
        for case in cases(120, 5)
    ]
    digest = sha256(repr(drawn).encode()).hexdigest()
    assert digest[:16] == "73fc51053797f022"
    names = {case.name.partition(": ")[2].partition(",")[0] for case in cases(40, 0)}
    assert names >= {f"{src} to {dst}" for src in LAYOUTS for dst in LAYOUTS}
    sentences = [str(check(wrong_copies.stray, num_cases=2, seed=seed)) for seed in (3, 3, 4)]
    assert sentences[0] == sentences[1] != sentences[2]


@triton.jit
def _last_wins_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@ON_CPU
def test_programs_of_an_interpreted_kernel_run_backwards_on_demand():
    out = torch.full((1,), -1, dtype=torch.int32)
    found = []
    for backwards in (False, True, False):
        with _programs_in_order(backwards=backwards):
            _last_wins_kernel[(4,)](out)
        found.append(int(out))
    assert found == [3, 0, 3]


@ON_CPU
@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        ("my_copy:my_copy", 0, "right in 1 cases"),
        ("wrong_copies:deadly", 1, "^died: case 0: layer first to layer first.*signal 11"),
    ],
)
def test_the_command_runs_a_kernel_in_a_process_of_its_own(
    name, code, sentence, in_the_examples, monkeypatch, capfd
):
    if name.startswith("wrong"):
        monkeypatch.chdir(HERE)
    assert main([name, "--cases", "1"]) == code
    assert re.search(sentence, capfd.readouterr().out)


@pytest.mark.usefixtures("in_the_examples")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my_copy:absent", "no kernel my_copy:absent, expected module:attribute: "),
        ("absent_file:my_copy", "no kernel absent_file:my_copy"),
        ("my_copy:BLOCK", "must be a function of two pools or a class with an oracle, got int"),
        ("unknown", "no kernel unknown, expected module:attribute"),
        ("", "no kernel , expected module:attribute"),
    ],
)
def test_a_name_without_a_kernel_is_refused(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        contract.named(name)


def test_the_process_of_a_check_writes_its_last_case_and_prints_progress(
    in_the_examples, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(check_module, "PROGRESS_S", 0)
    last = tmp_path / "last"
    inside = ["--device", "cpu", "--inside", str(last)]
    assert main(["my_copy:my_copy", "--cases", "2", "--seed", "4", *inside]) == 0
    said, names = capsys.readouterr(), [case.name for case in cases(2, 4)]
    assert said.out == "my_copy:my_copy on cpu, seed 4\nright in 2 cases\n"
    assert said.err.splitlines() == [f"{name} (of 2 cases)" for name in names]
    assert last.read_text() == names[-1]
    assert main(["my_copy:absent", *inside]) == 2
    refused = capsys.readouterr()
    assert (refused.out, refused.err[:25]) == ("", "no kernel my_copy:absent,")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (-11, 1)])
def test_check_returns_the_exit_code_of_its_process(code, status, device, monkeypatch, capsys):
    ran = []

    def run(command, *, env, check):
        ran.append((command[:-1], env.get("TRITON_INTERPRET"), env["TRITON_DEFAULT_FP_FUSION"]))
        if device == "cpu":
            Path(command[-1]).write_text("case 7")
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(check_module.subprocess, "run", run)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    given = ["x:y", "--cases", "5", "--device", device]
    assert main(given) == status
    command = [sys.executable, "-m", "hicache.workbench.check", *given, "--inside"]
    assert ran == [(command, "1" if device == "cpu" else None, "1")]
    where = "case 7" if device == "cpu" else "before the first case"
    died = f"died: {where}: signal 11, as of a load or store outside of all memory\n"
    assert capsys.readouterr().out == (died if code < 0 else "")


EACH = Round("2 ids random", (1, 0), (2, 0), 3)


def seen(changes, each=EACH, earlier=()):
    """What a right launch left (4 items of 32 bytes, 48 apart), with target bytes changed."""
    pools = []
    for content in (1, 2):
        arena = torch.full((2 * GUARD_BYTES + 4 * 48,), content, dtype=torch.uint8)
        items = arena[GUARD_BYTES:-GUARD_BYTES].view(4, 48)[:, :32]
        pools.append(Pool(arena=arena, buffers=(items,)))
    src, dst = pools
    src.buffers[0].copy_(torch.arange(128).view(4, 32))
    case = Case(name="x", src=src, dst=dst, rounds=(each,))
    before = dst.arena.clone()
    for source, target in zip(each.src_ids, each.dst_ids, strict=True):
        if min(source, target) >= 0:
            dst.buffers[0][target] = src.buffers[0][source]
    for place, value in changes.items():
        dst.arena[GUARD_BYTES + place] = value
    return Seen(case, each, src.arena.clone(), before, dst.arena, earlier)


END = 4 * 48


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({}, None, ""),
        ({-1: 9, -2: 9}, "stray", "2 bytes changed in the guard before the target pool"),
        ({END: 9}, "stray", "1 bytes changed in the guard behind the target pool"),
        ({48: 9}, "stray", "1 bytes changed in buffer 0, item 1, which is no target"),
        ({32: 9}, "stray", "1 bytes changed between the items of the target pool"),
        ({4 * 48 - 1: 9}, "stray", "1 bytes changed between the items of the target pool"),
        ({96 + 9: 255}, "wrong", "buffer 0, item 2: 8 bytes in all are neither old nor of"),
        (dict.fromkeys(range(96, 112), 2), "missing", "buffer 0, item 2: 16 bytes in all were"),
        (
            {place: 96 + place for place in range(8)},
            "overlap",
            "buffer 0, item 0: 8 bytes in all belong to another place",
        ),
    ],
)
def test_a_fault_is_reported_with_its_item_and_the_number_of_wrong_bytes(changes, kind, sentence):
    faults = seen(changes).faults()
    assert [each.kind for each in faults] == [kind] * (kind is not None)
    if kind is not None:
        assert faults[0].sentence.startswith(f"x; 2 ids random, 3 programs: {sentence}")


def test_a_change_of_a_pools_first_byte_is_not_attributed_to_its_guard():
    (fault,) = seen({0: 9}, each=Round("1 id", (1,), (2,), None)).faults()
    place = "1 bytes changed in buffer 0, item 0, which is no target"
    assert fault.sentence == f"x; 1 id, its own programs: {place}"


@pytest.mark.parametrize("place", [0, 1])
def test_a_kernel_that_writes_to_its_ids_fails_the_check(place):
    def eater(src, dst):
        def launch(*ids, num_programs=None):
            wrong_copies.right(src, dst)(*ids)
            ids[place].fill_(-1)

        return launch

    verdict = check(eater, num_cases=3, seed=1)
    assert list(verdict.faults) == ["stray"]
    assert verdict.faults["stray"].sentence.endswith(": the ids were written to")


def test_a_repetition_of_an_earlier_launch_is_reported_as_stale():
    other = Round("1 id", (3,), (1,), None)
    first = seen({})
    content = torch.full_like(first.src_before, 77)
    # what was asked for earlier is done again, in place of what is asked for now
    again = seen({}, each=other)
    launch = seen({}, earlier=[(other, content)])
    launch.got = again.got
    assert [each.kind for each in launch.faults()] == ["stale"]
    assert "the ids of an earlier launch (1 id) moved" in launch.faults()[0].sentence
    launch.got = launch._copied(other, content)
    assert "the bytes of an earlier launch were written again" in launch.faults()[0].sentence
    # of one target, words of that time
    past = dict.fromkeys(range(8, 24), 77)
    (fault,) = seen(past, earlier=[(other, content)]).faults()
    assert fault.kind == "stale"
    assert "buffer 0, item 0: 16 bytes in all are of an earlier launch" in fault.sentence
