"""The end of a sweep: one table, one figure and two files of numbers over all its runs.

Hydra calls `SweepEnd` in the process that started the sweep, once all jobs are done. All it knows
it reads from the run directories, so it does not matter which process ran which job.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from hicache.cli.job import explain
from hicache.cli.tables.console import console
from hicache.cli.tables.groups import (
    WINDOW,
    Group,
    Spread,
    StoredRun,
    differing_keys,
    group_runs,
    job_order,
    load_run,
    with_counts,
)
from hicache.results.verdict import in_short, objections


class SweepEnd(Callback):
    """Sums a sweep up, and ends the program with 1 if any of its jobs failed."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table and, as the last line, the directory of the sweep."""
        directory = Path(OmegaConf.select(config, "hydra.sweep.dir")).absolute()
        jobs = [path for path in directory.iterdir() if path.is_dir() and path.name.isdigit()]
        jobs.sort(key=job_order)
        finished = [path for path in jobs if _failure(path) is None]
        is_written = True
        if finished:
            try:
                sum_up(directory, [load_run(path) for path in finished], title=str(config.name))
            except (OSError, ValueError) as error:
                explain(error)
                is_written = False
        for path in jobs:
            failure = _failure(path)
            if failure is not None:
                sys.stderr.write(f"job {path.name} failed: {failure}\n")
        console().print(str(directory), soft_wrap=True)
        if len(finished) < len(jobs) or not is_written:
            sys.stdout.flush()
            sys.exit(1)


def sum_up(directory: Path, runs: Sequence[StoredRun], *, title: str) -> None:
    """Print the table, and write `sweep.csv`, `sweep.json` and `sweep.png`/`.pdf`."""
    from hicache.cli.tables.result_table import show_result  # pandas takes half a second
    from hicache.cli.tables.table import over_runs, table_of

    runs = with_counts(runs)
    keys = differing_keys(runs)
    groups = group_runs(runs, keys)
    known = set.intersection(*(set(run.summary) for run in runs))
    metrics = tuple(metric for metric in runs[0].metrics if metric in known)
    for metric in runs[0].metrics:
        if metric not in known:
            sys.stderr.write(f"some runs have no metric {metric}, so the table leaves it out\n")
    if len(runs) > 1:
        show_result(table_of(groups, metrics), ": ".join(filter(None, [title, over_runs(groups)])))
    _write_csv(directory / "sweep.csv", runs, keys)
    _write_json(directory / "sweep.json", groups)
    if len(groups) > 1:
        from hicache.cli.tables.sweep_figure import draw_sweep  # matplotlib
        from hicache.results.report import save

        figure = draw_sweep(groups, metrics, title=title)
        for name in ("sweep.png", "sweep.pdf"):
            save(figure, directory / name)


def _failure(job: Path) -> str | None:
    error = job / "error.txt"
    if error.exists():
        return (error.read_text().strip() or "no reason was recorded").splitlines()[-1]
    return None if (job / "summary.json").exists() else "the run ended without a summary.json"


def _write_csv(path: Path, runs: Sequence[StoredRun], keys: Sequence[str]) -> None:
    import pandas as pd

    settings = [*keys, WINDOW, "seed"]
    metrics = sorted({metric for run in runs for metric in run.summary})
    rows = [
        {
            "job": run.path.name,
            **{key: run.setting(key) for key in settings},
            "verdict": in_short(objections([run.summary])),
            **run.summary,
        }
        for run in runs
    ]
    table = pd.DataFrame(rows, columns=["job", *settings, "verdict", *metrics], dtype=object)
    table.to_csv(path, index=False)


def _write_json(path: Path, groups: Sequence[Group]) -> None:
    from hicache.cli.tables.table import answer_sets
    from hicache.cli.tables.verdicts import Verdicts

    verdicts = Verdicts(answer_sets(groups))
    content = [describe(group) | {"verdict": verdicts.sentences(group)} for group in groups]
    path.write_text(json.dumps(content, indent=2) + "\n")


def describe(group: Group) -> dict[str, object]:
    """A group as plain values: its settings, its runs, and each metric over them."""
    shared = set.intersection(*(set(run.summary) for run in group.runs))
    return {
        "settings": group.settings,
        "windows": [run.setting(WINDOW) for run in group.runs],
        "seeds": [run.config["seed"] for run in group.runs],
        "overloaded": any(run.is_overloaded for run in group.runs),
        "metrics": {
            metric: dict(
                zip(("median", "min", "max"), Spread.of(group.values(metric)), strict=True)
            )
            for metric in sorted(shared)
        },
    }
