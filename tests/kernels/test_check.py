"""The check of a user's copy kernel: what is planted is found and named, what is right passes."""

import importlib
import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
import wrong_copies

from hicache.kernels import contract
from hicache.kernels.check import _programs_in_order, check, main
from hicache.kernels.check_cases import LAYOUTS, cases

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
        ("my_copy:absent", "no copy kernel my_copy:absent"),
        ("absent_file:my_copy", "no copy kernel absent_file:my_copy"),
        ("my_copy:BLOCK", "must be a function of two pools or a class with an oracle, got int"),
        ("nobody", "an entry point of hicache.copy_kernels, got 'nobody'"),
    ],
)
def test_a_name_without_a_kernel_is_refused(name, sentence, in_the_examples):
    with pytest.raises(ValueError, match=sentence):
        contract.named(name)


def test_an_entry_point_is_a_name(in_the_examples, monkeypatch):
    point = importlib.metadata.EntryPoint("mine", "my_copy:my_copy", contract.GROUP)
    found = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr(contract, "entry_points", lambda **wanted: found.select(**wanted))
    assert contract.named("mine").__name__ == "my_copy"


def test_a_module_of_the_working_directory_comes_before_others(tmp_path, monkeypatch):
    for folder, answer in (("here", 1), ("elsewhere", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kernel_of_two_folders.py").write_text(
            f"def kernel(src, dst):\n    return {answer}\n"
        )
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "here")
    assert contract.named("kernel_of_two_folders:kernel")([], []) == 1
