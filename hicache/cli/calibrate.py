"""Fit constants of a server to its log of a light load, and write a machine file.

hicache calibrate measured.jsonl model=llama3_8b hardware=h100 parallel.tp=1 compat=vllm_0_33
hicache run hardware=machine.yaml model=llama3_8b parallel.tp=1 compat=vllm_0_33 ...

The log has the format of `hicache validate`, with hits; the settings name the model, the machine
and the engine. Of its first 200 requests, those are used that are computed alone, at once or after
those before them. Four constants are fitted, each with its 95 % interval:

  scheduler.server_s        time of a request before the engine
  scheduler.begin_s         time of a request in the engine, besides its tokens
  hardware.prefill_factor   factor on the time of computing prompts
  hardware.link_factor      factor on the rate of loads from the host

A log that cannot tell them from each other is refused; --fit names those to fit.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hicache.cli.command import in_one_sentence, parser_of
from hicache.config import ExperimentConfig
from hicache.models import Figure
from hicache.results.calibration import CONSTANTS, Calibration, fitted
from hicache.results.server_log import read_measured
from hicache.runs.schema import config_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hicache calibrate", __doc__)
    parser.add_argument("measured", type=Path, help="log of the server")
    parser.add_argument("overrides", nargs="*", help="settings: model, machine, engine")
    parser.add_argument("--fit", default=",".join(CONSTANTS), help="constants to fit")
    parser.add_argument("--out", type=Path, default=Path("machine.yaml"), help="machine file")
    options = parser.parse_intermixed_args(arguments)
    with in_one_sentence():
        names = options.fit.split(",")
        if unknown := set(names) - {*CONSTANTS}:
            known = ", ".join(CONSTANTS)
            raise ValueError(f"--fit takes {known}, got {', '.join(sorted(unknown))}")
        config = config_of(*options.overrides)
        found = fitted(config, read_measured(options.measured), names)
        told = (
            f"hicache calibrate, {found.num_used} requests of {options.measured.name}, "
            f"{config.model.name} on {config.tp} x {config.hardware.name}"
        )
        options.out.write_text(f"# {told}\n{OmegaConf.to_yaml(machine_of(config, found, told))}")
    for name, value in found.values.items():
        print(f"{name}={value:.4g}  # ± {found.plus_minus[name]:.2g}")
    print(f"# {told}")
    print(options.out)


def machine_of(config: ExperimentConfig, found: Calibration, source: str) -> dict[str, Any]:
    """Return the contents of a machine file: what the machine of `config` and `found` change."""
    base = config_of(f"hardware={config.hardware.name}").hardware
    machine: dict[str, Any] = {"base": base.name, "hardware": {}, "scheduler": {}}
    for item in fields(base):
        value = getattr(config.hardware, item.name)
        if value != getattr(base, item.name) and item.name != "table":
            machine["hardware"][item.name] = asdict(value) if hasattr(value, "source") else value
    for name, value in found.values.items():
        group, _, key = name.partition(".")
        told = f"{source}; ± {found.plus_minus[name]:.2g}"
        figure = asdict(Figure(value=value, source=told, status="measured"))
        machine[group][key] = figure if group == "hardware" else value
    return machine
