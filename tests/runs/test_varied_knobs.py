"""Every setting that is studied is varied in conf/, or not_varied.yaml gives the reason."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from hicache.config import ExperimentConfig
from hicache.runs.schema import CONF

STUDIED = (
    "workload",
    "parallel",
    "cache",
    "prefetch",
    "scheduler",
    "storage",
    "executor",
    "compat",
)
ALTERNATIVES = ("arm", "compat", "faults", "executor", "size", "workload", "storage")
NOT_VARIED = yaml.safe_load(Path(__file__).with_name("not_varied.yaml").read_text())


def knobs(cls: type, prefix: str = "") -> list[str]:
    """Dotted names of all fields of a configuration."""
    kinds: dict[str, Any] = get_type_hints(cls)
    return [
        name
        for field in fields(cls)
        for name in (
            knobs(kinds[field.name], f"{prefix}{field.name}.")
            if is_dataclass(kinds[field.name])
            else [prefix + field.name]
        )
    ]


def settings(tree: object, prefix: str = "") -> set[str]:
    """Dotted names of all that a file sets."""
    if not isinstance(tree, dict):
        return {prefix.removesuffix(".")}
    return {name for key, value in tree.items() for name in settings(value, f"{prefix}{key}.")}


def in_grids() -> set[str]:
    """What the grids of experiments vary."""
    found: set[str] = set()
    for path in (CONF / "experiment").glob("*.yaml"):
        sweeper = yaml.safe_load(path.read_text()).get("hydra", {}).get("sweeper", {})
        found |= set(sweeper.get("params", {}))
    return found


def in_alternatives() -> set[str]:
    """What files that are alternatives to each other set."""
    found: set[str] = set()
    for group in ALTERNATIVES:
        for path in (CONF / group).glob("*.yaml"):
            text = path.read_text()
            package = re.match(r"# @package (\S+)", text)
            place = group if package is None else package[1].removeprefix("_global_")
            found |= settings(yaml.safe_load(text), f"{place}." if place else "")
    return found


def test_every_knob_is_varied_or_says_why_not() -> None:
    studied = {name for name in knobs(ExperimentConfig) if name.split(".")[0] in STUDIED}
    varied = in_grids() | in_alternatives()
    varied |= {
        name.rpartition(".")[0] for name in varied
    }  # of one kind, as in cache.host.share.swa
    assert studied - varied - set(NOT_VARIED) == set()


def test_no_excuse_is_out_of_date() -> None:
    assert set(NOT_VARIED) - set(knobs(ExperimentConfig)) == set()
    assert set(NOT_VARIED) & in_grids() == set()
