"""The space that scenarios are drawn from: knobs, and the values of each that are worth a try."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from itertools import product
from operator import attrgetter
from pathlib import Path

import yaml

from hicache.config import STOCK_POLICIES, WRITE_POLICIES, ExperimentConfig
from hicache.policies.routing import ROUTERS

WORKLOAD = "workload"
LISTS = {"ROUTERS": ROUTERS, "STOCK_POLICIES": STOCK_POLICIES, "WRITE_POLICIES": WRITE_POLICIES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One choice of a scenario.

    `values` has the overrides of each named value, separated by blanks. `plain_share` is the share
    of scenarios with the first value; None means that all values are equally likely. The overrides
    of later knobs replace those of earlier ones.
    """

    name: str
    values: Mapping[str, str]
    plain_share: float | None = 0.6

    @property
    def keys(self) -> set[str]:
        """The settings that some value overrides."""
        return {key for text in self.values.values() for key in overrides_of(text)}


def overrides_of(text: str) -> dict[str, str]:
    """Return the values of overrides by their keys."""
    return dict(re.findall(r"([\w.]+)=(.*?)(?= [\w.]+=|$)", text))


def _each(key: str, *values: object) -> dict[str, str]:
    return {str(value): f"{key}={'null' if value is None else value}" for value in values}


def _read(label: str, values: dict[str, str] | list[object]) -> Knob:
    name, _, share = label.partition(" ")
    if isinstance(values, list):
        values = _each(name, *(value for each in values for value in LISTS.get(str(each), [each])))
    plain_share = None if share == "even" else float(share or 0.6)
    return Knob(name=name, values=values, plain_share=plain_share)


TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
WRITTEN = [_read(label, values) for label, values in TABLE["knobs"].items()]
UNDRAWN = set(TABLE["undrawn"])  # settings that no scenario sets
# of values that cannot go together, the second gives way to its knob's plain one
BARRED = [
    tuple(tuple(word.split("=")) for word in pair)
    for firsts, seconds in TABLE["barred"]
    for pair in product(firsts, seconds)
]


def _with_few_values() -> Iterator[Knob]:
    """Knobs for the settings that have few values and belong to no knob of the table."""
    taken = {key for knob in WRITTEN for key in knob.keys} | UNDRAWN
    for area in ("workload", "parallel", "cache", "prefetch", "scheduler", "compat.rules"):
        for item in fields(attrgetter(area)(ExperimentConfig())):
            if isinstance(item.default, Enum):
                values = [each.name for each in type(item.default)]
            else:
                is_switch = isinstance(item.default, bool)
                values = (False, True) if is_switch else item.metadata.get("one_of") or ()
            name = f"{area}.{item.name}"
            if values and name not in taken:
                yield Knob(name=name, values={"preset": "", **_each(name, *values)})


KNOBS = (*_with_few_values(), *WRITTEN)
