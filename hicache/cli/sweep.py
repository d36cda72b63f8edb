"""A whole sweep: progress while it runs; one table, one figure and summary files at its end.

Hydra calls `SweepProgress` in the process that started the sweep. The callback reads the state of
jobs only from their directories, so any process on any machine may run a job.
"""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from hicache.cli.console import console
from hicache.cli.progress import JobWatch
from hicache.cli.tables.groups import SLICE, StoredRun, differing_keys, group_runs, load_runs
from hicache.cli.terminal import line_of
from hicache.results.tracking import sync_command, track_sweep
from hicache.results.verdict import in_short, objections
from hicache.runs.errors import missing, report_error
from hicache.runs.grid import choices_of_sweep, jobs_of, stored_choices
from hicache.runs.schema import stored_config
from hicache.runs.stored import CONFIG_FILE, is_finished, read_yaml

if TYPE_CHECKING:
    from hicache.cli.tables.sweep_page import Findings

_WATCHES: list[JobWatch] = []  # not an attribute: launchers pickle callbacks, but not threads


class SweepProgress(Callback):
    """Hydra callback that shows the progress of a sweep, and prints its results at the end.

    The callback ends the program with exit code 1 if any run of the sweep failed.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        num_jobs = len(jobs_of(choices_of_sweep(config.hydra)))
        _WATCHES.append(JobWatch(Path(config.hydra.sweep.dir).absolute(), num_jobs, line_of))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        watch, finished = _stop()
        is_written = True
        try:
            if finished:
                found = sum_up(watch.directory, finished, title=str(config.name))
                # that of the jobs, whose overrides the sweep itself does not have
                tracker = stored_config(finished[0] / CONFIG_FILE).tracker
                group = f"{config.name}/{watch.directory.name}"
                if found is not None:
                    tables = {"arms": found.table.texts, "intervals": found.comparisons}
                    notes = [*found.sentences, *found.remarks, *found.table.notes]
                    choices = stored_choices(watch.directory)
                    grid = {
                        key: [each.partition("=")[2] for each in values]
                        for key, values in choices.items()
                    }
                    track_sweep(watch.directory, tracker, group, grid, tables, notes)
        except (OSError, ValueError) as error:
            report_error(error)
            is_written = False
        for path in watch.jobs():
            if path not in finished:
                sys.stderr.write(f"job {path.name} failed: {_failure(path)}\n")
        command = sync_command(watch.directory)
        if command is not None:
            console().print(f"upload to W&B: {command}", soft_wrap=True)
        console().print(str(watch.directory), soft_wrap=True)
        if len(finished) < watch.num_jobs or not is_written:
            sys.stdout.flush()
            sys.exit(1)


def end_early(why: str) -> bool:
    """Print the results of an interrupted sweep, and the reason `why` it ended early.

    Return False if this process has not started a sweep.
    """
    if not _WATCHES:
        return False
    watch, finished = _stop()
    if finished:
        sum_up(
            watch.directory,
            finished,
            title=str(read_yaml(finished[0] / CONFIG_FILE, dict).get("name")),
        )
    sys.stderr.write(
        f"{why}: {len(finished)} of {watch.num_jobs} jobs are finished; to continue, repeat the "
        f"command with hydra.sweep.dir={os.path.relpath(watch.directory)}\n"
    )
    console().print(str(watch.directory), soft_wrap=True)
    return True


def _stop() -> tuple[JobWatch, list[Path]]:
    # also returns the directories of finished jobs
    watch = _WATCHES.pop()
    watch.stop()
    return watch, [path for path in watch.jobs() if is_finished(path)]


def sum_up(directory: Path, jobs: Sequence[Path], *, title: str) -> "Findings | None":
    """Print and return the results of the finished runs of a sweep, and write summary files.

    The results are a table, and what it shows, with intervals if there are at least three seeds or
    slices.

    The files are `sweep.csv`, `sweep.json`, `sweep.html`, `sweep.png` and `sweep.pdf` in
    `directory`. The last two are written only if the runs differ in their settings. If pandas is
    missing, the function only prints a note.

    Args:
        directory: the directory of the sweep.
        jobs: the directories of the finished runs.
        title: a heading for the table and for the figures.
    """
    if find_spec("pandas") is None:
        sys.stderr.write(f"no table of the sweep: {missing('pandas')}\n")
        return None
    from hicache.cli.tables.comparison import over_runs, table_of
    from hicache.cli.tables.paired_table import PAIRED
    from hicache.cli.tables.result_table import as_json, show_result  # pandas takes half a second
    from hicache.cli.tables.sweep_page import findings_of, write_sweep_page

    runs = load_runs(jobs)
    keys = differing_keys(runs)
    groups = group_runs(runs, keys)
    known = set.intersection(*(set(run.summary) for run in runs))
    metrics = tuple(metric for metric in runs[0].metrics if metric in known)
    for metric in runs[0].metrics:
        if metric not in known:
            sys.stderr.write(f"some runs have no metric {metric}, so the table leaves it out\n")
    found = findings_of(groups, metrics, table_of(groups, metrics))
    if len(runs) > 1:
        show_result(found.table, ": ".join(filter(None, [title, over_runs(groups)])))
    if found.paired is not None:
        show_result(found.paired, PAIRED)
        console().print(found.sentences[0], soft_wrap=True)
    _write_csv(directory / "sweep.csv", runs, keys)
    (directory / "sweep.json").write_text(as_json(table_of(groups, sorted(known))) + "\n")
    write_sweep_page(directory, groups, metrics, found, title)
    if len(groups) > 1:
        from hicache.cli.tables.sweep_figure import draw_sweep  # matplotlib
        from hicache.results.figures import save

        figure = draw_sweep(groups, metrics, title=title)
        for name in ("sweep.png", "sweep.pdf"):
            save(figure, directory / name)
    return found


def _failure(job: Path) -> str:
    error = job / "error.txt"
    if not error.exists():
        return "the run ended without a summary.json"
    return (error.read_text().strip() or "no reason was recorded").splitlines()[0]


def _write_csv(path: Path, runs: Sequence[StoredRun], keys: Sequence[str]) -> None:
    import pandas as pd

    settings = [*keys, SLICE, "seed"]
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
