"""What the static model says one program of each copy kernel moves, and how far that was off.

python -m experiments.gpu.predictions > experiments/results/predictions.json     (before; no GPU)
python -m hicache.kernels.bench --op programs --json bench.json              (on a GPU)
python -m experiments.gpu.predictions --bench bench.json                         (after; anywhere)

The model knows latency and issue of instructions, no bandwidth: a link caps what it says. So a
measured rate may lie below by the link, and a kernel that is far above or below by anything else
has shown the model wrong.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import triton

from hicache.kernels import codegen
from hicache.kernels.bench.contest import ONE_PROGRAM
from hicache.kernels.codegen_cases import cases

STORED = Path(__file__).parents[1] / "results" / "predictions.json"
KERNELS = {"ours": "hicache.kernels.contract:ours"} | {
    name: f"hicache.kernels.bench.peers:{name}" for name in ONE_PROGRAM
}
# where a program reads decides its latency: a back-up reads the device
READS_FROM = {"device": "device", "to_host": "device", "to_device": "link"}


def predicted() -> list[dict[str, Any]]:
    """One entry a kernel and shape, and one for each of our other kernels that move pages."""
    entries = []
    for kernel, name in KERNELS.items():
        for report in codegen.launched_by(name):
            shape = report.name.partition(", ")[2]
            entries.append(_entry(kernel, shape, report))
    for case in cases():
        if case.limits.payload_bits is not None:
            entries.append(_entry("ours", case.name, codegen.compile_case(case)))
    return entries


def compared(entries: list[dict[str, Any]], bench: dict[str, Any]) -> list[str]:
    """A line a measured shape, kernel and direction: predicted, measured, measured ÷ predicted.

    Raises:
        ValueError: the bench measured no single programs.
    """
    rates = {(entry["kernel"], entry["shape"]): entry["gb_per_s"] for entry in entries}
    lines = ["| direction | kernel | shape | predicted, GB/s | measured, GB/s | ratio |"]
    lines.append("|---|---|---|---:|---:|---:|")
    for record in bench["records"]:
        if record["op"] != "program" or record["gb_per_s"] is None:
            continue
        told = record["parameters"]
        rate = rates.get((told["kernel"], told["shape"]))
        if rate is None:
            continue
        wanted, got = rate[READS_FROM[told["direction"]]], record["gb_per_s"]
        cells = [told["direction"], told["kernel"], told["shape"]]
        cells += [f"{wanted:.1f}", f"{got:.1f}", f"{got / wanted:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    if len(lines) == 2:
        raise ValueError(
            f"a bench with --op programs on a GPU is wanted, got one of {bench['machine']}"
        )
    return lines


def _entry(kernel: str, shape: str, report: codegen.Report) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "shape": shape,
        "flight_bytes": report.flight_bytes,
        "programs_of_sm": report.programs_of_sm,
        "gb_per_s": {where: round(rate, 2) for where, rate in report.gb_per_s.items()},
    }


def main() -> int:
    """Print the predictions as JSON, or a comparison as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", type=Path, help="JSON of a bench that ran on a GPU")
    parser.add_argument("--stored", type=Path, default=STORED)
    options = parser.parse_args()
    if options.bench is None:
        document = {"triton": triton.__version__, "latency_ns": codegen.LATENCIES_NS}
        print(json.dumps({**document, "predictions": predicted()}, indent=1))
        return 0
    entries = json.loads(options.stored.read_text())["predictions"]
    try:
        print("\n".join(compared(entries, json.loads(options.bench.read_text()))))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
