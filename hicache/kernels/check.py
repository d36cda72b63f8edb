"""Is a copy kernel right? `python -m hicache.kernels.check my_file:my_copy [--cases N] [--seed N]`.

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
if there is no such kernel. What nobody but a GPU can show: races that need two programs at a time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hicache.kernels.check_cases import GUARD_BYTES, Case, Pool, Round, cases
from hicache.kernels.contract import DECLINED, CopyKernel, CopyLaunch, named

WORD_BYTES = 8
INSIDE = "--inside"  # of the process that may die


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way in which a launch went wrong."""

    kind: str
    sentence: str


@dataclass(kw_only=True, slots=True)
class Verdict:
    """What came of all cases, with the first fault of each kind."""

    num_right: int = 0
    num_wrong: int = 0
    declined: list[str] = field(default_factory=list)
    faults: dict[str, Fault] = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        """Whether every case that the kernel takes is right, and it takes one."""
        return not self.faults and self.num_right > 0

    def __str__(self) -> str:
        lines = [f"{fault.kind}: {fault.sentence}" for fault in self.faults.values()]
        if self.declined:
            lines.append(f"declined: {len(self.declined)} cases, the first {self.declined[0]}")
        total = self.num_right + self.num_wrong
        if self.faults:
            lines.append(f"WRONG in {self.num_wrong} of {total} cases: {', '.join(self.faults)}")
        elif not self.num_right:
            lines.append("WRONG: it takes no case")
        else:
            lines.append(f"right in {total} cases, byte for byte")
        return "\n".join(lines)


def check(
    kernel: CopyKernel,
    *,
    num_cases: int = 100,
    seed: int = 0,
    device: torch.device | None = None,
    told: Callable[[str], object] = lambda _: None,
) -> Verdict:
    """Try a kernel.

    Args:
        kernel: of the user's own.
        num_cases: how many random pairs of pools, each with a few launches.
        seed: of the cases; the same seed draws the same cases.
        device: where it runs; None or the CPU: in this process's memory.
        told: hears of each case before it is tried.
    """
    verdict = Verdict()
    generator = torch.Generator().manual_seed(seed)
    for case in cases(num_cases, seed, place=_places(device)):
        told(case.name)
        try:
            launch = kernel(case.src.buffers, case.dst.buffers)
            faults = _tried(launch, case, generator, device)
        except DECLINED as error:
            verdict.declined.append(f"{case.name}: {error}")
            continue
        except Exception as error:  # of the user's code: the other cases have a right to be tried
            faults = [_fault("raised", case, None, f"{type(error).__name__}: {error}")]
        for fault in faults:
            verdict.faults.setdefault(fault.kind, fault)
        verdict.num_right += not faults
        verdict.num_wrong += bool(faults)
    return verdict


def _tried(
    launch: CopyLaunch, case: Case, generator: torch.Generator, device: torch.device | None
) -> list[Fault]:
    """The faults of the first launch of a case that has any."""
    longest = max(len(each.src_ids) for each in case.rounds)
    # every launch finds its ids at the same address: who keeps them from the last one is found out
    src_ids, dst_ids = (
        torch.zeros(longest, dtype=torch.int32, device=device or "cpu") for _ in range(2)
    )
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
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        seen = _Seen(case, each, src_before, before, case.dst.arena.cpu(), earlier)
        faults = seen.faults()
        if not case.in_place and not torch.equal(case.src.arena.cpu(), src_before):
            faults.append(_fault("stray", case, each, "the source was written to"))
        given = (src_ids[:count].tolist(), dst_ids[:count].tolist())
        if given != (list(each.src_ids), list(each.dst_ids)):
            faults.append(_fault("stray", case, each, "the ids were written to"))
        if faults:
            return faults
        earlier.append((each, src_before))
    return []


class _Seen:
    """What one launch left behind. All arenas are in host memory."""

    def __init__(
        self,
        case: Case,
        each: Round,
        src_before: Tensor,
        before: Tensor,
        got: Tensor,
        earlier: Sequence[tuple[Round, Tensor]],
    ):
        self.case, self.each, self.earlier = case, each, earlier
        self.src_before, self.before, self.got = src_before, before, got
        self.want = self._copied(each, src_before)
        self.named = torch.zeros_like(got)  # bytes of targets, by 1
        for buffer in case.dst.twin(self.named).buffers:
            buffer.view(torch.uint8)[_moved(each)[1]] = 1

    def faults(self) -> list[Fault]:
        """One for each kind that shows."""
        differs = self.got != self.want
        if not bool(differs.any()):
            return []
        for other, content in reversed(self.earlier):
            if other != self.each and torch.equal(self.got, self._copied(other, self.src_before)):
                return [self._says("stale", f"the ids of an earlier launch ({other.what}) moved")]
            if torch.equal(self.got, self._copied(other, content)):
                return [self._says("stale", "the bytes of an earlier launch were written again")]
        inside, outside = differs & (self.named == 1), differs & (self.named == 0)
        found = self._inside(inside)
        if bool(outside.any()):
            place = self._place_outside(int(outside.nonzero()[0]))
            found.append(self._says("stray", f"{int(outside.sum())} bytes changed {place}"))
        return found

    def _inside(self, differs: Tensor) -> list[Fault]:
        """Wrong bytes of targets, sorted by where their values come from."""
        found = []
        words = differs.view(-1, WORD_BYTES).any(1)

        def sort(kind: str, is_it: Tensor, sentence: str) -> None:
            nonlocal words
            these, words = words & is_it, words & ~is_it
            if bool(these.any()):
                first = int((differs & these.repeat_interleave(WORD_BYTES)).nonzero()[0])
                num_bytes = WORD_BYTES * int(these.sum())
                found.append(
                    self._says(kind, f"{self._place(first)}: {num_bytes} bytes {sentence}")
                )

        sort("missing", self._all_bytes_of(self.before), "in all were never written")
        for _, content in self.earlier:
            past = self._copied(self.each, content)
            sort("stale", self._all_bytes_of(past), "in all are of an earlier launch")
        source_words = self.src_before.view(torch.int64)
        of_source = torch.isin(self.got.view(torch.int64), source_words)
        sort("overlap", of_source, "in all belong to another place")
        sort("wrong", torch.ones_like(words), "in all are neither old nor of the source")
        return found

    def _all_bytes_of(self, other: Tensor) -> Tensor:
        """[words] whether each byte of a word is right or is that of `other`."""
        same = (self.got == other) | (self.got == self.want)
        return same.view(-1, WORD_BYTES).all(1)

    def _copied(self, each: Round, src_content: Tensor) -> Tensor:
        """The target's arena after a right copy."""
        sources, targets = _moved(each)
        result = self.before.clone()
        from_ = self.case.src.twin(src_content).buffers
        for src, dst in zip(from_, self.case.dst.twin(result).buffers, strict=True):
            dst.view(torch.uint8)[targets] = src.view(torch.uint8)[sources]
        return result

    def _place(self, byte: int) -> str:
        found = _holder(self.case.dst, byte)
        return "a target" if found is None else f"buffer {found[0]}, item {found[1]}"

    def _place_outside(self, byte: int) -> str:
        if byte < GUARD_BYTES:
            return "in the guard before the target pool"
        found = _holder(self.case.dst, byte)
        if found is not None:
            return f"in buffer {found[0]}, item {found[1]}, which is no target"
        if byte >= len(self.got) - GUARD_BYTES:
            return "in the guard behind the target pool"
        return "between the items of the target pool"

    def _says(self, kind: str, sentence: str) -> Fault:
        return _fault(kind, self.case, self.each, sentence)


def _fault(kind: str, case: Case, each: Round | None, sentence: str) -> Fault:
    launch = "" if each is None else f"; {each.what}, {each.num_programs or 'its own'} programs"
    return Fault(kind=kind, sentence=f"{case.name}{launch}: {sentence}")


def _moved(each: Round) -> tuple[list[int], list[int]]:
    """Source and target items, without holes."""
    named = zip(each.src_ids, each.dst_ids, strict=True)
    pairs = [(src, dst) for src, dst in named if src >= 0 and dst >= 0]
    return [src for src, _ in pairs], [dst for _, dst in pairs]


def _holder(pool: Pool, byte: int) -> tuple[int, int] | None:
    """Buffer and item that a byte of the arena belongs to."""
    mark = torch.zeros(len(pool.arena), dtype=torch.uint8)
    for number, buffer in enumerate(pool.twin(mark).buffers):
        for item in range(buffer.shape[0]):
            buffer.view(torch.uint8)[item] = 1
            if mark[byte]:
                return number, item
            buffer.view(torch.uint8)[item] = 0
    return None


def _places(device: torch.device | None) -> Callable[[int, str], Tensor]:
    """Makes arenas; on a GPU, pools lie in the device and in pinned host memory by turns."""
    turn = 0

    def place(num_bytes: int, side: str) -> Tensor:
        nonlocal turn
        if device is None or device.type == "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8)
        turn += side == "source"
        in_host = ("target", "source", "")[turn % 3] == side
        if in_host:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    return place


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
        command = [sys.executable, "-m", "hicache.kernels.check", *given, INSIDE, str(last)]
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
    verdict = check(
        kernel,
        num_cases=options.cases,
        seed=options.seed,
        device=device,
        told=lambda name: options.inside.write_text(name),
    )
    print(f"{options.kernel} on {device.type}, seed {options.seed}\n{verdict}")
    return 0 if verdict.passes else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check", description="Is a copy kernel right?")
    parser.add_argument("kernel", help="module:attribute, or an entry point")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
