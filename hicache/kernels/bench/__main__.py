"""How fast the kernels are: `python -m hicache.kernels.bench [--op pages] [--json PATH]`.

Measures the ceilings of the machine, then every operation and its peers against them, and prints a
table, each goal with its measured ratio, and where a goal was not met or not measured, the reason.
A case that fails is reported and the rest go on. `--dry-run` needs no GPU: it walks through every
case at toy sizes over the reference, verifies the bytes, and times nothing.
"""

import argparse
import dataclasses
import json
import math
import platform
import sys
import time
import traceback
from pathlib import Path

import torch
import triton

from hicache.kernels.bench.cases import CASES
from hicache.kernels.bench.measure import Bench
from hicache.kernels.bench.session import MIB, Goal, Record, Session

NUM_LAYERS = 16
TOY_BYTES, TOY_LAYERS = MIB, 2


def main() -> int:
    """Run the cases; return 1 if one of them failed."""
    options = _options()
    if not options.dry_run and not torch.cuda.is_available():
        print("a GPU is wanted, and none was found; --dry-run needs none", file=sys.stderr)
        return 2
    if options.dry_run:
        bench = Bench(
            torch.device("cpu"),
            device_bytes=TOY_BYTES,
            host_bytes=TOY_BYTES,
            num_layers=TOY_LAYERS,
            repeats=1,
        )
    else:
        bench = Bench(
            torch.device("cuda", 0),
            device_bytes=options.device_mib * MIB,
            host_bytes=options.host_mib * MIB,
            num_layers=NUM_LAYERS,
            repeats=options.repeats,
        )
    session = Session(bench)
    chosen = options.op or list(CASES)
    failed: dict[str, str] = {}
    with bench.stream():
        bench.warm_up()
        for name in dict.fromkeys(["ceilings", *chosen]):
            start = time.perf_counter()
            try:
                CASES[name](session)
            except Exception:  # one broken case must not cost the others their results
                failed[name] = traceback.format_exc()
                print(failed[name], file=sys.stderr, flush=True)
            seconds = time.perf_counter() - start
            print(f"… {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
            if options.json is not None:  # whoever is stopped half way keeps what there is
                _write_json(options.json, session, failed)
    print(_machine(bench))
    print("\n".join(_line(record) for record in session.records))
    print(_goals(session.goals))
    for name, value in session.notes.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    for name in failed:
        print(f"FAILED {name}: {failed[name].strip().splitlines()[-1]}")
    if options.figure is not None:
        _write_figure(options.figure, session)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bandwidth of the kernels, against ceilings.")
    parser.add_argument("--op", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--json", type=Path, help="where to write every number")
    parser.add_argument("--figure", type=Path, help="where to draw bandwidth against page size")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, no GPU, no times")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device-mib", type=int, default=1024, help="moved within the device")
    parser.add_argument("--host-mib", type=int, default=512, help="moved across the link")
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


def _goals(goals: list[Goal]) -> str:
    lines = []
    for goal in goals:
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[goal.holds]
        got = "" if goal.holds is None else f" got {goal.got:.3f}"
        why = f" ({goal.why})" if goal.why else ""
        lines.append(f"{goal.goal:4} {verdict:12} {goal.what}: wanted {goal.wanted}{got}{why}")
    return "\n".join(lines)


def _write_json(path: Path, session: Session, failed: dict[str, str]) -> None:
    records = [
        {**dataclasses.asdict(record), "gb_per_s": record.gb_per_s} for record in session.records
    ]
    document = {
        "machine": _machine(session.bench),
        "ceilings_gb_per_s": session.ceilings,
        "records": records,
        "goals": [dataclasses.asdict(goal) for goal in session.goals],
        "notes": session.notes,
        "failed": failed,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_without_nan(document), indent=1) + "\n")


def _without_nan(value: object) -> object:
    """JSON has no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write_figure(path: Path, session: Session) -> None:
    """Bandwidth against page size, one panel a direction, ceilings drawn."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    titles = {"device": "within the device", "to_device": "load-back", "to_host": "back-up"}
    for panel, (direction, title) in zip(panels, titles.items(), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for record in session.records:
            parameters = record.parameters
            if record.op != "sweep" or record.case != direction or parameters["contiguous"]:
                continue
            name = f"rows of {parameters['row_bytes']} B"
            if parameters["num_programs"]:
                name += f", {parameters['num_programs']} programs"
            lines.setdefault(name, []).append((int(parameters["page_size"]), record.gb_per_s))
        for name, points in lines.items():
            panel.plot(*zip(*points, strict=True), marker="o", label=name)
        for name, ceiling in session.ceilings.items():
            if name.endswith(direction) and math.isfinite(ceiling):
                panel.axhline(ceiling, linestyle="--", color="grey")
                panel.annotate(name.removesuffix(f"_{direction}"), (1, ceiling), va="bottom")
        panel.set(title=title, xlabel="page size (tokens)", ylabel="GB/s arriving", xscale="log")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        if lines:
            panel.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
