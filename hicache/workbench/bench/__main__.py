"""Measures the kernels: `python -m hicache.workbench.bench [--op pages] [--json PATH]`.

    python -m hicache.workbench.bench --kernel my_file:my_copy

compares a kernel of the user's own (`contract`) with ours and the peers, by size and direction.

The bench measures the ceilings of the machine, then every operation and its peers against them. It
prints a table. A case that fails is reported and the rest go on. `--dry-run` needs no GPU and times
nothing: it runs every case at small sizes with the PyTorch references, runs every kernel of the
contest in the interpreter, and verifies the bytes.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from hicache.workbench.bench.cases import CASES
from hicache.workbench.bench.contest import contest, own_kernels, table
from hicache.workbench.bench.measure import MIB, Bench
from hicache.workbench.bench.session import Record, Session
from hicache.workbench.contract import named
from hicache.workbench.own import OwnKernel

NUM_LAYERS = 16
OWN = "own"  # kernels that bring their oracles
CONTEST = "contest"  # only on request: it takes as long as all other cases


def main() -> int:
    """Run the benchmark; return the exit code of the process.

    0 means that all benchmarks ran, and 1 that one of them failed. 2 means that there is no GPU, or
    that a kernel's name is unknown.
    """
    options = _options()
    if not options.dry_run and not torch.cuda.is_available():
        print("a GPU is wanted, and none was found; --dry-run needs none", file=sys.stderr)
        return 2
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        # too late here: triton read it when kernels were imported
        command = [sys.executable, "-m", "hicache.workbench.bench", *sys.argv[1:]]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
        return subprocess.run(command, env=environment, check=False).returncode
    try:
        found = {name: named(name) for name in options.kernel or ()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    bench = _bench(options)
    own = {name: each for name, each in found.items() if isinstance(each, OwnKernel)}
    kernels = {name: each for name, each in found.items() if not isinstance(each, OwnKernel)}
    session = Session(bench, kernels, own)
    chosen = options.op or ([CONTEST] if kernels else list(CASES))
    if own and not kernels:
        chosen = [OWN]
    with bench.stream():
        bench.warm_up()
        _measure(session, chosen if chosen == [OWN] else ["ceilings", *chosen], options.json)
    print(_machine(bench))
    _print_results(session)
    answered_for = {"ours", *found}  # a failing peer does not fail the bench
    return 1 if session.broken or not session.failures.keys().isdisjoint(answered_for) else 0


def _bench(options: argparse.Namespace) -> Bench:
    is_dry = options.dry_run
    return Bench(
        torch.device("cpu") if is_dry else torch.device("cuda", 0),
        device_bytes=MIB if is_dry else options.device_mib * MIB,
        host_bytes=MIB if is_dry else options.host_mib * MIB,
        num_layers=2 if is_dry else NUM_LAYERS,
        repeats=options.repeats,
    )


def _measure(session: Session, names: Sequence[str], path: Path | None) -> None:
    for name in dict.fromkeys(names):
        start = time.perf_counter()
        try:
            {**CASES, CONTEST: contest, OWN: own_kernels}[name](session)
        except Exception:  # a broken case must not stop the others
            session.broken[name] = traceback.format_exc()
            print(session.broken[name], file=sys.stderr, flush=True)
        seconds = time.perf_counter() - start
        print(f"… {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        if path is not None:  # keep the results of an interrupted run
            _write_json(path, session)


def _print_results(session: Session) -> None:
    print("\n".join(_line(record) for record in session.records))
    for name, value in session.notes.items():
        if not isinstance(value, float):
            print(f"{name}: {value}")
        elif math.isfinite(value):  # something was timed
            print(f"{name}: {value:.3f}")
    if session.cells:
        print(f"µs / GB/s at the median, by bytes of a transfer{table(session.cells)}")
    for name, sentence in session.failures.items():
        print(f"FAILED {name}: {sentence}")
    for name, trace in session.broken.items():
        print(f"FAILED {name}: {trace.strip().splitlines()[-1]}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bandwidth of the kernels, against ceilings.")
    add = parser.add_argument
    add("--op", action="append", choices=[*CASES, CONTEST], help="default: all but the contest")
    add("--kernel", action="append", metavar="MODULE:NAME", help="one more for the contest")
    add("--json", type=Path, help="where to write every number")
    add("--dry-run", action="store_true", help="toy sizes, no GPU, no times")
    add("--repeats", type=int, default=20)
    add("--device-mib", type=int, default=1024, help="moved within the device")
    add("--host-mib", type=int, default=512, help="moved across the link")
    return parser.parse_args()


def _machine(bench: Bench) -> str:
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    versions += f", triton {triton.__version__}"
    if not bench.on_gpu:
        return f"dry run on a CPU ({versions}): bytes are verified, nothing is timed"
    return f"{torch.cuda.get_device_name(bench.device)} ({versions})"


def _line(record: Record) -> str:
    timing = record.timing
    size = f"{record.num_bytes / MIB:10.1f} MiB"
    if math.isnan(timing.p50_s):
        return f"{record.op:13} {record.case:45} {size}"
    times = " ".join(f"{s * 1e6:9.1f}" for s in (timing.p20_s, timing.p50_s, timing.p80_s))
    case = record.case
    if record.op == "sweep":
        case += " " + " ".join(f"{name}={value}" for name, value in record.parameters.items())
    return f"{record.op:13} {case:45} {size} {times} µs {record.gb_per_s:9.1f} GB/s"


def _write_json(path: Path, session: Session) -> None:
    def flat(each: Record) -> dict[str, Any]:
        return {**dataclasses.asdict(each), "gb_per_s": each.gb_per_s}

    document = {
        "machine": _machine(session.bench),
        "records": list(map(flat, session.records)),
        "notes": session.notes,
        "contest": list(map(flat, session.cells)),
        "failed": session.broken,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON has no NaN: what was not measured is null
    told = json.loads(json.dumps(document), parse_constant=lambda _: None)
    path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
