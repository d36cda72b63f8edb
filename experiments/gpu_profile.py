"""A machine's own rates, from what the kernel bench measured there, as lines of conf/hardware.

python -m hicache.kernels.bench --json bench.json          (on the machine)
python -m experiments.gpu_profile bench.json               (anywhere)

Prints the entries that the bench can turn from modelled into measured: the link, our kernels across
it by piece size, and what a copy beside it costs a matrix product. Paste them over those of the
profile.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from hicache.kernels.copy import LINK_PROGRAMS

DIRECTIONS = {"kernel_to_device": "to_device", "kernel_to_host": "to_host"}
SLOWDOWN = "GEMM slowed by 4 programs to_device"


def main() -> None:
    """Print YAML."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", type=Path, help="JSON of a bench that ran on a GPU")
    options = parser.parse_args()
    print(entries(json.loads(options.bench.read_text())), end="")


def entries(bench: dict[str, Any]) -> str:
    """YAML of the measured entries.

    Raises:
        ValueError: nothing was timed.
    """
    source = f"hicache.kernels.bench on {bench['machine']}"
    ceiling = bench["ceilings_gb_per_s"].get("engine_to_device")
    if ceiling is None:
        raise ValueError(f"a bench on a GPU is wanted, got one of {bench['machine']}")
    text = _figure("pcie_bandwidth", ceiling * 1e9, f"copy engine to the device; {source}")
    for name, direction in DIRECTIONS.items():
        rates: dict[int, float] = {}  # by piece size
        for record in bench["records"]:
            parameters = record["parameters"]
            if record["op"] == "sweep" and record["case"] == direction:
                piece = parameters["page_size"] * parameters["row_bytes"]
                if parameters["num_programs"] == LINK_PROGRAMS:  # what the executor launches
                    rates[piece] = max(rates.get(piece, 0.0), record["gb_per_s"])
        if not rates:  # the bench was stopped before its sweep
            continue
        sizes = sorted(rates)
        text += f"{name}:\n  size: {sizes}\n"
        text += f"  rate: [{', '.join(f'{rates[size]:.4g}e9' for size in sizes)}]\n"
        text += f"  source: {LINK_PROGRAMS} programs; {source}\n  status: measured\n"
    for goal in bench["goals"]:
        if goal["what"] == SLOWDOWN and goal["got"] is not None:
            text += _figure("copy_slowdown", goal["got"], f"bf16 GEMM of 8192; {source}")
    return text


def _figure(name: str, value: float, source: str) -> str:
    return f"{name}:\n  value: {value:.6g}\n  source: {source}\n  status: measured\n"


if __name__ == "__main__":
    main()
