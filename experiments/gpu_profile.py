"""A machine's own rates, from what the kernel bench measured there, as lines of conf/hardware.

python -m hicache.kernels.bench --json bench.json          (on the machine)
python -m experiments.gpu_profile bench.json               (anywhere)

Prints the entries that the bench can turn from modelled into measured: the link, our kernels across
it by piece size with as many programs as the profile says, what one program of them moves, and what
a copy beside it costs a matrix product. Paste them over those of the profile.
"""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

DIRECTIONS = {"kernel_to_device": "to_device", "kernel_to_host": "to_host"}
CONF = Path(__file__).resolve().parents[1] / "conf"
PROGRAM = ("ours", "pages of 128 KiB")  # by which one program is judged
SLOWDOWN = "GEMM slowed by 4 programs to_device"


def main() -> None:
    """Print YAML."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", type=Path, help="JSON of a bench that ran on a GPU")
    parser.add_argument(
        "--hardware", default="h200", help="the profile that says how many programs"
    )
    options = parser.parse_args()
    path = CONF / "hardware" / f"{options.hardware}.yaml"
    profile = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(profile, dict), f"{path} is no mapping"
    print(entries(json.loads(options.bench.read_text()), profile["copy_kernel"]), end="")


def entries(bench: dict[str, Any], launched: dict[str, Any]) -> str:
    """YAML of the measured entries; `launched`: the profile's `copy_kernel`.

    Raises:
        ValueError: nothing was timed, or not with as many programs as the executor launches.
    """
    programs = launched["link_programs"]
    source = f"hicache.kernels.bench on {bench['machine']}"
    ceiling = bench["ceilings_gb_per_s"].get("engine_to_device")
    if ceiling is None:
        raise ValueError(f"a bench on a GPU is wanted, got one of {bench['machine']}")
    text = _figure("pcie_bandwidth", ceiling * 1e9, f"copy engine to the device; {source}")
    for name, direction in DIRECTIONS.items():
        rates: dict[int, float] = {}  # by piece size
        measured: set[int] = set()  # numbers of programs
        for record in bench["records"]:
            parameters = record["parameters"]
            if record["op"] == "sweep" and record["case"] == direction:
                piece = parameters["page_size"] * parameters["row_bytes"]
                measured.add(parameters["num_programs"])
                if parameters["num_programs"] == programs:  # what the executor launches
                    rates[piece] = max(rates.get(piece, 0.0), record["gb_per_s"])
        if measured and not rates:
            raise ValueError(
                f"the profile launches {programs} programs, the bench measured {sorted(measured)}"
            )
        if not rates:  # the bench was stopped before its sweep
            continue
        sizes = sorted(rates)
        text += f"{name}:\n  size: {sizes}\n"
        text += f"  rate: [{', '.join(f'{rates[size]:.4g}e9' for size in sizes)}]\n"
        text += f"  source: {programs} programs; {source}\n  status: measured\n"
    for goal in bench["goals"]:
        if goal["what"] == SLOWDOWN and goal["got"] is not None:
            text += _figure("copy_slowdown", goal["got"], f"bf16 GEMM of 8192; {source}")
    return text + _copy_kernel(bench, launched, source)


def _copy_kernel(bench: dict[str, Any], launched: dict[str, Any], source: str) -> str:
    """How our kernel is launched, with what one program of it moved; nothing if none was timed."""
    alone = {
        record["parameters"]["direction"]: record["gb_per_s"]
        for record in bench["records"]
        if record["op"] == "program"
        and (record["parameters"]["kernel"], record["parameters"]["shape"]) == PROGRAM
    }
    if not alone.keys() >= {"to_device", "to_host"}:
        return ""
    text = "copy_kernel:\n"
    for name in ("link_programs", "tile_bytes", "warps"):
        text += f"  {name}: {launched[name]}\n"
    for direction in ("to_device", "to_host"):
        entry = _figure(direction, alone[direction] * 1e9, f"one program, {PROGRAM[1]}; {source}")
        text += textwrap.indent(entry, "  ")
    return text


def _figure(name: str, value: float, source: str) -> str:
    return f"{name}:\n  value: {value:.6g}\n  source: {source}\n  status: measured\n"


if __name__ == "__main__":
    main()
