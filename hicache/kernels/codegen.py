"""What the compiler made of the kernels: `python -m hicache.kernels.codegen`. No GPU is needed.

Every kernel is compiled for sm_90 at the shapes it serves in production, through the same
specialisation as a real launch (the alignment of every argument), and its machine code is read:
accesses by width, registers, spills, shared memory, barriers, and the bytes that one thread has on
their way before it waits for the first. Each case has limits; a broken one makes the exit code 1.

The process must not have TRITON_INTERPRET set: the interpreter leaves nothing to compile.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from hicache.kernels import checksum, copy, index
from hicache.kernels.table import TILE_WORDS

SM_90 = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WIDTH_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
NUM_THREADS = 32 * copy.NUM_WARPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the machine code of a case must keep to."""

    max_registers: int
    min_flight_bytes: int = 0  # on their way per thread
    max_shared_bytes: int = 0
    max_barriers: int = 0
    payload_bits: int | None = 128  # width of every payload access; None: an index kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kernel at one production shape."""

    name: str
    kernel: Any  # a @triton.jit function
    arguments: tuple[object, ...]
    constants: dict[str, int]
    limits: Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the machine code of a case does. Payload is what carries the eviction hint, and every
    store; other loads fetch ids and addresses."""

    name: str
    payload_loads: dict[int, int]  # bits of an access → how many
    stores: dict[int, int]
    index_loads: int
    registers: int
    stack_bytes: int
    spill_accesses: int
    shared_bytes: int
    shared_accesses: int
    barriers: int
    flight_bytes: int
    num_instructions: int

    def violations(self, limits: Limits) -> list[str]:
        """One sentence for each limit that does not hold."""
        found = []
        if limits.payload_bits is not None:
            for what, accesses in (("loads", self.payload_loads), ("stores", self.stores)):
                if set(accesses) != {limits.payload_bits}:
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
        if self.flight_bytes < limits.min_flight_bytes:
            found.append(
                f"at least {limits.min_flight_bytes} bytes in flight, got {self.flight_bytes}"
            )
        return [f"{self.name}: {sentence}" for sentence in found]


class FakeDriver(DriverBase):  # type: ignore[misc] # triton is not typed
    """Says that an sm_90 device is there, so that a kernel's warm-up compiles for it."""

    def __init__(self, target: GPUTarget):
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        """Always; the driver is set by hand."""
        return True

    def get_current_target(self) -> GPUTarget:
        """The target that kernels are compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the stand-in arguments live."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Nothing is launched, so no C type is needed."""
        return ty

    def get_benchmarker(self) -> None:
        """Nothing is timed."""


def cases() -> list[Case]:
    """Every kernel at the shapes it serves: what moves, and the limits of its machine code."""
    pieces = torch.zeros(64, 6, dtype=torch.int64)
    ids = torch.zeros(256, dtype=torch.int32)
    sums = torch.zeros(256, dtype=torch.int64)

    def moved(name: str, words: int, max_registers: int, *maps: torch.Tensor | None) -> Case:
        return Case(
            name=name,
            kernel=copy._copy_kernel,
            arguments=(pieces, ids, ids, *(maps or (None, None)), 256, 4096, 64),
            constants={
                "TOGETHER": 1,
                "LINES": TILE_WORDS // words,
                "STEPS": min(8, words // 16),
                "WIDTH": words // min(8, words // 16),
                "num_warps": copy.NUM_WARPS,
            },
            limits=Limits(max_registers=max_registers, min_flight_bytes=128),
        )

    return [
        moved("pages of 64 KiB and more, Mamba slots", 8192, 112),
        moved("pages of 16 KiB (8 tokens × 2 KiB)", 2048, 128),
        moved("pages of 4 KiB (16 tokens × 256 B)", 512, 128),
        moved("token rows of 2 KiB (8 heads × 128 × bf16)", 256, 128),
        moved("token rows of 256 B (1 head × 128 × bf16)", 32, 128),
        moved("window pages out of the SWA pool", 8192, 112, ids, None),
        moved("window pages into the SWA pool", 8192, 112, None, ids),
        Case(
            name="pages with checksum",
            kernel=checksum._copy_with_checksum_kernel,
            arguments=(pieces, ids, ids, None, None, sums, 256, 4096, 64),
            constants={
                "TOGETHER": 1,
                "LINES": 1,
                "STEPS": 8,
                "WIDTH": 1024,
                "num_warps": checksum.NUM_WARPS,
            },
            # the sum over a tile goes through shared memory, once a tile
            limits=Limits(
                max_registers=128, min_flight_bytes=128, max_shared_bytes=256, max_barriers=4
            ),
        ),
        Case(
            name="page table from spans",
            kernel=index._page_table_kernel,
            arguments=(ids, ids, ids, ids, 2048, 0),
            constants={"BLOCK": index.BLOCK},
            limits=Limits(max_registers=64, payload_bits=None),
        ),
        Case(
            name="window table (window 1024, page 64)",
            kernel=index._window_table_kernel,
            arguments=(ids, ids, ids, ids, 2048, 0),
            constants={"PAGE": 64, "WINDOW": 1024, "NUM_PAGES": 17, "BLOCK": 32},
            limits=Limits(max_registers=64, payload_bits=None),
        ),
        Case(
            name="translation",
            kernel=index._translate_kernel,
            arguments=(ids, ids, ids, 256, -1),
            constants={"BLOCK": index.BLOCK},
            limits=Limits(max_registers=64, payload_bits=None),
        ),
    ]


def compile_case(case: Case) -> Report:
    """Compile a case for sm_90 and read its machine code."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET is set, and leaves nothing to compile: unset it")
    triton.runtime.driver.set_active(FakeDriver(SM_90))
    compiled = case.kernel.warmup(*case.arguments, grid=(8,), **case.constants)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        sass = _tool("nvdisasm", "-c", str(cubin))
    return read_sass(case.name, sass, usage, shared_bytes=compiled.metadata.shared)


def read_sass(name: str, sass: str, usage: str, *, shared_bytes: int) -> Report:
    """Count what stands in a disassembly and in its table of resources."""
    opcodes = re.findall(
        r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)\s", sass, re.MULTILINE
    )
    loads = [op for op in opcodes if op.startswith("LDG")]
    stores = [op for op in opcodes if op.startswith("STG")]

    def count(*prefixes: str) -> int:
        return sum(op.startswith(prefixes) for op in opcodes)

    return Report(
        name=name,
        payload_loads=dict(Counter(_bits(op) for op in loads if ".EF" in op)),
        stores=dict(Counter(map(_bits, stores))),
        index_loads=sum(".EF" not in op for op in loads),
        registers=int(_found(r"REG:(\d+)", usage)),
        stack_bytes=int(_found(r"STACK:(\d+)", usage)),
        spill_accesses=count("LDL", "STL"),
        shared_bytes=shared_bytes,
        shared_accesses=count("LDS", "STS", "LDGSTS"),
        barriers=count("BAR"),
        flight_bytes=_flight_bytes(opcodes),
        num_instructions=len(opcodes),
    )


def main() -> int:
    """Print the report; return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description="Machine code of the kernels, without a GPU.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    pairs = [(case, compile_case(case)) for case in cases()]
    broken = [line for case, report in pairs for line in report.violations(case.limits)]
    if options.json:
        reports = [dataclasses.asdict(report) for _, report in pairs]
        print(json.dumps({"triton": triton.__version__, "reports": reports, "violations": broken}))
    else:
        print(f"triton {triton.__version__}, sm_90, {NUM_THREADS} threads a program when copying")
        for _, report in pairs:
            print(_described(report))
        print("\n".join(broken) or "all limits hold")
    return 1 if broken else 0


def _described(report: Report) -> str:
    def widths(accesses: dict[int, int]) -> str:
        return ", ".join(f"{n} × {bits} bit" for bits, n in sorted(accesses.items())) or "none"

    in_flight_kib = report.flight_bytes * NUM_THREADS / 1024
    return (
        f"\n{report.name}\n"
        f"  payload loads {widths(report.payload_loads)}; stores {widths(report.stores)};"
        f" index loads {report.index_loads}\n"
        f"  {report.registers} registers, {report.spill_accesses} spills,"
        f" {report.stack_bytes} B stack, {report.shared_bytes} B shared memory,"
        f" {report.barriers} barriers, {report.num_instructions} instructions\n"
        f"  in flight: {report.flight_bytes} B a thread, {in_flight_kib:.0f} KiB a program"
    )


def _tool(name: str, *arguments: str) -> str:
    """Run a CUDA tool that came with triton."""
    run = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"{name} failed: {run.stderr.strip()}")
    return run.stdout


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in the output of cuobjdump")
    return match.group(1)


def _bits(opcode: str) -> int:
    """Width of an access: `LDG.E.EF.128` → 128; 32 is not written."""
    return next((WIDTH_BITS[part] for part in opcode.split(".") if part in WIDTH_BITS), 32)


def _flight_bytes(opcodes: list[str]) -> int:
    """Payload bytes that a thread asks for before its first store (or barrier) uses one."""
    most = current = 0
    for op in opcodes:
        if op.startswith("LDG") and ".EF" in op:
            current += _bits(op) // 8
            most = max(most, current)
        elif op.startswith(("STG", "BAR")):
            current = 0
    return most


if __name__ == "__main__":
    sys.exit(main())
