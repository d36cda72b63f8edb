"""Compare the predicted speed of one Triton program of each copy kernel with measurements.

python -m experiments.gpu.predictions > experiments/results/predictions_triton_3_9_0.json   (before)
python -m hicache.workbench.bench --op programs --json bench.json              (on a GPU)
python -m experiments.gpu.predictions --bench bench.json                     (after; anywhere)

Predictions are stored by the version of Triton that compiled the kernels. A benchmark is compared
with the predictions for its own version. The static model knows the latency and the issue of
instructions, but no bandwidth. A rate measured below the prediction may therefore be due to the
link. Any other large deviation refutes the model. Spearman's rank correlation says whether the
model orders the kernels correctly (1 for the same order, 0 for no relation).
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import triton

from hicache.workbench import codegen
from hicache.workbench.bench.contest import ONE_PROGRAM
from hicache.workbench.codegen_cases import cases

RESULTS = Path(__file__).parents[1] / "results"
KERNELS = {"ours": "hicache.workbench.contract:ours"} | {
    name: f"hicache.workbench.bench.peers:{name}" for name in ONE_PROGRAM
}
# the latency depends on the source: a back-up reads the device
COLUMNS = ["direction", "kernel", "shape", "predicted", "measured", "ratio"]
READS_FROM = {"device": "device", "to_host": "device", "to_device": "link"}


def predicted() -> list[dict[str, Any]]:
    entries = []
    for kernel, name in KERNELS.items():
        for report in codegen.launched_by(name):
            shape = report.name.partition(", ")[2]
            entries.append(_entry(kernel, shape, report))
    for case in cases():
        if case.limits.payload_bits is not None:
            entries.append(_entry("ours", case.name, codegen.compile_case(case)))
    return entries


def stored_for(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the stored predictions that belong to the Triton version of a benchmark.

    Predictions are the modelled speeds of copy kernels. `bench` is the JSON output of the kernel
    benchmark.

    Raises:
        ValueError: there are no predictions for this version of Triton.
    """
    found = re.search(r"triton (\d+)\.(\d+)\.(\d+)", bench["machine"])
    path = RESULTS / f"predictions_triton_{'_'.join(found.groups() if found else '?')}.json"
    if not path.exists():
        raise ValueError(
            f"{path.name} does not exist, so the bench on {bench['machine']} has no predictions"
        )
    entries: list[dict[str, Any]] = json.loads(path.read_text())["predictions"]
    return entries


def compared(entries: list[dict[str, Any]], bench: dict[str, Any]) -> pd.DataFrame:
    """Return a table of predicted and measured speeds of copy kernels, in GB/s.

    Each row is one kernel, one copy direction and one page layout, launched as a single Triton
    program. `entries` are the predictions, and `bench` is the JSON output of the kernel benchmark.

    Raises:
        ValueError: the benchmark did not measure single programs.
    """
    rates = {(entry["kernel"], entry["shape"]): entry["gb_per_s"] for entry in entries}
    rows = []
    for record in bench["records"]:
        if record["op"] != "program" or record["gb_per_s"] is None:
            continue
        direction, kernel, shape = (record["parameters"][k] for k in COLUMNS[:3])
        if (kernel, shape) in rates:
            wanted, got = rates[kernel, shape][READS_FROM[direction]], record["gb_per_s"]
            rows.append((direction, kernel, shape, wanted, got, got / wanted))
    if not rows:
        raise ValueError(
            f"expected a bench on a GPU with --op programs, got one on {bench['machine']}"
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def rank_correlations(table: pd.DataFrame) -> pd.DataFrame:
    parts = [*table.groupby("direction", sort=False), ("all", table)]
    rows = [
        (name, len(part), part["predicted"].rank().corr(part["measured"].rank()))
        for name, part in parts
    ]
    return pd.DataFrame(rows, columns=["direction", "variants", "rank correlation"])


def _entry(kernel: str, shape: str, report: codegen.Report) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "shape": shape,
        "flight_bytes": report.flight_bytes,
        "programs_of_sm": report.programs_of_sm,
        "gb_per_s": {where: round(rate, 2) for where, rate in report.gb_per_s.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", type=Path, help="JSON file of a kernel bench that ran on a GPU")
    options = parser.parse_args()
    if options.bench is None:
        document = {"triton": triton.__version__, "latency_ns": codegen.LATENCIES_NS}
        print(json.dumps({**document, "predictions": predicted()}, indent=1))
        return 0
    bench = json.loads(options.bench.read_text())
    try:
        table = compared(stored_for(bench), bench)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(table.to_markdown(index=False, floatfmt=".2f"), end="\n\n")
    print(rank_correlations(table).to_markdown(index=False, floatfmt=".2f"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
