"""Reads the machine code of the kernels: `python -m hicache.workbench.codegen`. Needs no GPU.

Every kernel is compiled for sm_90 at the shapes it serves in production, with the specialization of
a real launch (alignment of every argument). The report gives accesses by width, registers, spills,
shared memory and barriers. A static model (`scoreboard`) gives the bytes in flight in every
iteration of the main loop. Each case has limits; a broken limit makes the exit code 1.

`--kernel my_file:my_copy` reads the user's own kernel (see `contract`) instead: it is prepared for
a few pairs of pools, launched on a stand-in driver, and every kernel that it launched is reported.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from torch import Tensor

from hicache.workbench import scoreboard
from hicache.workbench.codegen_cases import KIB, SHAPES, Case, Limits, cases, shaped
from hicache.workbench.contract import DECLINED, CopyKernel, named
from hicache.workbench.own import OwnKernel
from hicache.workbench.stand_in import HOPPER, Loaded, stand_in, tuned

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LATENCIES_NS = {"device": 700, "link": 1300, "slow link": 2000}
FLIGHT_NS = 20_000  # a load latency so long that only loads limit the kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Properties of a kernel's machine code, such as registers and widths of loads.

    Payload loads fetch the data to be copied. Index loads fetch ids and addresses.
    """

    name: str
    num_warps: int
    payload_loads: dict[int, int]  # bits of an access → how many
    stores: dict[int, int]
    index_loads: int
    registers: int
    stack_bytes: int
    spill_accesses: int
    shared_bytes: int
    barriers: int
    num_instructions: int
    programs_of_sm: int
    flight_bytes: int  # of a program, in every iteration, at any latency
    turn_instructions: int
    gb_per_s: dict[str, float]  # of a program, by source of its reads; limited by latency only
    drained_by: str  # the instruction with the longest wait for payload

    @property
    def sm_bytes(self) -> int:
        return self.programs_of_sm * self.flight_bytes

    def violations(self, limits: Limits) -> list[str]:
        found = []
        if limits.payload_bits is not None:
            for what, accesses, more in (
                ("loads", self.payload_loads, frozenset[int]()),
                ("stores", self.stores, limits.other_stores),
            ):
                if set(accesses) - more != {limits.payload_bits}:
                    found.append(f"payload {what} of {limits.payload_bits} bits, got {accesses}")
        for what, got, most in (
            ("registers", self.registers, limits.max_registers),
            ("bytes of stack", self.stack_bytes, 0),
            ("spill accesses", self.spill_accesses, 0),
            ("bytes of shared memory", self.shared_bytes, limits.max_shared_bytes),
            ("barriers", self.barriers, limits.max_barriers),
        ):
            if got > most:
                found.append(f"at most {most} {what}, got {got}")
        for what, got, least in (
            ("a program", self.flight_bytes, limits.min_flight_bytes),
            ("an SM", self.sm_bytes, limits.min_sm_bytes),
        ):
            if got < least:
                found.append(f"at least {least} bytes in flight {what} in every turn, got {got}")
        return [f"{self.name}: {sentence}" for sentence in found]


def compile_case(case: Case) -> Report:
    stand_in()
    compiled = case.kernel.warmup(*case.arguments, grid=(8,), **case.constants)
    cubin, made = compiled.asm["cubin"], compiled.metadata
    return read_cubin(Loaded(case.name, cubin, made.num_warps, made.shared))


def launched_by(name: str) -> list[Report]:
    """Return a report on the machine code of each Triton kernel that the user's code launches.

    `name` is the name of the code, `module:attribute`. No GPU is needed.

    Raises:
        ValueError: the name is unknown, or the code declines all of the sample inputs.
    """
    driver, reports, declined = stand_in(), list[Report](), list[str]()
    with tuned(driver), patch.multiple(torch.cuda, **HOPPER):
        for what, launch in _launches(named(name)):
            try:
                launch()
            except DECLINED as error:
                declined.append(f"{what}: {error}")
            reports += [
                read_cubin(each._replace(name=f"{each.name}, {what}")) for each in driver.loaded
            ]
            driver.loaded.clear()
    if not reports:
        reasons = "; ".join(declined + driver.not_compiled) or "nothing is known"
        raise ValueError(f"{name} launched no kernel: {reasons}")
    for sentence in driver.not_compiled:
        print(f"does not compile: {sentence}", file=sys.stderr)
    return reports


def _launches(kernel: CopyKernel | OwnKernel) -> Iterator[tuple[str, Callable[[], object]]]:
    if isinstance(kernel, OwnKernel):
        for what, sizes in kernel.sizes.items():
            arguments = kernel.make(sizes, torch.Generator().manual_seed(0))
            yield what, partial(kernel.launch, **arguments)
        return
    ids = torch.arange(8, dtype=torch.int32)
    arenas = torch.zeros(2, 2 * len(ids) * 128 * KIB, dtype=torch.uint8)
    for what in SHAPES:
        yield what, partial(_copy, kernel, shaped(what, len(ids), *arenas), ids)


def _copy(kernel: CopyKernel, pools: Sequence[Sequence[Tensor]], ids: Tensor) -> None:
    kernel(*pools)(ids, ids.flip(0))


def read_cubin(loaded: Loaded) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(loaded.cubin)
        usage = _tool("cuobjdump", "--dump-resource-usage", str(path))
        sass = _tool("nvdisasm", "-hex", "-c", str(path))
    sizes = {"num_warps": loaded.num_warps, "shared_bytes": loaded.shared_bytes}
    return read_sass(loaded.name, sass, usage, **sizes)


def read_sass(name: str, sass: str, usage: str, *, num_warps: int, shared_bytes: int) -> Report:
    instructions = scoreboard.read(sass)
    opcodes = [instruction.opcode for instruction in instructions]
    payload = scoreboard.payload_of(instructions)
    loads = [place for place, each in enumerate(instructions) if each.is_load]
    walks = {
        where: scoreboard.steady(instructions, payload, num_warps=num_warps, payload_ns=latency)
        for where, latency in LATENCIES_NS.items()
    }
    link = walks["link"]
    slow = scoreboard.steady(instructions, payload, num_warps=num_warps, payload_ns=FLIGHT_NS)
    registers = int(_found(r"REG:(\d+)", usage))

    def count(*prefixes: str) -> int:
        return sum(opcode.startswith(prefixes) for opcode in opcodes)

    return Report(
        name=name,
        num_warps=num_warps,
        payload_loads=dict(Counter(scoreboard.bits_of(opcodes[place]) for place in payload)),
        stores=dict(Counter(scoreboard.bits_of(each) for each in opcodes if each[:3] == "STG")),
        index_loads=len(set(loads) - payload),
        registers=registers,
        stack_bytes=int(_found(r"STACK:(\d+)", usage)),
        spill_accesses=count("LDL", "STL"),
        shared_bytes=shared_bytes,
        barriers=count("BAR"),
        num_instructions=len(instructions),
        programs_of_sm=scoreboard.programs_of_sm(
            registers=registers, num_warps=num_warps, shared_bytes=shared_bytes
        ),
        flight_bytes=slow.flight_bytes if slow else 0,
        turn_instructions=link.turn_instructions if link else 0,
        gb_per_s={where: walk.gb_per_s for where, walk in walks.items() if walk},
        drained_by=link.drained_by if link else "",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Machine code of the kernels, without a GPU.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--kernel", help="describe module:name, a kernel of one's own")
    options = parser.parse_args()
    broken: list[str] = []
    if options.kernel is not None:
        try:
            reports = launched_by(options.kernel)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    else:
        chosen = cases()
        reports = [compile_case(case) for case in chosen]
        for case, report in zip(chosen, reports, strict=True):
            broken += report.violations(case.limits)
    if options.json:
        described = [dataclasses.asdict(report) for report in reports]
        document = {"triton": triton.__version__, "reports": described, "violations": broken}
        print(json.dumps(document))
        return 1 if broken else 0
    print(f"triton {triton.__version__}, sm_90; rates are what latency allows a program: modelled")
    print("\n".join(map(_described, reports)))
    if options.kernel is None:
        print("\n".join(broken) or "all limits hold")
    return 1 if broken else 0


def _described(report: Report) -> str:
    def widths(accesses: dict[int, int]) -> str:
        return ", ".join(f"{n} × {bits} bit" for bits, n in sorted(accesses.items())) or "none"

    rates = ", ".join(
        f"{rate:.3g} GB/s at {LATENCIES_NS[where]} ns" for where, rate in report.gb_per_s.items()
    )
    flight = (
        f"in flight every turn: {report.flight_bytes / KIB:.3g} KiB a program,"
        f" {report.sm_bytes / KIB:.3g} KiB an SM"
        if report.flight_bytes
        else "no steady loop: bytes in flight are not known"
    )
    return (
        f"\n{report.name}\n"
        f"  payload loads {widths(report.payload_loads)}; stores {widths(report.stores)};"
        f" index loads {report.index_loads}\n"
        f"  {report.registers} registers, {report.spill_accesses} spills,"
        f" {report.stack_bytes} B stack, {report.shared_bytes} B shared memory,"
        f" {report.barriers} barriers, {report.num_instructions} instructions,"
        f" {report.turn_instructions} a turn\n"
        f"  {flight}; {report.num_warps} warps a program, {report.programs_of_sm} programs an SM\n"
        f"  a program: {rates or 'moves nothing'}"
        + (f"; drained by {report.drained_by}" if report.drained_by else "")
    )


def _tool(name: str, *arguments: str) -> str:
    run = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"{name} failed: {run.stderr.strip()}")
    return run.stdout


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in the output of cuobjdump")
    return match.group(1)


if __name__ == "__main__":
    sys.exit(main())
