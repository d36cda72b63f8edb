"""Stored runs, read from their directories and grouped by the settings in which they differ.

A group holds runs that differ only in random seed and window (part of the trace). A metric of a
group is the median over its runs, shown with the range. Runs made by other code, or from another
trace with the same name, belong to different groups. So do runs with the same seed and window but
different results. Such groups are told apart by keys that the user did not type. An example is
`cache.policy source`; the last resort is `run`, the directory.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from hicache.config import METRICS
from hicache.runs import provenance
from hicache.runs.errors import meant
from hicache.runs.grid import NUMBERED
from hicache.runs.stored import CONFIG_FILE, ERROR_FILE, Value, flat, read_summary, read_yaml
from hicache.workload.workload import GENERATORS

SLICE = "workload.slice"
# keys that may differ inside a group
NOT_A_QUESTION = ("seed", SLICE, "name", "data_dir", "metrics")
COUNTS = ("_count", "_pages", "_tokens", "_bytes")  # a missing count means 0

STANDS_FOR_ITS_GROUP = ("model.name", "hardware.name")
TYPED = ".hydra/overrides.yaml"
COMPOSED = ".hydra/hydra.yaml"
SOURCE = " source"  # suffix of these keys: `hicache source`, `prefetch.stop source`
RULES, OLDER = "rules", "older"  # the key of `StoredRun.rules`, and its value if none is stored
RUN = "run"  # the key of last resort: the run's directory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The settings and metrics of one finished run, read from its directory.

    Attributes:
        path: the directory.
        config: every setting by its full name, such as `cache.policy`.
        summary: every metric by its name, such as `cache/token_hit_rate`.
        typed: the settings that the user gave on the command line or for a sweep. `load_runs` adds
            the config groups, such as `model`, that the user gave for other runs.
        metrics: names of the metrics to show in tables.
        sources: digests of the code and of the input files that produced the run, by name. The
            dictionary is empty if an old version did not record digests.
        rules: name of the rules by which the run decided. Versions that recorded none are "older".
    """

    path: Path
    config: dict[str, Value]
    summary: dict[str, float]
    typed: dict[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = METRICS
    sources: dict[str, str] = field(default_factory=dict)
    rules: str = OLDER

    def setting(self, key: str) -> Value:
        if key == RUN:
            return str(self.path)
        if key == RULES:
            return self.rules
        if key.endswith(SOURCE):
            return self.sources.get(key)
        return self.config[key] if key in self.config else self.typed.get(key)

    @property
    def served(self) -> tuple[Value, Value]:
        return self.config.get(SLICE), self.config.get("seed")

    @property
    def replicate(self) -> tuple[Value, ...]:
        # only the seed of a generated workload changes its sessions
        return self.served if self.config.get("workload.kind") in GENERATORS else self.served[:1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of runs with the same configuration.

    The runs differ only in random seed and in the part of the trace that they replay.

    Attributes:
        settings: the settings that differ between groups, with their values in this group.
        runs: the runs of the group.
        is_baseline: True if the user chose this group as a baseline for other groups.
    """

    settings: dict[str, Value]
    runs: tuple[StoredRun, ...]
    is_baseline: bool = False

    def values(self, metric: str) -> list[float]:
        for run in self.runs:
            if metric not in run.summary:
                raise ValueError(f"{run.path} has no metric {metric}{meant(metric, run.summary)}")
        return [run.summary[metric] for run in self.runs]

    def ratios(self, baseline: "Group", metric: str) -> list[float]:
        base = {run.served: run.summary.get(metric, 0.0) for run in baseline.runs}
        return [run.summary[metric] / base[run.served] for run in self.runs if base.get(run.served)]


class Spread(NamedTuple):
    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))

    def text(self, show: Callable[[float], str]) -> str:
        if self.low == self.high:
            return show(self.middle)
        return f"{show(self.middle)} ({show(self.low)}–{show(self.high)})"


def load_runs(paths: Sequence[Path]) -> list[StoredRun]:
    """Load the finished runs in the given directories.

    A directory may hold one run or all runs of a sweep.

    Raises:
        FileNotFoundError: a directory holds no finished run.
    """
    runs = [load_run(directory) for path in paths for directory in find_runs(path)]
    counts = {key: 0 for run in runs for key in run.summary if key.endswith(COUNTS)}
    chosen = {key for run in runs for key in run.typed.keys() - run.config.keys()}
    return [
        replace(
            run,
            summary=counts | run.summary,
            typed=run.typed | _choices(run.path, chosen - run.typed.keys()),
        )
        for run in runs
    ]


def _choices(path: Path, keys: Collection[str]) -> dict[str, str]:
    # choices such as `model=llama3_8b` that come from defaults or from the file of an experiment
    if not keys or not (path / COMPOSED).is_file():
        return {}
    found = read_yaml(path / COMPOSED, dict)
    for key in ("hydra", "runtime", "choices"):
        found = found.get(key) or {}
        if not isinstance(found, dict):
            raise ValueError(f"{path / COMPOSED}: {key} must be a mapping, got {found!r:.40}")
    return {key: str(found[key]) for key in keys if found.get(key) is not None}


def find_runs(path: Path) -> list[Path]:
    if (path / "summary.json").is_file():
        return [path]
    found = [inner.parent for inner in path.glob("*/summary.json")]
    if not found:
        raise FileNotFoundError(
            f"no finished run: {path} and its subdirectories contain no summary.json"
        )
    return sorted(found, key=_place)


def load_run(path: Path) -> StoredRun:
    config = read_yaml(path / CONFIG_FILE, dict)
    metrics = config.get("metrics") or METRICS
    if not (isinstance(metrics, list | tuple) and all(isinstance(each, str) for each in metrics)):
        raise ValueError(f"{path / CONFIG_FILE}: metrics must be a list of names, got {metrics!r}")
    typed: dict[str, str] = {}
    if (path / TYPED).is_file():
        for override in read_yaml(path / TYPED, list):
            key, _, value = str(override).partition("=")
            typed[key.lstrip("+~")] = value
    settings = flat(config)
    if settings.get("workload.windows"):  # of the last release
        settings[SLICE] = f"{settings.get('workload.window')}/{settings['workload.windows']}"
    origin = provenance.read_provenance(path)
    sources = provenance.sources_of(origin)
    return StoredRun(
        path=path,
        config=settings,
        summary=read_summary(path),
        typed=typed,
        metrics=tuple(metrics),
        sources={f"{name}{SOURCE}": digest for name, digest in sources.items()},
        rules=origin.get(RULES, OLDER),
    )


def _place(path: Path) -> tuple[int, str]:
    number = NUMBERED.match(path.name)
    return (int(number[1]) if number else -1, path.name)


def differing_keys(runs: Sequence[StoredRun]) -> list[str]:
    """Return the names of the settings in which the runs differ, such as `cache.policy`.

    The random seed and the replayed part of the trace do not count as differences. If the settings
    that the user typed explain all differences, only those are returned. `rules` means that the
    runs decided by other rules. Names such as `hicache source` come last; they mean that source
    code or input files differ.
    """
    keys = _differing_knobs(runs)
    if len({run.rules for run in runs}) > 1:  # also where the settings tell the runs apart
        keys.append(RULES)
    made_of = dict.fromkeys(key for run in runs for key in run.sources)
    alike = [group.runs for group in group_runs(runs, keys)]
    keys += [
        key
        for key in made_of
        if any(len({run.sources.get(key) for run in each}) > 1 for each in alike)
    ]
    if any(_disagrees_with_itself(group.runs) for group in group_runs(runs, keys)):
        keys.append(RUN)
    return keys


def _disagrees_with_itself(runs: Sequence[StoredRun]) -> bool:
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
    """Load the runs below `paths`, and group them by configuration.

    Args:
        paths: directories of runs or of sweeps.
        where: conditions such as `cache.policy=lru,slru`. Only runs that meet all of them count.
        baseline: conditions, or directories of runs. A group becomes a baseline if one of its runs
            meets all conditions and lies in one of the directories.

    Raises:
        ValueError: no run meets a condition, or every group is a baseline.
    """
    unfinished = [path for path in paths if (path / ERROR_FILE).is_file()]
    if len(unfinished) < len(paths):  # else the error is that of the first
        paths = [path for path in paths if path not in unfinished]
        for path in unfinished:
            sys.stderr.write(f"{path} is left out: its run failed\n")
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
    """Return the runs that meet every condition.

    A condition such as `cache.policy=lru,slru` lists the allowed values of a setting. A condition
    may also be the directory of a run or of a sweep.

    Raises:
        ValueError: no run meets all conditions.
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
        if not found and values and all(knob not in {*run.config, *run.typed} for run in left):
            raise ValueError(f"there is no setting {knob}{meant(knob, left[0].config)}")
        if not found:
            known = dict.fromkeys(short(run.setting(knob)) for run in left)
            raise ValueError(f"no run has {condition}: {knob} is {' or '.join(known)}")
        left = found
    return left


def question_key(groups: Sequence[Group]) -> str | None:
    """Return the name of the setting whose effect a comparison of the groups shows.

    Each group holds the runs of one configuration, and `Group.settings` the settings in which the
    groups differ. None means that there are none. Settings that differ between the groups which the
    user chose as baselines come last. Of the rest, those with text values come before those with
    numbers.
    """
    keys = list(groups[0].settings)
    marked = [group for group in groups if group.is_baseline]
    equal = [key for key in keys if len({repr(group.settings[key]) for group in marked}) <= 1]
    choices = [key for key in equal if not is_number(groups[0].settings[key])]
    return next(iter([*choices, *equal, *keys]), None)


def answer_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """Return lists of groups to compare. Each list starts with a baseline.

    Each group holds the runs of one configuration. The baselines are the groups that the user
    chose. If the user chose none, they are the groups with the first value of the compared setting,
    for example the eviction policy. Each other group joins the baseline with which it shares the
    most settings.
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
            common = [
                len(group.settings.items() & baseline.settings.items()) for baseline in baselines
            ]
            sets[common.index(max(common))].append(group)
    return sets


def short(value: Value) -> str:
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
