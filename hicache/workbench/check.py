"""Checks a kernel: `python -m hicache.workbench.check my_file:my_copy [--cases N] [--seed N]`.

The check makes random transfers between guarded pools (`check_cases`). Each is prepared once and
launched several times, with new content and new ids, over poisoned targets. Every byte of both
arenas is compared with a copy made by torch. Differences are named:

    missing   a byte of a target still holds its old value
    stray     a byte outside of the targets has changed: a guard, a hole, a neighbor, the source
    stale     the copy used the ids, or the content, of an earlier launch
    overlap   a target holds bytes from another place in the source, or the result depends on the
              order of the programs because two of them write one place
    wrong     bytes that are none of these
    raised    an exception other than a declined transfer

Without a GPU, Triton's interpreter runs the programs of a kernel one after another, forwards and
backwards in turn. With a GPU the kernel runs there, between pools on both sides of the link. The
exit code is 0 for a kernel that is right in every case it takes, 1 for one that is wrong or takes
no case, 2 if the name is unknown, and 3 if the interpreter cannot run it (inline assembly, for
example), which says nothing about the kernel. Only a GPU shows races between concurrent programs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import triton.language
import triton.runtime.interpreter
from torch import Tensor
from triton.runtime.errors import InterpreterError

from hicache.workbench.check_cases import CPU, Case, Round, cases
from hicache.workbench.check_faults import Fault, Seen, fault_of
from hicache.workbench.contract import DECLINED, CopyKernel, named
from hicache.workbench.own import OwnKernel, faults_of
from hicache.workbench.stand_in import tuned

INSIDE = "--inside"  # option of the process that may crash
PROGRESS_S = 5
LIMITATIONS = (NotImplementedError, AttributeError, TypeError)  # if raised by the interpreter


@dataclass(kw_only=True, slots=True)
class Verdict:
    """The result of checking a kernel on many random cases.

    `faults` holds the first fault of each kind, such as a missing or a wrong byte.
    """

    num_right: int = 0
    num_wrong: int = 0
    declined: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # cases that the interpreter cannot run
    faults: dict[str, Fault] = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """Return the exit code of the check, for use by scripts.

        0 means that the kernel passed, and 1 that the kernel is wrong or supports none of the
        cases. 3 means that Triton's interpreter could not run the kernel.
        """
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
    kernel: CopyKernel | OwnKernel,
    *,
    num_cases: int = 100,
    seed: int = 0,
    device: torch.device = CPU,
    told: Callable[[str], object] = lambda _: None,
) -> Verdict:
    """Check a kernel on random cases, and return the number of right and wrong ones and the faults.

    Args:
        kernel: a copy kernel, which is checked on transfers between random pools, or a kernel with
            an oracle, whose results are compared with the oracle's.
        num_cases: number of cases. Each pair of pools is a case of a few launches.
        seed: seed of the random cases.
        device: device that the kernel runs on.
        told: called with the name of each case before the case runs.
    """
    verdict = Verdict()
    is_own = isinstance(kernel, OwnKernel)
    trials = (_own_trials if is_own else _copy_trials)(kernel, num_cases, seed, device)
    for number, (name, trial) in enumerate(trials):
        told(name)
        ran = list[str]()
        try:  # without a GPU, each case runs another configuration of an autotuned kernel
            with tuned(turn=number) if device.type == "cpu" else nullcontext(ran) as ran:
                faults = list(trial())
        except Exception as error:  # in the user's code: go on with the other cases
            if not is_own and isinstance(error, DECLINED):
                verdict.declined.append(f"{name}: {error}")
                continue
            if _is_limitation(error):
                verdict.unchecked.append(f"{name}: {error}")
                continue
            sentence = f"{name}: {type(error).__name__}: {error}{_where(error)}"
            faults = [Fault(kind="raised", sentence=sentence)]
        faults = [replace(each, sentence=each.sentence + "".join(ran[-1:])) for each in faults]
        for fault in faults:
            verdict.faults.setdefault(fault.kind, fault)
        verdict.num_right += not faults
        verdict.num_wrong += bool(faults)
    return verdict


_Trials = Iterator[tuple[str, Callable[[], Iterable[Fault]]]]  # names of cases, and what tries them


def _copy_trials(kernel: Any, num_cases: int, seed: int, device: torch.device) -> _Trials:
    generator = torch.Generator().manual_seed(seed)
    for case in cases(num_cases, seed, device=device):
        yield case.name, partial(_tried, kernel, case, generator, device)


def _own_trials(kernel: Any, num_cases: int, seed: int, device: torch.device) -> _Trials:
    for number in range(num_cases):
        sizes = kernel.draw(Random(f"{seed}/{number}"))
        orders = {way: _programs_in_order(backwards=way) for way in (False, True)}
        yield (
            f"case {number}: {sizes}",
            partial(faults_of, kernel, sizes, seed + number, device=device, orders=orders),
        )


def _tried(
    kernel: CopyKernel, case: Case, generator: torch.Generator, device: torch.device
) -> list[Fault]:
    launch = kernel(case.src.buffers, case.dst.buffers)
    longest = max(len(each.src_ids) for each in case.rounds)
    # ids are at the same addresses in every launch, which exposes kernels that keep old ids
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
    found = ""
    for frame in traceback.extract_tb((error.__cause__ or error).__traceback__):
        if not _is_installed(frame):
            found = f" ({Path(frame.filename).name}, line {frame.lineno})"
    return found


def _is_limitation(error: Exception) -> bool:
    # true if the interpreter, not the user's code, failed on an operation. A ValueError counts only
    # if the interpreter itself raised it: Triton's language raises it for wrong code
    cause = error.__cause__
    if not isinstance(error, InterpreterError) or not isinstance(cause, (*LIMITATIONS, ValueError)):
        return False
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    if isinstance(cause, ValueError):
        return bool(frame.filename == triton.runtime.interpreter.__file__)
    if isinstance(cause, AttributeError) and isinstance(cause.obj, int):
        # the variable of a loop, a tensor in a compiled kernel
        return hasattr(triton.language.tensor, str(cause.name))
    return _is_installed(frame)


def _is_installed(frame: traceback.FrameSummary) -> bool:
    return Path(torch.__file__).parents[1] in Path(frame.filename).parents


@contextmanager
def _programs_in_order(*, backwards: bool) -> Iterator[None]:
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
        del builder.set_grid_idx  # restores the method of the class


def main(arguments: Sequence[str] | None = None) -> int:
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
    due = time.monotonic() + PROGRESS_S

    def told(name: str) -> None:
        nonlocal due
        options.inside.write_text(name)
        if time.monotonic() >= due:
            due += PROGRESS_S
            print(f"{name} (of {options.cases} cases)", file=sys.stderr, flush=True)

    verdict = check(kernel, num_cases=options.cases, seed=options.seed, device=device, told=told)
    print(f"{options.kernel} on {device.type}, seed {options.seed}\n{verdict}")
    return verdict.exit_code


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check", description="Is a kernel right?")
    parser.add_argument("kernel", help="module:attribute")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
