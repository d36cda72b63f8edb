"""Measure this machine and write its profile.

python -m experiments.calibrate mine                 writes conf/hardware/mine.yaml
hicache run hardware=mine model=tiny_hybrid parallel.tp=1

The program times real runs of the small reference model step by step and fits the cost model to
them. Arguments after NAME change these runs (model=..., workload.limit=...). docs/machines.md says
what is fitted, what is not, and how to use curves that you measured in another way.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from omegaconf import OmegaConf

from experiments.studies.calibrate import FREE, REAL, SLICES, Fit, calibrate
from hicache.cli.command import in_one_sentence, parser_of
from hicache.cli.schema import CONF, config_of


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit the cost model, write the profile and print a command that uses it."""
    parser = parser_of("python -m experiments.calibrate", __doc__)
    parser.add_argument("name", help="name of the new profile, for use as hardware=NAME")
    parser.add_argument(
        "overrides", nargs="*", help="settings of the real runs, as for experiments.run"
    )
    parser.add_argument(
        "--seed", type=int, action="append", help="random seed of a real run; repeatable"
    )
    parser.add_argument(
        "--folder", type=Path, default=CONF / "hardware", help="directory for the profile"
    )
    options = parser.parse_intermixed_args(arguments)
    file = options.folder / f"{options.name}.yaml"
    with in_one_sentence():
        if not options.name.isidentifier():
            raise ValueError(f"the name of a machine must be a single word, got {options.name!r}")
        if file.exists():
            raise ValueError(f"{file} already exists: choose another name, or remove it")
        fit = calibrate(config_of(*REAL, *options.overrides), options.seed or SLICES)
        file.write_text(as_yaml(fit, options.name))
    print(
        f"timed {fit.num_steps} steps; the median error of the fit is {fit.median_step_error:.1%}\n"
        f"{file}\n\n"
        f"hicache run hardware={options.name} model=tiny_hybrid parallel.tp=1 "
        f"{_storage_knobs(fit)}"
    )


def _storage_knobs(fit: Fit) -> str:
    """What the storage of these runs took, where they came to use it."""
    used = {name: value for name, value in fit.storage.items() if value < FREE / 1e9}
    return " ".join(f"storage.{name}={value:.2g}" for name, value in used.items())


def as_yaml(fit: Fit, name: str) -> str:
    """The profile as a file of conf/hardware."""
    profile = asdict(replace(fit.hardware, name=name))
    return (
        f"# Fitted by experiments.calibrate to {fit.num_steps} steps of the reference model.\n"
        f"defaults:\n  - schema\n  - _self_\n\n{OmegaConf.to_yaml(OmegaConf.create(profile))}"
    )


if __name__ == "__main__":
    main()
