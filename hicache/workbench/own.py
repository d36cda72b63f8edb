"""Interface of any other kernel for `check`, `codegen` and `bench`: a class with its own oracle.

    class MyKernel:
        outputs = ("out",)                      # the arguments that the kernel writes
        rtol, atol = 1e-3, 1e-3                 # 0 and 0: bit for bit
        sizes = {"long": {"tokens": 8192}}      # sizes for machine code and timing

        def draw(self, random):                 # the sizes of a small case, drawn at random
            return {"tokens": random.randint(1, 40)}

        def make(self, sizes, generator):       # all arguments, by name, in host memory
            x = torch.randn(sizes["tokens"], 64, generator=generator)
            return {"x": x, "out": torch.empty_like(x)}

        def launch(self, x, out):               # on the device of the arguments
            ...

        def oracle(self, x, out):               # the expected outputs, by torch
            return {"out": ...}

    python -m hicache.workbench.check my_file:MyKernel

Every tensor lies between guards. Outputs are poisoned before each launch, and differences from the
oracle are named as for copies (`check`): missing, stray, overlap, wrong, raised.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from random import Random
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hicache.workbench.check_cases import CPU, GUARD_BYTES
from hicache.workbench.check_faults import Fault

POISON = 0xA5
Sizes = Mapping[str, int]
Arguments = dict[str, Tensor]


@runtime_checkable
class OwnKernel(Protocol):
    """Interface of a kernel that can be tested: the kernel, its inputs and a reference function.

    `outputs` names the arguments that the kernel writes. `rtol` and `atol` are the tolerances; if
    both are 0, results must be equal bit for bit. `sizes` are the sizes at which the kernel is
    timed.
    """

    outputs: tuple[str, ...]
    rtol: float
    atol: float
    sizes: Mapping[str, Sizes]

    def draw(self, random: Random) -> Sizes:
        """Choose random sizes for a small test case, and return them by name."""

    def make(self, sizes: Sizes, generator: torch.Generator) -> Arguments:
        """Make all arguments of the kernel in host memory, including the output tensors.

        The result maps names to tensors.
        """

    def launch(self, **arguments: Tensor) -> object:
        """Launch the kernel on the current stream."""

    def oracle(self, **arguments: Tensor) -> Arguments:
        """Compute the expected outputs in PyTorch, and return them by name.

        The arguments are copies in host memory.
        """


class Arena:
    """The arguments of one kernel launch on a device, with guard bytes around each tensor.

    Changed guard bytes reveal a write outside of a tensor.
    """

    def __init__(self, arguments: Arguments, outputs: tuple[str, ...], device: torch.device):
        self._outputs = outputs
        self._memory: Arguments = {}
        self.arguments: Arguments = {}
        for name, value in arguments.items():
            size = value.numel() * value.element_size()
            padded = -(-size // 16) * 16 + 2 * GUARD_BYTES
            memory = torch.full((padded,), POISON, dtype=torch.uint8)
            if name not in outputs:
                content = value.contiguous().flatten().view(torch.uint8)
                memory[GUARD_BYTES : GUARD_BYTES + size] = content
            self._memory[name] = memory = memory.to(device)
            inside = memory[GUARD_BYTES : GUARD_BYTES + size]
            self.arguments[name] = inside.view(value.dtype).view(value.shape)
        self._before = {name: memory.cpu().clone() for name, memory in self._memory.items()}

    def results(self) -> Arguments:
        return {name: self.arguments[name].cpu() for name in self._outputs}

    def changed(self) -> str | None:
        for name, memory in self._memory.items():
            differs = memory.cpu() != self._before[name]
            num_bytes = self.arguments[name].numel() * self.arguments[name].element_size()
            inside = differs[GUARD_BYTES : GUARD_BYTES + num_bytes]
            if name not in self._outputs and bool(inside.any()):
                return f"input {name} was written to"
            inside.zero_()
            if bool(differs.any()):
                return f"{int(differs.sum())} bytes beside {name} changed"
        return None


def faults_of(
    kernel: OwnKernel,
    sizes: Sizes,
    seed: int,
    *,
    device: torch.device = CPU,
    orders: Mapping[bool, AbstractContextManager[object]],
) -> Iterator[Fault]:
    """Compare a kernel with its reference function at the given sizes; yield each fault found.

    Args:
        kernel: the kernel with its reference function, `kernel.oracle`.
        sizes: sizes of the arguments, by name.
        seed: seed of the arguments' content.
        device: device that the kernel runs on.
        orders: contexts to launch the kernel in. In the context of the key True, the interpreter
            runs Triton programs in reverse order.

    Raises:
        ValueError: the names that the reference function returns are not those of the kernel's
            outputs.
    """
    case = ", ".join(f"{name} {value}" for name, value in sizes.items())
    arguments = kernel.make(sizes, torch.Generator().manual_seed(seed))
    copies = {name: value.clone() for name, value in arguments.items()}
    wanted = kernel.oracle(**copies)
    if set(wanted) != set(kernel.outputs):
        raise ValueError(f"oracle must return {sorted(kernel.outputs)}, got {sorted(wanted)}")
    found = []
    for context in orders.values():
        arena = Arena(arguments, kernel.outputs, device)
        with context:
            kernel.launch(**arena.arguments)
        found.append(arena.results())
        stray = arena.changed()
        if stray is not None:
            yield Fault(kind="stray", sentence=f"{case}: {stray}")
        for name, got in found[-1].items():
            yield from _differences(name, got, wanted[name], kernel, case)
    if any(not _equal(found[0][name], found[-1][name]) for name in kernel.outputs):
        yield Fault(kind="overlap", sentence=f"{case}: the order of programs changes the result")


def _differences(
    name: str, got: Tensor, wanted: Tensor, kernel: OwnKernel, case: str
) -> Iterator[Fault]:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise ValueError(f"oracle of {name}: {got.dtype} {tuple(got.shape)} wanted")
    if kernel.rtol == kernel.atol == 0:
        size = got.element_size()
        differs = got.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)
        differs = differs.view(-1, size).any(1)
    else:
        close = torch.isclose(
            got.double(), wanted.double(), rtol=kernel.rtol, atol=kernel.atol, equal_nan=True
        )
        differs = ~close.flatten()
    if not bool(differs.any()):
        return
    raw = got.contiguous().view(torch.uint8).view(-1, got.element_size())
    missing = differs & (raw == POISON).all(1)
    for kind, which in (("missing", missing), ("wrong", differs & ~missing)):
        if bool(which.any()):
            place = int(which.nonzero()[0])
            where = [int(i) for i in torch.unravel_index(torch.tensor(place), got.shape)]
            values = f"{got.flatten()[place].item():g}, {wanted.flatten()[place].item():g} wanted"
            sentence = f"{case}: {int(which.sum())} of {name} differ, at {where} {values}"
            yield Fault(kind=kind, sentence=sentence)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
