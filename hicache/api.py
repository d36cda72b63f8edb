"""hicache from Python: `hicache.run`, `sweep`, `load` and `compare`.

A run from Python writes the same directory as `hicache run`, but W&B is off unless
`tracker.wandb_mode` is among the overrides. `requests`, `table`, `plot` and `compare` need the
optional dependencies `hicache[analysis]`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.cli.progress import progress_bar
from hicache.cli.sweep import sum_up
from hicache.cli.tables.groups import compared_groups, find_runs
from hicache.config import METRICS, ExperimentConfig
from hicache.results.requests_file import read_requests
from hicache.results.verdict import objections
from hicache.runs.checks import locked
from hicache.runs.errors import CONFIG_ERRORS, sentence
from hicache.runs.grid import choices_of, jobs_of, name_of, new_dir, varied
from hicache.runs.job import run_job
from hicache.runs.schema import config_of, grid_of
from hicache.runs.stored import is_finished, read_summary

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Run:
    """One finished run of an experiment, with its results read from a directory.

    Attributes:
        path: the directory that holds the result files of the run.
    """

    path: Path

    @cached_property
    def summary(self) -> dict[str, float]:
        """Return the metrics of the whole run, by name, such as `cache/token_hit_rate`.

        docs/metrics.md explains every metric.
        """
        return read_summary(self.path)

    @cached_property
    def requests(self) -> "pd.DataFrame":
        """Return a table with one row per request. Times are in ns, lengths in tokens."""
        return read_requests(self.path)

    @property
    def verdict(self) -> list[str]:
        """Return one sentence for each reason to distrust the results, such as an overloaded GPU.

        The list is empty if no such reason was found.
        """
        return [each.sentence for each in objections([self.summary])]

    def explain(self, *, request: int | None = None, slowest: int = 1, trust: bool = False) -> str:
        """Explain in words what a request waited for, and why it missed the KV cache.

        The method simulates the run again, which takes about twice as long as the original run.

        Args:
            request: the id of the request to explain. None means the slowest requests.
            slowest: how many of the slowest requests to explain. It is used only if `request` is
                None. The slowest requests are those with the longest time to first token.
            trust: True runs the classes and functions outside hicache that the run names.
        """
        from hicache.cli.explain.command import lines
        from hicache.cli.explain.rerun import rerun

        chosen, count = ([], slowest) if request is None else ([request], 0)
        return "\n".join(lines(rerun(self.path, trust=trust), chosen, count)).strip()

    def plot(self) -> "Figure":
        """Plot the hit rate of each cache tier over time, and the waiting and running requests."""
        from hicache.results.figures import draw_tokens  # matplotlib takes a second to import

        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return draw_tokens([json.loads(line) for line in lines], run=self.path.name)


@dataclass(frozen=True)
class Sweep:
    """The finished runs of a sweep, which tries every combination of some settings.

    Attributes:
        path: the directory of the sweep. It holds summary files, and one directory per run.
        runs: the finished runs, in the order of the combinations.
    """

    path: Path
    runs: tuple[Run, ...]

    @property
    def table(self) -> "pd.DataFrame":
        """Return a table with one row per configuration: its settings and its metrics."""
        return compare(self.path)


def run(
    *overrides: str,
    policy: type | None = None,
    policy_args: Mapping[str, object] | None = None,
    out_dir: str | Path | None = None,
) -> Run:
    """Run one experiment and return its results.

    Args:
        overrides: settings in the form `group.name=value`, for example `"workload.limit=500"`.
        policy: your own policy class, for `cache.policy`.
        policy_args: keyword arguments for the constructor of `policy`.
        out_dir: the directory for the results. None means a new directory below `outputs/`. If it
            holds the results of the same run, these are returned.

    Raises:
        ValueError: a setting is unknown or has an invalid value, `policy` is no class that can be
            imported, an experiment has a grid, or `out_dir` holds another finished run.
    """
    told = [*_untracked(overrides), *_choice_of(policy, policy_args)]
    grid = _grid_of(told)
    if grid:
        raise ValueError(f"a grid of {', '.join(grid)} is no single run: use hicache.sweep")
    config = _config_of(*told)
    return _run(config, _new_dir(config, out_dir), overrides)


def sweep(*overrides: str, out_dir: str | Path | None = None) -> Sweep:
    """Run one experiment for every combination of the listed values.

    For example, `"cache.host_gib=32,64"` lists two values of one setting, and
    `"experiment=prefetch_stop"` brings a grid of its own. The experiments run one after another in
    this process. The function prints a table of the results if the optional
    dependencies `hicache[analysis]` are installed.

    Args:
        overrides: settings in the form `group.name=value` or `group.name=value,value`.
        out_dir: the directory for all results. None means a new directory below `outputs/`.

    Raises:
        ValueError: a setting is unknown or has an invalid value.
    """
    told = _untracked(overrides)
    choices = choices_of([*_grid_of(told).values(), *told])
    jobs = jobs_of(choices)
    configs = [_config_of(*job) for job in jobs]
    directory = _new_dir(configs[0], out_dir)
    names = [name_of(number, varied(job, choices)) for number, job in enumerate(jobs)]
    runs = tuple(
        _run(config, directory / name, varied(job, choices), is_job=True)
        for config, name, job in zip(configs, names, jobs, strict=True)
    )
    sum_up(directory, [each.path for each in runs], title=configs[0].name)
    return Sweep(directory, runs)


def load(path: str | Path) -> Run | Sweep:
    """Read the results of a finished run or of a sweep from its directory.

    Raises:
        FileNotFoundError: the directory holds no finished run.
    """
    path = Path(path)
    if is_finished(path):
        return Run(path)
    return Sweep(path, tuple(Run(each) for each in find_runs(path)))


def compare(
    *paths: str | Path | Run | Sweep,
    paired: bool = False,
    metrics: Sequence[str] = METRICS,
    where: Sequence[str] = (),
    baseline: str | Path | Run | Sweep | None = None,
) -> "pd.DataFrame":
    """Return a table that compares runs or sweeps, with one row per configuration.

    Args:
        paths: directories of results, or objects returned by `run`, `sweep` and `load`.
        paired: True compares the configurations request by request. Only requests that finished
            under both of the compared configurations count.
        metrics: names of the metrics to show, such as `request/ttft_s_mean`.
        where: conditions such as `"cache.policy=lru,slru"`. Only runs that meet all of them
            count.
        baseline: the runs that all others are compared with, given as a condition or as one of
            `paths`. None chooses a baseline: the runs with the first value of the first setting
            that differs and is not a number.
    """
    from hicache.cli.tables.comparison import table_of
    from hicache.cli.tables.paired_table import table_of_pairs

    base = [] if baseline is None else [str(_place(baseline))]
    groups = compared_groups([_place(each) for each in paths], where=where, baseline=base)
    if paired:
        return table_of_pairs(groups, metrics).values
    return table_of(groups, metrics).values


def _place(where: str | Path | Run | Sweep) -> Path:
    return Path(where.path if isinstance(where, Run | Sweep) else where)


def _run(
    config: ExperimentConfig, out_dir: Path, overrides: Sequence[str], *, is_job: bool = False
) -> Run:
    out_dir.mkdir(parents=True, exist_ok=True)
    with locked(out_dir):
        run_job(config, out_dir, overrides, is_job=is_job, bar=None if is_job else progress_bar)
    return Run(out_dir)


def _grid_of(overrides: Sequence[str]) -> dict[str, str]:
    # the settings of an experiment's own grid that the overrides do not give, as overrides
    try:
        return grid_of(*overrides)
    except CONFIG_ERRORS as error:
        raise ValueError(sentence(error)) from None


def _new_dir(config: ExperimentConfig, out_dir: str | Path | None) -> Path:
    return new_dir(config.name) if out_dir is None else Path(out_dir)


def _config_of(*overrides: str) -> ExperimentConfig:
    try:
        return config_of(*overrides)
    except CONFIG_ERRORS as error:
        raise ValueError(sentence(error)) from None


def _untracked(overrides: Sequence[str]) -> list[str]:
    return ["tracker.wandb_mode=disabled", *overrides]


def _choice_of(policy: type | None, arguments: Mapping[str, object] | None) -> list[str]:
    if policy is None:
        return []
    if not isinstance(policy, type) or "<locals>" in policy.__qualname__:
        raise ValueError(
            f"policy must be a class that is defined at the top of a module, got {policy!r}"
        )
    told = [f"cache.policy={policy.__module__}:{policy.__qualname__}"]
    return told + [
        f"+cache.policy_args.{name}={value}" for name, value in (arguments or {}).items()
    ]
