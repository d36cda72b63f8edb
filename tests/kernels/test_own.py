"""The check and the bench of users' kernels that bring their own oracles."""

import re
import sys

import pytest
import torch
import tuned

from hicache.workbench import contract
from hicache.workbench.bench import __main__ as bench
from hicache.workbench.check import check

NAMES = ["my_transcode:RowsToInt8", "my_attention:Decode"]


class Doubled:
    """A kernel with an oracle: y = 2 x; the function `launch`, if given, then spoils x or y."""

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
    """A flat view of a tensor and of the 8 elements behind it in memory."""
    return torch.as_strided(tensor, (tensor.numel() + 8,), (1,), tensor.storage_offset())


def order():
    """A function that adds 1 to an element of y at every odd call, to be given to `Doubled`."""
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
def test_each_kind_of_fault_of_a_users_kernel_is_named(launch, kinds):
    verdict = check(Doubled(launch), num_cases=2)
    assert set(verdict.faults) == kinds
    assert verdict.passes == (not kinds)


def test_an_error_beyond_the_kernels_tolerance_fails_its_check():
    kernel = Doubled(lambda x, y: y[1].mul_(1 + 1e-5))
    assert not check(kernel, num_cases=2).passes
    kernel.rtol = 1e-4
    assert check(kernel, num_cases=2).passes
    kernel.rtol = 1e-6
    assert set(check(kernel, num_cases=2).faults) == {"wrong"}


def test_an_oracle_that_does_not_return_every_output_is_refused():
    kernel = Doubled()
    kernel.oracle = lambda x, y: {}
    assert r"oracle must return ['y'], got []" in str(check(kernel, num_cases=1))


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_of_the_docs_pass_check_and_bench(name, in_the_examples, monkeypatch, capsys):
    assert check(contract.named(name), num_cases=6).passes
    monkeypatch.setattr(sys, "argv", ["bench", "--dry-run", "--kernel", name])
    assert bench.main() == 0
    assert name in capsys.readouterr().out


def test_kernels_that_differ_from_their_oracle_fail_the_bench(in_the_examples, monkeypatch, capsys):
    import my_transcode

    right = my_transcode.RowsToInt8.oracle
    halved = lambda self, **given: {k: v / 2 for k, v in right(self, **given).items()}  # noqa: E731
    monkeypatch.setattr(my_transcode.RowsToInt8, "oracle", halved)
    monkeypatch.setattr(sys, "argv", ["bench", "--dry-run", "--kernel", NAMES[0]])
    assert bench.main() == 1
    assert f"FAILED {NAMES[0]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernel", "num_cases", "code", "num_wrong", "sentence"),
    [
        (tuned.Doubled(), 4, 0, 0, "right in 4 cases"),
        # cases take turns with configurations
        (tuned.WrongInLargeBlocks(), 8, 1, 4, "wrong: .*[BLOCK: 1024, num_warps: 2"),
        # the variable of a loop is a tensor in a compiled kernel
        (tuned.Looped(), 2, 3, 0, "not checked: 2 cases.*'int' object has no attribute 'to'"),
        (tuned.Absent(), 1, 1, 1, "raised: "),
    ],
)
def test_a_check_tries_each_autotuned_configuration(kernel, num_cases, code, num_wrong, sentence):
    verdict = check(kernel, num_cases=num_cases)
    assert (verdict.exit_code, verdict.num_wrong) == (code, num_wrong)
    assert re.search(sentence.replace("[", r"\["), str(verdict))
