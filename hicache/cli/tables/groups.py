"""Runs read back from their directories, and grouped by what was different about them.

Runs that differ in nothing but their seed and window are one group: a metric of a group is the
median over them, with the range beside it. Runs of other code, or of another trace under the same
name, are no such group, and two that disagree under one seed and window are not two of them: keys
that were not typed (such as `cache.eviction source`, and as a last resort `run`) tell them apart.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from hicache.cli.grid import NUMBERED
from hicache.cli.stored import read_json, read_yaml
from hicache.cli.tables import provenance
from hicache.config import METRICS
from hicache.results.verdict import is_overloaded
from hicache.workload.workload import GENERATORS

Value = str | int | float | bool | None
WINDOW = "workload.window"
# keys that may differ inside a group
NOT_A_QUESTION = ("seed", WINDOW, "name", "data_dir", "metrics")
COUNTS = ("_count", "_pages", "_tokens", "_bytes")  # of what never happened, there is none

STANDS_FOR_ITS_GROUP = ("model.name", "hardware.name")
TYPED = ".hydra/overrides.yaml"
SOURCE = " source"  # what these keys end with: `hicache source`, `prefetch.stop source`
RUN = "run"  # the key of last resort: its directory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run directory: its config as flat `group.knob` keys, and its summary.

    `typed`: what the command line or the grid said, as it was typed, group choices included.
    `metrics`: those that its experiment is about. `sources`: what made it, as `KNOB source` keys
    with the first hex digits of a SHA-256; none of a run from before they were kept.
    """

    path: Path
    config: dict[str, Value]
    summary: dict[str, float]
    typed: dict[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = METRICS
    sources: dict[str, str] = field(default_factory=dict)

    def setting(self, key: str) -> Value:
        """The value of a knob, the choice of a group, or what tells runs of one config apart."""
        if key == RUN:
            return str(self.path)
        if key.endswith(SOURCE):
            return self.sources.get(key)
        return self.config[key] if key in self.config else self.typed.get(key)

    @property
    def served(self) -> tuple[Value, Value]:
        """What tells it apart within its group: the window, and the seed."""
        return self.config.get(WINDOW), self.config.get("seed")

    @property
    def replicate(self) -> tuple[Value, ...]:
        """The window, and of a generated workload the seed too: it drew the sessions."""
        return self.served if self.config.get("workload.kind") in GENERATORS else self.served[:1]

    @property
    def is_overloaded(self) -> bool:
        """Whether its latencies mean nothing."""
        return is_overloaded(self.summary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs of one configuration, of other windows and seeds.

    `settings`: what tells it apart. `is_baseline`: the user has chosen it as a baseline.
    """

    settings: dict[str, Value]
    runs: tuple[StoredRun, ...]
    is_baseline: bool = False

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
        """The metric over the baseline's, window by window and seed by seed where both ran it."""
        base = {run.served: run.summary.get(metric, 0.0) for run in baseline.runs}
        return [run.summary[metric] / base[run.served] for run in self.runs if base.get(run.served)]


class Spread(NamedTuple):
    """A median and the range around it."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(median(values), min(values), max(values))

    def text(self, show: Callable[[float], str]) -> str:
        """`middle (low–high)`, or the one value there is."""
        if self.low == self.high:
            return show(self.middle)
        return f"{show(self.middle)} ({show(self.low)}–{show(self.high)})"


def load_runs(paths: Sequence[Path]) -> list[StoredRun]:
    """The runs in these directories, sweeps spread out into theirs.

    Raises:
        FileNotFoundError: a directory holds no run that came to its end.
    """
    return with_counts([load_run(directory) for path in paths for directory in find_runs(path)])


def with_counts(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs, each with a zero for what was counted in another one only."""
    counts = {key: 0 for run in runs for key in run.summary if key.endswith(COUNTS)}
    return [replace(run, summary=counts | run.summary) for run in runs]


def find_runs(path: Path) -> list[Path]:
    """The directory itself if it is a run, or those of its jobs that came to their end."""
    if (path / "summary.json").is_file():
        return [path]
    found = [inner.parent for inner in path.glob("*/summary.json")]
    if not found:
        raise FileNotFoundError(
            f"no finished run: {path} and its subdirectories contain no summary.json"
        )
    return sorted(found, key=_place)


def load_run(path: Path) -> StoredRun:
    """Read one run directory."""
    config = OmegaConf.to_container(read_yaml(path / "config.yaml", DictConfig))
    assert isinstance(config, dict)
    typed: dict[str, str] = {}
    if (path / TYPED).is_file():
        for override in read_yaml(path / TYPED, ListConfig):
            key, _, value = str(override).partition("=")
            typed[key.lstrip("+~")] = value
    made_of = path / provenance.FILE
    sources = provenance.sources_of(read_json(made_of)) if made_of.is_file() else {}
    return StoredRun(
        path=path,
        config=flat(config),
        summary=read_json(path / "summary.json"),
        typed=typed,
        metrics=tuple(config.get("metrics") or METRICS),
        sources={f"{name}{SOURCE}": digest for name, digest in sources.items()},
    )


def _place(path: Path) -> tuple[int, str]:
    """Jobs of a sweep by number, others before them by name."""
    number = NUMBERED.match(path.name)
    return (int(number[1]) if number else -1, path.name)


def differing_keys(runs: Sequence[StoredRun]) -> list[str]:
    """What tells the runs apart, seed, window and the like left out, in the order it was typed.

    Where what was typed does not account for every difference, the config keys that differ; of
    another model, or other hardware, only the name then: it stands for all the rest. What made the
    runs comes last, where runs of one setting were not made of the same.
    """
    keys = _differing_knobs(runs)
    made_of = dict.fromkeys(key for run in runs for key in run.sources)
    alike = [group.runs for group in group_runs(runs, keys)]
    keys += [key for key in made_of if any(_disagree(group, key) for group in alike)]
    if any(_disagrees_with_itself(group.runs) for group in group_runs(runs, keys)):
        keys.append(RUN)
    return keys


def _disagree(runs: Sequence[StoredRun], key: str) -> bool:
    return len({run.sources.get(key) for run in runs}) > 1


def _disagrees_with_itself(runs: Sequence[StoredRun]) -> bool:
    """Whether one window has given two results under one seed."""
    first = {run.served: run.summary for run in reversed(runs)}
    return any(run.summary != first[run.served] for run in runs)


def _differing_knobs(runs: Sequence[StoredRun]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = [key for key in keys if _differs(key, [run.config.get(key) for run in runs])]
    typed = dict.fromkeys(key for run in runs for key in run.typed)
    chosen = [key for key in typed if _differs(key, [run.setting(key) for run in runs])]
    if len(group_runs(runs, chosen)) == len(group_runs(runs, [*chosen, *differing])):
        return chosen
    named = [key.removesuffix("name") for key in differing if key in STANDS_FOR_ITS_GROUP]
    return [
        key for key in differing if key in STANDS_FOR_ITS_GROUP or not key.startswith(tuple(named))
    ]


def _differs(key: str, values: Sequence[Value]) -> bool:
    return key not in NOT_A_QUESTION and len(set(map(repr, values))) > 1


def group_runs(runs: Sequence[StoredRun], keys: Sequence[str]) -> list[Group]:
    """One group for each combination of values of `keys`, in the order of first appearance."""
    members: dict[str, list[StoredRun]] = {}
    for run in runs:
        members.setdefault(repr([run.setting(key) for key in keys]), []).append(run)
    return [
        Group(settings={key: group[0].setting(key) for key in keys}, runs=tuple(group))
        for group in members.values()
    ]


def compared_groups(
    paths: Sequence[Path], *, where: Sequence[str] = (), baseline: Sequence[str] = ()
) -> list[Group]:
    """Return the groups of all runs in `paths` that fulfill `where`; `baseline` marks baselines.

    Raises:
        ValueError: no run fulfills the conditions, or every group is a baseline.
    """
    known = {run.resolve() for path in paths for run in find_runs(path)}
    named = [run for path in map(Path, baseline) if path.is_dir() for run in find_runs(path)]
    more = [run for run in named if run.resolve() not in known]
    runs = select(load_runs([*paths, *more]), where)
    groups = group_runs(runs, differing_keys(runs))
    if not baseline:
        return groups
    chosen = {run.path for run in select(runs, baseline)}
    groups = [
        replace(group, is_baseline=any(run.path in chosen for run in group.runs))
        for group in groups
    ]
    if all(group.is_baseline for group in groups):
        raise ValueError(f"every row is a baseline: {' '.join(baseline)} holds for all runs")
    return groups


def select(runs: Sequence[StoredRun], conditions: Sequence[str]) -> list[StoredRun]:
    """Return the runs that fulfill all conditions: each is `KNOB=VALUE,VALUE` or a directory.

    Raises:
        ValueError: no run does.
    """
    left = list(runs)
    for condition in conditions:
        knob, _, values = condition.partition("=")
        folder = Path(condition).resolve()
        found = [
            run
            for run in left
            if folder in (run.path.resolve(), run.path.resolve().parent)
            or (values and short(run.setting(knob)) in values.split(","))
        ]
        if not found:
            known = dict.fromkeys(short(run.setting(knob)) for run in left)
            raise ValueError(f"no run has {condition}: {knob} is {' or '.join(known)}")
        left = found
    return left


def question_key(groups: Sequence[Group]) -> str | None:
    """Return the key that tells baselines from what is compared with them; None if there is none.

    It is a choice rather than a number, if there is one. Chosen baselines have one value of it.
    """
    keys = list(groups[0].settings)
    marked = [group for group in groups if group.is_baseline]
    equal = [key for key in keys if len({repr(group.settings[key]) for group in marked}) <= 1]
    choices = [key for key in equal if not is_number(groups[0].settings[key])]
    return next(iter([*choices, *equal, *keys]), None)


def answer_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """Return each baseline, and after it the groups that are compared with it.

    Baselines are those that the user has chosen, or else the groups with the first value of the
    question. A group is compared with the baseline that has most settings in common with it.
    """
    question = question_key(groups)
    baselines = [group for group in groups if group.is_baseline] or [
        group
        for group in groups
        if question is None or group.settings[question] == groups[0].settings[question]
    ]
    sets = [[baseline] for baseline in baselines]
    for group in groups:
        if not any(group is baseline for baseline in baselines):
            common = [_num_common(group, baseline) for baseline in baselines]
            sets[common.index(max(common))].append(group)
    return sets


def _num_common(group: Group, other: Group) -> int:
    return sum(other.settings[key] == value for key, value in group.settings.items())


def short(value: Value) -> str:
    """A setting as it would be typed."""
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_number(value: Value) -> bool:
    """Whether a setting lies on an axis."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def flat(config: object, prefix: str = "") -> dict[str, Value]:
    """Nested groups of knobs as `group.knob` keys; lists as their JSON text."""
    if not isinstance(config, dict):
        return {prefix: config if isinstance(config, (str, int, float, bool)) else _text(config)}
    keys: dict[str, Value] = {}
    for key, value in config.items():
        keys |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return keys


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(value)
