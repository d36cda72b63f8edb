"""A variant of a kernel is looked up once: later launches go to the compiled kernel."""

import pytest
import torch

from hicache.kernels import launch as module
from hicache.kernels.launch import launch


class Compiled:
    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *given: self.launches.append((grid, given))


class Kernel:
    arg_names = ("x_ptr", "sums_ptr", "count", "WIDTH")
    fn = "a kernel"

    def __init__(self):
        self.searches, self.launches = [], []

    def __getitem__(self, grid):
        def search(*given, **constants):
            self.searches.append((grid, given, constants))
            return Compiled(self.launches)

        return search


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_COMPILED", {})
    return Kernel()


CONSTANTS = {"num_warps": 4, "WIDTH": 64}


def test_the_second_launch_is_of_the_compiled_kernel(kernel):
    x = torch.zeros(2, dtype=torch.int32)
    launch(kernel, 3, (x, None, 5), CONSTANTS, x)
    launch(kernel, 2, (x, None, 7), CONSTANTS, x)
    assert kernel.searches == [((3,), (x, None, 5), CONSTANTS)]
    assert kernel.launches == [((2, 1, 1), (x, None, 7, 64))]


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((torch.zeros(2, dtype=torch.int64), None, 5), CONSTANTS),
        ((torch.zeros(2, dtype=torch.int32), torch.zeros(1), 5), CONSTANTS),
        ((torch.zeros(2, dtype=torch.int32), None, 1 << 31), CONSTANTS),
        ((torch.zeros(2, dtype=torch.int32), None, 5), {"num_warps": 8, "WIDTH": 64}),
    ],
    ids=["dtype", "a tensor in place of none", "a number of 64 bits", "an option"],
)
def test_another_variant_is_looked_up(kernel, arguments, constants):
    x = torch.zeros(2, dtype=torch.int32)
    launch(kernel, 1, (x, None, 5), CONSTANTS, x)
    launch(kernel, 1, arguments, constants, x)
    assert len(kernel.searches) == 2
    assert kernel.launches == []
