"""The check of a user's copy kernel: what is planted is found and named, what is right passes."""

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

from hicache.workbench import contract
from hicache.workbench.check import Verdict, _programs_in_order, check, main
from hicache.workbench.check_cases import GUARD_BYTES, LAYOUTS, Case, Pool, Round, cases
from hicache.workbench.check_faults import Fault, Seen, fault_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def in_the_examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(EXAMPLES)


def test_a_right_kernel_passes():
    verdict = check(wrong_copies.right, num_cases=12, seed=1)
    assert verdict.passes
    assert verdict.num_right + len(verdict.declined) == 12
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
    on_record = (Path(__file__).parent / "verdicts.txt").read_text()
    told = re.sub(r"line \d+", "line", str(verdict))
    assert f"{name}\n{told}\n\n" in on_record
    if name != "stray":  # what runs into the next item is wrong there as well
        assert list(verdict.faults) == [kind]


def test_a_kernel_that_takes_nothing_does_not_pass():
    verdict = check(wrong_copies.picky, num_cases=3)
    assert not verdict.passes
    assert len(verdict.declined) == 3
    assert "it takes no case" in str(verdict)


def test_what_the_interpreter_cannot_run_is_not_called_wrong(monkeypatch, capfd):
    verdict = check(wrong_copies.assembly, num_cases=2)
    assert not verdict.passes
    assert not verdict.faults
    assert len(verdict.unchecked) == 2
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["wrong_copies:assembly", "--cases", "2"]) == 3
    said = capfd.readouterr().out
    assert "not checked: 2 cases, which the interpreter cannot run" in said
    assert "WRONG" not in said


@triton.jit
def _masked_kernel(ids_ptr, SIZE: tl.constexpr):
    item = tl.arange(0, SIZE)
    mask = (item < 8) & (tl.load(ids_ptr) >= 0)  # a block and a number: Triton compiles it
    tl.store(ids_ptr + item, tl.load(ids_ptr + item, mask=mask, other=0), mask=mask)


def masked(src, dst, *, size):
    return lambda src_ids, dst_ids, *, num_programs=None: _masked_kernel[(1,)](src_ids, SIZE=size)


@pytest.mark.parametrize(("size", "code"), [(16, 3), (15, 1)])  # 15 is no power of two
def test_a_value_error_is_the_kernels_unless_the_interpreter_raised_it(size, code):
    assert check(partial(masked, size=size), num_cases=2).exit_code == code


def test_a_mistake_in_a_kernel_is_not_the_interpreters():
    verdict = check(wrong_copies.typo, num_cases=1)
    assert "no_such_operation" in verdict.faults["raised"].sentence
    assert (verdict.exit_code, verdict.unchecked) == (1, [])


def test_the_first_cases_go_through_every_pair_of_layouts():
    names = {case.name.partition(": ")[2].partition(",")[0] for case in cases(40, 0)}
    assert names >= {f"{src} to {dst}" for src in LAYOUTS for dst in LAYOUTS}


def test_a_seed_draws_the_cases_on_record():
    """So that a fault that was reported with a case and a seed is found again."""

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


def test_the_same_seed_draws_the_same_faults():
    sentences = [str(check(wrong_copies.stray, num_cases=4, seed=3)) for _ in range(2)]
    assert sentences[0] == sentences[1]
    assert sentences[0] != str(check(wrong_copies.stray, num_cases=4, seed=4))


@triton.jit
def _last_wins_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="an order only the interpreter has")
def test_programs_run_backwards_on_demand():
    out = torch.full((1,), -1, dtype=torch.int32)
    found = []
    for backwards in (False, True, False):
        with _programs_in_order(backwards=backwards):
            _last_wins_kernel[(4,)](out)
        found.append(int(out))
    assert found == [3, 0, 3]


def test_the_example_of_the_docs_is_right(in_the_examples):
    assert check(contract.named("my_copy:my_copy"), num_cases=12).passes


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU makes of it is its own affair")
def test_a_kernel_that_ends_the_process_is_named_with_its_case(monkeypatch, capfd):
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["wrong_copies:deadly", "--cases", "2"]) == 1
    said = capfd.readouterr().out
    assert said.startswith("died: case 0: layer first to layer first")
    assert "signal 11" in said


def test_the_command_of_the_docs_answers_with_its_exit_code(in_the_examples, capfd):
    assert main(["my_copy:my_copy", "--cases", "3"]) == 0
    assert "right in 3 cases" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my_copy:absent", "no kernel my_copy:absent"),
        ("absent_file:my_copy", "no kernel absent_file:my_copy"),
        ("my_copy:BLOCK", "must be a function of two pools or a class with an oracle, got int"),
        ("unknown", "no kernel unknown, expected module:attribute"),
        ("", "no kernel , expected module:attribute"),
    ],
)
def test_a_name_without_a_kernel_is_refused(name, sentence, in_the_examples):
    with pytest.raises(ValueError, match=sentence):
        contract.named(name)


def test_a_module_of_the_working_directory_comes_before_others(tmp_path, monkeypatch):
    for folder, answer in (("here", 1), ("elsewhere", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kernel_of_two_folders.py").write_text(
            f"def kernel(src, dst):\n    return {answer}\n"
        )
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "here")
    assert contract.named("kernel_of_two_folders:kernel")([], []) == 1


def test_a_check_inside_names_its_last_case_and_its_verdict(in_the_examples, tmp_path, capsys):
    last = tmp_path / "last"
    inside = ["--device", "cpu", "--inside", str(last)]
    assert main(["my_copy:my_copy", "--cases", "2", "--seed", "4", *inside]) == 0
    said = capsys.readouterr().out
    assert said == "my_copy:my_copy on cpu, seed 4\nright in 2 cases\n"
    assert last.read_text() == [case.name for case in cases(2, 4)][-1]
    assert main(["my_copy:absent", *inside]) == 2
    refused = capsys.readouterr()
    assert refused.out == ""
    assert refused.err.startswith("no kernel my_copy:absent, expected module:attribute: ")


@pytest.mark.parametrize(("code", "status"), [(0, 0), (1, 1), (2, 2), (3, 3), (-11, 1)])
@pytest.mark.parametrize("is_interpreted", [True, False])
def test_the_kernel_runs_in_a_process_whose_exit_code_is_passed_on(
    code, status, is_interpreted, monkeypatch, capsys
):
    asked = []

    def run(command, *, env, check):
        asked.append((command, env.get("TRITON_INTERPRET"), env["TRITON_DEFAULT_FP_FUSION"]))
        if code == -11 and is_interpreted:
            Path(command[-1]).write_text("case 7")
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr("hicache.workbench.check.subprocess.run", run)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    device = "cpu" if is_interpreted else "cuda"
    given = ["x:y", "--cases", "5", "--device", device]
    assert main(given) == status
    ((command, interpreted, fusion),) = asked
    assert command[:-1] == [sys.executable, "-m", "hicache.workbench.check", *given, "--inside"]
    assert (interpreted, fusion) == ("1" if is_interpreted else None, "1")
    where = "case 7" if is_interpreted else "before the first case"
    died = f"died: {where}: signal 11, as of a load or store outside of all memory\n"
    assert capsys.readouterr().out == (died if code < 0 else "")


def test_a_hundred_cases_of_seed_0_are_checked_by_default(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        "hicache.workbench.check.cases", lambda *given, **more: asked.append(given) or ()
    )
    assert check(wrong_copies.right).exit_code == 1
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["wrong_copies:right", "--device", "cpu", "--inside", str(tmp_path / "last")]) == 1
    assert asked == [(100, 0)] * 2


def test_a_verdict_counts_cases_and_names_each_fault_once():
    fault = Fault(kind="stray", sentence="case 1: it strays")
    verdict = Verdict(num_right=2, num_wrong=3, faults={"stray": fault}, declined=["a", "b"])
    assert str(verdict) == (
        "stray: case 1: it strays\ndeclined: 2 cases, the first a\nWRONG in 3 of 5 cases: stray"
    )
    assert (verdict.exit_code, verdict.passes) == (1, False)
    assert str(Verdict(num_right=2, unchecked=["c"])) == (
        "not checked: 1 cases, which the interpreter cannot run; a GPU can. The first: c\n"
        "right in 2 cases"
    )
    assert Verdict(num_right=2, unchecked=["c"]).exit_code == 3
    assert (Verdict(num_right=1).exit_code, Verdict(num_right=1).passes) == (0, True)
    assert (Verdict().exit_code, str(Verdict())) == (1, "WRONG: it takes no case")


EACH = Round("2 ids random", (1, 0), (2, 0), 3)


def seen(changes, each=EACH, earlier=()):
    """A launch between two pools of one buffer [4 items, 32 of 48 bytes], after changes."""
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
def test_a_fault_is_said_with_its_place_and_its_bytes(changes, kind, sentence):
    faults = seen(changes).faults()
    assert [each.kind for each in faults] == [kind] * (kind is not None)
    if kind is not None:
        assert faults[0].sentence.startswith(f"x; 2 ids random, 3 programs: {sentence}")


def test_the_first_byte_of_a_pool_is_not_of_its_guard():
    (fault,) = seen({0: 9}, each=Round("1 id", (1,), (2,), 3)).faults()
    assert "1 bytes changed in buffer 0, item 0, which is no target" in fault.sentence


@pytest.mark.parametrize("place", [0, 1])
def test_a_kernel_must_leave_its_ids_as_they_are(place):
    def eater(src, dst):
        def launch(*ids, num_programs=None):
            wrong_copies.right(src, dst)(*ids)
            ids[place].fill_(-1)

        return launch

    verdict = check(eater, num_cases=3, seed=1)
    assert list(verdict.faults) == ["stray"]
    assert verdict.faults["stray"].sentence.endswith(": the ids were written to")


def test_what_an_earlier_launch_left_is_stale():
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


def test_programs_of_its_own_and_a_case_alone_are_said():
    each = Round("1 id", (0,), (0,), None)
    case = Case(name="x", src=seen({}).case.src, dst=seen({}).case.dst, rounds=())
    assert fault_of("wrong", case, each, "y").sentence == "x; 1 id, its own programs: y"
    assert fault_of("raised", case, None, "y").sentence == "x: y"
