"""Is a kernel right? `python -m hicache.workbench.check my_file:my_copy [--cases N] [--seed N]`.

Random transfers between guarded pools (`check_cases`), each prepared once and launched several
times, with other content and other ids, over poisoned targets. Every byte of both arenas is
compared with a copy made by torch. What differs has a name:

    missing   a byte of a target still holds what stood there before
    stray     a byte outside of the targets has changed: a guard, a hole, a neighbour, the source
    stale     what was copied is what an earlier launch was asked for, or the content of that time
    overlap   a target holds bytes of another place in the source, or the result depends on the
              order of the programs: two of them write one place
    wrong     bytes that are none of these
    raised    an exception that does not decline

Without a GPU, Triton kernels run in its interpreter, one program after another, forwards and
backwards by turns; with one they run there, and the pools lie on both sides of the link. The exit
code is 0 for a kernel that is right in every case it takes, 1 for one that is not or takes none, 2
if there is no such kernel, and 3 if the interpreter cannot run it (inline assembly, for example),
which says nothing about the kernel. Only a GPU shows races that need two programs at a time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from hicache.workbench.check_cases import CPU, Case, Round, cases
from hicache.workbench.check_faults import Fault, Seen, fault_of
from hicache.workbench.contract import DECLINED, CopyKernel, CopyLaunch, named
from hicache.workbench.own import OwnKernel, faults_of

INSIDE = "--inside"  # of the process that may die
LIMITATIONS = (NotImplementedError, AttributeError, TypeError)  # if the interpreter raises them


@dataclass(kw_only=True, slots=True)
class Verdict:
    """What came of all cases, with the first fault of each kind."""

    num_right: int = 0
    num_wrong: int = 0
    declined: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # the interpreter cannot run them
    faults: dict[str, Fault] = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        """Whether every case that the kernel takes is right, and it takes one."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """0 if the kernel passes, 3 if that cannot be told, 1 if it is wrong or takes nothing."""
        if self.faults:
            return 1
        return 3 if self.unchecked else 0 if self.num_right else 1

    def __str__(self) -> str:
        lines = [f"{fault.kind}: {fault.sentence}" for fault in self.faults.values()]
        if self.declined:
            lines.append(f"declined: {len(self.declined)} cases, the first {self.declined[0]}")
        if self.unchecked:
            lines.append(
                f"not checked: {len(self.unchecked)} cases, which the interpreter cannot run; "
                f"a GPU can. The first: {self.unchecked[0]}"
            )
        total = self.num_right + self.num_wrong
        if self.faults:
            lines.append(f"WRONG in {self.num_wrong} of {total} cases: {', '.join(self.faults)}")
        elif not self.num_right and not self.unchecked:
            lines.append("WRONG: it takes no case")
        else:
            lines.append(f"right in {total} cases")
        return "\n".join(lines)


def check(
    kernel: CopyKernel,
    *,
    num_cases: int = 100,
    seed: int = 0,
    device: torch.device = CPU,
    told: Callable[[str], object] = lambda _: None,
) -> Verdict:
    """Try a kernel.

    Args:
        kernel: of the user's own.
        num_cases: how many random pairs of pools, each with a few launches.
        seed: of the cases; the same seed draws the same cases.
        device: where it runs.
        told: hears of each case before it is tried.
    """
    verdict = Verdict()
    generator = torch.Generator().manual_seed(seed)
    for case in cases(num_cases, seed, device=device):
        told(case.name)
        try:
            launch = kernel(case.src.buffers, case.dst.buffers)
            faults = _tried(launch, case, generator, device)
        except DECLINED as error:
            verdict.declined.append(f"{case.name}: {error}")
            continue
        except Exception as error:  # of the user's code: the other cases have a right to be tried
            if _is_limitation(error):
                verdict.unchecked.append(f"{case.name}: {error}")
                continue
            sentence = f"{type(error).__name__}: {error}{_where(error)}"
            faults = [fault_of("raised", case, None, sentence)]
        for fault in faults:
            verdict.faults.setdefault(fault.kind, fault)
        verdict.num_right += not faults
        verdict.num_wrong += bool(faults)
    return verdict


def check_own(
    kernel: OwnKernel,
    *,
    num_cases: int = 100,
    seed: int = 0,
    device: torch.device = CPU,
    told: Callable[[str], object] = lambda _: None,
) -> Verdict:
    """Hold a kernel to its own oracle. Arguments as of `check`."""
    verdict = Verdict()
    for number in range(num_cases):
        sizes = kernel.draw(Random(f"{seed}/{number}"))
        told(f"case {number}: {sizes}")
        orders = {way: _programs_in_order(backwards=way) for way in (False, True)}
        try:
            faults = list(faults_of(kernel, sizes, seed + number, device=device, orders=orders))
        except Exception as error:  # of the user's code: the other cases have a right to be tried
            if _is_limitation(error):
                verdict.unchecked.append(f"{sizes}: {error}")
                continue
            sentence = f"{sizes}: {type(error).__name__}: {error}{_where(error)}"
            faults = [Fault(kind="raised", sentence=sentence)]
        for fault in faults:
            verdict.faults.setdefault(fault.kind, fault)
        verdict.num_right += not faults
        verdict.num_wrong += bool(faults)
    return verdict


def _tried(
    launch: CopyLaunch, case: Case, generator: torch.Generator, device: torch.device
) -> list[Fault]:
    """The faults of the first launch of a case that has any."""
    longest = max(len(each.src_ids) for each in case.rounds)
    # every launch finds its ids at the same address: who keeps them from the last one is found out
    src_ids, dst_ids = (torch.zeros(longest, dtype=torch.int32, device=device) for _ in range(2))
    earlier: list[tuple[Round, Tensor]] = []
    for number, each in enumerate(case.rounds):
        count = len(each.src_ids)
        src_ids[:count] = torch.tensor(each.src_ids, dtype=torch.int32)
        dst_ids[:count] = torch.tensor(each.dst_ids, dtype=torch.int32)
        for arena in {case.src.arena, case.dst.arena}:
            content = torch.randint(0, 256, arena.shape, generator=generator, dtype=torch.uint8)
            arena.copy_(content)
        src_before, before = case.src.arena.cpu().clone(), case.dst.arena.cpu().clone()
        with _programs_in_order(backwards=number % 2 == 1):
            launch(src_ids[:count], dst_ids[:count], num_programs=each.num_programs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seen = Seen(case, each, src_before, before, case.dst.arena.cpu(), earlier)
        faults = seen.faults()
        if case.src is not case.dst and not torch.equal(case.src.arena.cpu(), src_before):
            faults.append(fault_of("stray", case, each, "the source was written to"))
        given = (src_ids[:count].tolist(), dst_ids[:count].tolist())
        if given != (list(each.src_ids), list(each.dst_ids)):
            faults.append(fault_of("stray", case, each, "the ids were written to"))
        if faults:
            return faults
        earlier.append((each, src_before))
    return []


def _where(error: BaseException) -> str:
    """The last line of the user's code that an error came through."""
    found = ""
    for frame in traceback.extract_tb((error.__cause__ or error).__traceback__):
        if not _is_installed(frame):
            found = f" ({Path(frame.filename).name}, line {frame.lineno})"
    return found


def _is_limitation(error: Exception) -> bool:
    """Whether the interpreter itself gave up on an operation, and not the user's code."""
    cause = error.__cause__
    if not isinstance(error, InterpreterError) or not isinstance(cause, LIMITATIONS):
        return False
    return _is_installed(traceback.extract_tb(cause.__traceback__)[-1])


def _is_installed(frame: traceback.FrameSummary) -> bool:
    return Path(torch.__file__).parents[1] in Path(frame.filename).parents


@contextmanager
def _programs_in_order(*, backwards: bool) -> Iterator[None]:
    """Let Triton's interpreter run the programs of a launch from the last to the first."""
    if not backwards or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    forwards = builder.set_grid_idx

    def mirrored(*place: int) -> None:
        forwards(*(size - 1 - index for size, index in zip(builder.grid_dim, place, strict=True)))

    builder.set_grid_idx = mirrored
    try:
        yield
    finally:
        del builder.set_grid_idx  # the class's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the kernel that the command line names, in a process of its own: it may die of it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if INSIDE in given:
        return _inside(options, device)
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if device.type == "cpu":
        environment["TRITON_INTERPRET"] = "1"  # read when a module with kernels is imported
    with tempfile.TemporaryDirectory() as folder:
        last = Path(folder) / "last"
        command = [sys.executable, "-m", "hicache.workbench.check", *given, INSIDE, str(last)]
        code = subprocess.run(command, env=environment, check=False).returncode
        if code >= 0:
            return code
        where = last.read_text() if last.exists() else "before the first case"
    print(f"died: {where}: signal {-code}, as of a load or store outside of all memory")
    return 1


def _inside(options: argparse.Namespace, device: torch.device) -> int:
    try:
        kernel = named(options.kernel)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # arenas are small
    how = {"num_cases": options.cases, "seed": options.seed, "device": device}
    how["told"] = options.inside.write_text
    verdict = check_own(kernel, **how) if isinstance(kernel, OwnKernel) else check(kernel, **how)
    print(f"{options.kernel} on {device.type}, seed {options.seed}\n{verdict}")
    return verdict.exit_code


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check", description="Is a kernel right?")
    parser.add_argument("kernel", help="module:attribute, or an entry point")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
