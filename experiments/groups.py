"""Runs read back from their directories, and grouped by what was different about them.

Runs that differ in nothing but their seed are one group: a metric of a group is a mean or median
over seeds, with the range beside it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from hicache.metrics import OVERLOADED_RHO

Value = str | int | float | bool | None
NOT_A_QUESTION = ("seed", "name", "data_dir")  # keys that may differ inside a group

STANDS_FOR_ITS_GROUP = ("model.name", "hardware.name")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run directory: its config as flat `group.knob` keys, and its summary."""

    path: Path
    config: dict[str, Value]
    summary: dict[str, float]

    @property
    def is_overloaded(self) -> bool:
        """Whether its latencies mean nothing."""
        rhos = [value for key, value in self.summary.items() if key.startswith("load/rho_")]
        return any(rho >= OVERLOADED_RHO for rho in rhos)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs of one configuration, in the order of their seeds. `settings`: what tells it apart."""

    settings: dict[str, Value]
    runs: tuple[StoredRun, ...]

    def values(self, metric: str) -> list[float]:
        """The metric in every run.

        Raises:
            ValueError: a run has no such metric.
        """
        for run in self.runs:
            if metric not in run.summary:
                raise ValueError(f"{run.path} has no metric {metric}")
        return [run.summary[metric] for run in self.runs]

    def ratios(self, baseline: "Group", metric: str) -> list[float]:
        """The metric over the baseline's, seed by seed where both ran it."""
        base = {run.config["seed"]: run.summary.get(metric, 0.0) for run in baseline.runs}
        return [
            run.summary[metric] / base[run.config["seed"]]
            for run in self.runs
            if base.get(run.config["seed"])
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A middle and the range around it."""

    middle: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> "Spread":
        """The spread of at least one value."""
        low, high = min(values), max(values)
        # the mean of three equal floats can lie a bit beside them
        return cls(
            middle=min(max(middle(values), low), high), low=low, high=high, count=len(values)
        )

    def text(self, show: Callable[[float], str]) -> str:
        """`middle (low–high)`, or the one value there is."""
        if self.count == 1 or self.low == self.high:
            return show(self.middle)
        return f"{show(self.middle)} ({show(self.low)}–{show(self.high)})"


def load_runs(paths: Sequence[Path]) -> list[StoredRun]:
    """The runs in these directories, sweeps spread out into theirs.

    Raises:
        FileNotFoundError: a directory holds no run that came to its end.
    """
    return [load_run(directory) for path in paths for directory in find_runs(path)]


def find_runs(path: Path) -> list[Path]:
    """The directory itself if it is a run, or those of its jobs that came to their end."""
    if (path / "summary.json").is_file():
        return [path]
    found = [inner.parent for inner in path.glob("*/summary.json")]
    if not found:
        raise FileNotFoundError(f"no summary.json in {path} or in a directory below it")
    return sorted(found, key=job_order)


def load_run(path: Path) -> StoredRun:
    """Read one run directory."""
    config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    return StoredRun(
        path=path,
        config=_flat(config),
        summary=json.loads((path / "summary.json").read_text()),
    )


def job_order(path: Path) -> tuple[int, str]:
    """Jobs of a sweep by number, others by name."""
    return (int(path.name) if path.name.isdigit() else -1, path.name)


def differing_keys(runs: Sequence[StoredRun]) -> list[str]:
    """Config keys that do not have one value in all runs; the seed and the like left out.

    Of another model, or other hardware, only the name: it stands for all the rest.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = [
        key
        for key in keys
        if key not in NOT_A_QUESTION and len({repr(run.config.get(key)) for run in runs}) > 1
    ]
    named = [key.removesuffix("name") for key in differing if key in STANDS_FOR_ITS_GROUP]
    return [
        key for key in differing if key in STANDS_FOR_ITS_GROUP or not key.startswith(tuple(named))
    ]


def group_runs(runs: Sequence[StoredRun], keys: Sequence[str]) -> list[Group]:
    """One group for each combination of values of `keys`, in the order of first appearance."""
    members: dict[str, list[StoredRun]] = {}
    for run in runs:
        members.setdefault(repr([run.config.get(key) for key in keys]), []).append(run)
    return [
        Group(settings={key: group[0].config.get(key) for key in keys}, runs=tuple(group))
        for group in members.values()
    ]


def baseline_of(group: Group, groups: Sequence[Group], key: str) -> Group:
    """The group to compare with: the first one that differs from this one in `key` alone."""
    others = {name: value for name, value in group.settings.items() if name != key}
    return next(
        candidate
        for candidate in groups
        if all(candidate.settings[name] == value for name, value in others.items())
    )


def question_key(groups: Sequence[Group]) -> str | None:
    """The key whose first value is the baseline: a choice rather than a number, if there is one."""
    keys = list(groups[0].settings)
    choices = [key for key in keys if not is_number(groups[0].settings[key])]
    return next(iter(choices + keys), None)


def is_number(value: Value) -> bool:
    """Whether a setting lies on an axis."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _flat(config: object, prefix: str = "") -> dict[str, Value]:
    if not isinstance(config, dict):
        return {prefix: config if isinstance(config, (str, int, float, bool)) else _text(config)}
    flat: dict[str, Value] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(value)
