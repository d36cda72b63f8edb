"""Print what the kernel benchmark measured on a machine, as a machine file.

python -m hicache.workbench.bench --json bench.json          (on the machine)
python -m experiments.gpu.profile bench.json > mine.yaml   (anywhere)
hicache run hardware=mine.yaml

The entries are the bandwidth of the link, the speed of our copy kernels by size of a contiguous
piece, the speed of one Triton program, and the slowdown of a matrix product by a concurrent copy.
The kernels count only with the number of programs that the profile launches.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hicache.runs.schema import CONF

DIRECTIONS = {"kernel_to_device": "to_device", "kernel_to_host": "to_host"}
PROGRAM = "page 64, 1 programs"  # the case that gives the rate of one program
CEILING = "ceiling", "copy engine to_device"
ENGINE = "copy engine to_device"
# decode is bound by memory: its products run as fast on a hot GPU as on a cool one
SLOWDOWN = "decode slowed by 4 programs to_device"
# cases that give the rate of one program that decodes or codes, and coded bytes of a byte there
CODED = {
    "coded_to_device": ("load", "int8 pages, 1 programs", 1.0),
    "coded_to_host": (
        "encode",
        "to_host, bfloat16 to int8, items of (16, 8, 128), 1 programs",
        132 / 256,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", type=Path, help="JSON file of a kernel bench that ran on a GPU")
    parser.add_argument(
        "--hardware", default="h200", help="machine profile that sets link_programs"
    )
    options = parser.parse_args()
    path = CONF / "hardware" / f"{options.hardware}.yaml"
    profile = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(profile, dict), f"{path} is no mapping"
    measured = entries(json.loads(options.bench.read_text()), profile["copy_kernel"])
    print(OmegaConf.to_yaml({"base": options.hardware, "hardware": measured}), end="")


def entries(bench: dict[str, Any], launched: dict[str, Any]) -> dict[str, Any]:
    """Convert the output of the kernel benchmark to entries of a hardware profile.

    For example, one entry is the measured PCIe bandwidth.

    Args:
        bench: the JSON output of the benchmark.
        launched: settings of the copy kernel from the profile, such as how many Triton programs it
            launches.

    Raises:
        ValueError: the benchmark ran without a GPU, or not with this number of Triton programs.
    """
    programs = launched["link_programs"]
    source = f"hicache.workbench.bench on {bench['machine']}"
    rate_of = {(each["op"], each["case"]): each["gb_per_s"] for each in bench["records"]}
    ceiling = rate_of.get(CEILING)
    if ceiling is None:
        raise ValueError(f"expected a bench on a GPU, got one on {bench['machine']}")
    found = {"pcie_bandwidth": _figure(ceiling * 1e9, f"copy engine to the device; {source}")}
    for name, direction in DIRECTIONS.items():
        rates: dict[int, float] = {}  # by piece size
        measured: set[int] = set()  # numbers of programs
        for record in bench["records"]:
            parameters = record["parameters"]
            if record["op"] == "sweep" and record["case"] == direction:
                piece = parameters["page_size"] * parameters["row_bytes"]
                measured.add(parameters["num_programs"])
                if parameters["num_programs"] == programs:  # what the executor launches
                    rates[piece] = max(rates.get(piece, 0.0), record["gb_per_s"] * 1e9)
        if measured and not rates:
            raise ValueError(
                f"the profile launches {programs} programs, but the bench measured "
                f"{sorted(measured)}"
            )
        if rates:  # empty if the bench stopped before its sweep
            found[name] = {
                "size": sorted(rates),
                "rate": [_rounded(rates[size]) for size in sorted(rates)],
                "source": f"{programs} programs; {source}",
                "status": "measured",
            }
    pieces = {
        record["parameters"]["piece_bytes"]: _rounded(record["gb_per_s"] * 1e9)
        for record in bench["records"]
        if record["case"] == ENGINE and "piece_bytes" in record["parameters"]
    }
    if pieces:
        found["copy_engine"] = {
            "size": sorted(pieces),
            "rate": [pieces[size] for size in sorted(pieces)],
            "source": f"batched memcpy to the device; {source}",
            "status": "measured",
        }
    if SLOWDOWN in bench["notes"]:
        slowdown = bench["notes"][SLOWDOWN]
        found["copy_slowdown"] = _figure(slowdown, f"products of 32 tokens; {source}")
    ways = [each for each in ("to_device", "to_host") if (each, PROGRAM) in rate_of]
    if len(ways) == 2:
        found["copy_kernel"] = launched | {
            way: _figure(rate_of[way, PROGRAM] * 1e9, f"one program, pages of 128 KiB; {source}")
            for way in ways
        }
        for name, (op, case, share) in CODED.items():
            if (op, case) in rate_of:
                rate = rate_of[op, case] * share * 1e9
                found["copy_kernel"][name] = _figure(rate, f"one program, int8; {source}")
    return found


def _figure(value: float, source: str) -> dict[str, Any]:
    return {"value": _rounded(value), "source": source, "status": "measured"}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


if __name__ == "__main__":
    main()
