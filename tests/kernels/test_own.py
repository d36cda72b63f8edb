"""Kernels that bring their oracles: what is wrong with one has a name."""

import os
import sys
from pathlib import Path

import pytest
import torch
import tuned

from hicache.workbench import check as check_module
from hicache.workbench import contract
from hicache.workbench.bench import __main__ as bench
from hicache.workbench.check import check, main

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NAMES = ["my_transcode:RowsToInt8", "my_attention:Decode"]


@pytest.fixture
def in_the_examples(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES)


class Doubled:
    """y = 2 x by torch."""

    outputs = ("y",)
    rtol = atol = 0.0
    sizes = {"one": {"n": 3}}  # noqa: RUF012

    def __init__(self, launch=None):
        self._launch = launch

    def draw(self, random):
        return {"n": random.randint(3, 9)}

    def make(self, sizes, generator):
        x = torch.rand(sizes["n"], 2, generator=generator)
        return {"x": x, "y": torch.empty_like(x)}

    def launch(self, x, y):
        torch.mul(x, 2, out=y)
        if self._launch is not None:
            self._launch(x, y)

    def oracle(self, x, y):
        return {"y": x + x}


def beside(tensor):
    """The memory of a tensor and what lies behind it."""
    return torch.as_strided(tensor, (tensor.numel() + 8,), (1,), tensor.storage_offset())


def order():
    """A launch whose result is another one every second time."""
    calls = []

    def launch(x, y):
        calls.append(1)
        y[1, 1] += len(calls) % 2

    return launch


@pytest.mark.parametrize(
    ("launch", "kinds"),
    [
        (None, set()),
        (lambda x, y: y[1].view(torch.uint8).fill_(0xA5), {"missing"}),
        (lambda x, y: y[1].add_(1e-6), {"wrong"}),
        (lambda x, y: x[0].zero_(), {"stray"}),
        (lambda x, y: beside(y)[-1].zero_(), {"stray"}),
        (lambda x, y: y[99], {"raised"}),
        (order(), {"wrong", "overlap"}),
    ],
)
def test_what_is_wrong_has_a_name(launch, kinds):
    verdict = check(Doubled(launch), num_cases=2)
    assert set(verdict.faults) == kinds
    assert verdict.passes == (not kinds)


def test_a_tolerance_is_kept_to():
    kernel = Doubled(lambda x, y: y[1].mul_(1 + 1e-5))
    assert not check(kernel, num_cases=2).passes
    kernel.rtol = 1e-4
    assert check(kernel, num_cases=2).passes
    kernel.rtol = 1e-6
    assert set(check(kernel, num_cases=2).faults) == {"wrong"}


def test_an_oracle_without_an_output_is_refused():
    kernel = Doubled()
    kernel.oracle = lambda x, y: {}
    assert r"oracle must return ['y'], got []" in str(check(kernel, num_cases=1))


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_the_docs_are_right(name, in_the_examples, monkeypatch, capsys):
    assert check(contract.named(name), num_cases=6).passes
    monkeypatch.setattr(sys, "argv", ["bench", "--dry-run", "--kernel", name])
    assert bench.main() == 0
    assert name in capsys.readouterr().out


def test_a_wrong_kernel_fails_the_bench(in_the_examples, monkeypatch, capsys):
    import my_transcode

    right = my_transcode.RowsToInt8.oracle
    halved = lambda self, **given: {k: v / 2 for k, v in right(self, **given).items()}  # noqa: E731
    monkeypatch.setattr(my_transcode.RowsToInt8, "oracle", halved)
    monkeypatch.setattr(sys, "argv", ["bench", "--dry-run", "--kernel", NAMES[0]])
    assert bench.main() == 1
    assert f"FAILED {NAMES[0]}" in capsys.readouterr().out


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter")
def test_the_command_checks_a_kernel_with_an_oracle(in_the_examples, capfd):
    assert main([NAMES[1], "--cases", "2"]) == 0
    assert "right in 2 cases" in capfd.readouterr().out


def test_an_autotuned_kernel_is_checked():
    verdict = check(tuned.Doubled(), num_cases=8)
    assert str(verdict) == "right in 8 cases"


def test_cases_take_turns_with_configurations_and_a_wrong_one_is_named():
    verdict = check(tuned.WrongInLargeBlocks(), num_cases=8)
    assert (verdict.num_wrong, verdict.exit_code) == (4, 1)
    assert "[BLOCK: 1024, num_warps: 2" in verdict.faults["wrong"].sentence


def test_a_loop_variable_that_is_no_tensor_is_a_limit_of_the_interpreter():
    verdict = check(tuned.Looped(), num_cases=2)
    assert (verdict.exit_code, len(verdict.unchecked)) == (3, 2)
    assert "'int' object has no attribute 'to'" in verdict.unchecked[0]


def test_an_attribute_that_no_tensor_has_is_a_mistake_of_the_kernel():
    verdict = check(tuned.Absent(), num_cases=1)
    assert (verdict.exit_code, [*verdict.faults]) == (1, ["raised"])


def test_a_long_check_says_how_far_it_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(check_module, "PROGRESS_S", 0)
    monkeypatch.chdir(Path(__file__).parent)
    given = ["tuned:Doubled", "--cases", "2", "--device", "cpu", "--inside", str(tmp_path / "x")]
    assert main(given) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line[:6] for line in said] == ["case 0", "case 1"]
    assert all(line.endswith(" (of 2 cases)") for line in said)
