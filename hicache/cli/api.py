"""hicache from Python: `hicache.run`, `sweep`, `load` and `compare`.

A run from Python writes the same directory as `hicache run`, but W&B is off unless
`tracker.wandb_mode` is among the overrides. `requests`, `table`, `plot` and `compare` need the
extra [analysis].
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hicache import experiment
from hicache.cli.grid import choices_of, jobs_of, name_of, varied
from hicache.cli.job import run_job
from hicache.cli.progress import ProgressBar
from hicache.cli.schema import config_of
from hicache.cli.stored import is_finished
from hicache.cli.sweep import sum_up
from hicache.cli.tables.groups import compared_groups, find_runs
from hicache.config import METRICS, ExperimentConfig
from hicache.results.requests_file import read_requests
from hicache.results.verdict import objections

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Run:
    """A finished run, read from its directory.

    Attributes:
        path: the directory of the run.
    """

    path: Path

    @cached_property
    def summary(self) -> dict[str, float]:
        """Return the metrics of the whole run, by the keys of docs/metrics.md."""
        stored: dict[str, float] = json.loads((self.path / "summary.json").read_text())
        return stored

    @cached_property
    def requests(self) -> "pd.DataFrame":
        """Return one row per request: times in ns, lengths in tokens."""
        return read_requests(self.path)

    @property
    def verdict(self) -> list[str]:
        """Return one sentence for each reason to doubt the numbers; empty if there is none."""
        return [each.sentence for each in objections([self.summary])]

    def explain(self, *, request: int | None = None, slowest: int = 1) -> str:
        """Describe what a request waited for and why its tokens were computed.

        Replays the run, which takes about twice as long as the run did.

        Args:
            request: the id of a request; None means the slowest requests.
            slowest: how many requests to describe, those with the longest time to first token.
        """
        from hicache.cli.explain.command import lines
        from hicache.cli.explain.rerun import rerun

        chosen = [] if request is None else [request]
        count = slowest if request is None else None
        return "\n".join(lines(rerun(self.path), chosen, count, is_trace=False)).strip()

    def plot(self) -> "Figure":
        """Draw the origin of the prompt tokens over time, and the queue length."""
        from hicache.results.report import draw_tokens  # matplotlib takes a second to import

        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return draw_tokens([json.loads(line) for line in lines], run=self.path.name)


@dataclass(frozen=True)
class Sweep:
    """The finished runs of a sweep.

    Attributes:
        path: the directory, which holds one directory per run and the summary of the sweep.
        runs: the runs in the order of the grid.
    """

    path: Path
    runs: tuple[Run, ...]

    @property
    def table(self) -> "pd.DataFrame":
        """Return one row per configuration: its settings and its metrics."""
        return compare(self.path)


def run(
    *overrides: str,
    policy: type | None = None,
    policy_args: Mapping[str, object] | None = None,
    out_dir: str | Path | None = None,
) -> Run:
    """Run one experiment.

    Args:
        overrides: settings as on the command line: `"model=llama3_8b"`, `"workload.limit=500"`.
        policy: your policy class, for `cache.policy`.
        policy_args: keyword arguments for the policy class.
        out_dir: a new directory for the run; None means one below `outputs/`.

    Raises:
        ValueError: a knob is unknown or has an invalid value.
    """
    config = config_of(*_untracked(overrides), *_choice_of(policy, policy_args))
    return _run(config, _new_dir(config, out_dir))


def sweep(*overrides: str, out_dir: str | Path | None = None) -> Sweep:
    """Run every combination of the values that overrides list: `"cache.host_gib=32,64"`.

    Makes the runs one after another in this process. Prints the table of the sweep if the extra
    [analysis] is installed.

    Raises:
        ValueError: a knob is unknown or has an invalid value.
    """
    choices = choices_of(_untracked(overrides))
    jobs = jobs_of(choices)
    configs = [config_of(*job) for job in jobs]
    directory = _new_dir(configs[0], out_dir)
    names = [name_of(number, varied(job, choices)) for number, job in enumerate(jobs)]
    runs = tuple(_run(each, directory / name) for each, name in zip(configs, names, strict=True))
    sum_up(directory, [each.path for each in runs], title=configs[0].name)
    return Sweep(directory, runs)


def load(path: str | Path) -> Run | Sweep:
    """Read a run or a sweep from its directory.

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
    """Compare runs or sweeps: one row per configuration.

    Args:
        paths: directories, or results of `run`, `sweep` and `load`.
        paired: True compares request by request, over the requests that both sides finished.
        metrics: keys of `summary.json`.
        where: conditions that the runs must fulfill: `"cache.eviction=lru,slru"`.
        baseline: the runs to compare with: a condition, or one of `paths`; None means the runs with
            the first value of the first setting that is a choice.
    """
    from hicache.cli.tables.comparison import table_of
    from hicache.cli.tables.paired_table import compare_pairs, table_of_pairs

    base = [] if baseline is None else [str(_place(baseline))]
    groups = compared_groups([_place(each) for each in paths], where=where, baseline=base)
    if paired:
        return table_of_pairs(groups, compare_pairs(groups, metrics)).values
    return table_of(groups, metrics).values


def _place(where: str | Path | Run | Sweep) -> Path:
    return Path(where.path if isinstance(where, Run | Sweep) else where)


def _run(config: ExperimentConfig, out_dir: Path) -> Run:
    if is_finished(out_dir):
        raise ValueError(f"{out_dir} holds a finished run: name another directory")
    bar = ProgressBar(config.name)
    name = f"{config.name}/{out_dir.name}"
    run_job(
        experiment.run, config, out_dir, group=config.name, name=name, bar=bar, show=lambda _: None
    )
    return Run(out_dir)


def _new_dir(config: ExperimentConfig, out_dir: str | Path | None) -> Path:
    if out_dir is not None:
        return Path(out_dir)
    return Path(
        "outputs", config.name, f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}_{secrets.token_hex(3)}"
    )


def _untracked(overrides: Sequence[str]) -> list[str]:
    return ["tracker.wandb_mode=disabled", *overrides]


def _choice_of(policy: type | None, arguments: Mapping[str, object] | None) -> list[str]:
    if policy is None:
        return []
    told = [f"cache.policy={policy.__module__}:{policy.__qualname__}"]
    return told + [
        f"+cache.policy_args.{name}={value}" for name, value in (arguments or {}).items()
    ]
