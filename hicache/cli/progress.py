"""Progress bars on stderr for a run and for the jobs of a sweep, shown only on a terminal."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.cli.console import console
from hicache.results.metrics import Progress
from hicache.runs.grid import find_jobs
from hicache.runs.stored import ERROR_FILE, SUMMARY_FILE, is_finished

if TYPE_CHECKING:
    from rich import progress as rich_progress

LOOK_S = 0.5  # seconds between two scans of the job directories


def _new_bar(text: str) -> "rich_progress.Progress":
    from rich import progress as rich_progress
    from rich.console import Console

    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn(text),
        rich_progress.TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # output to a file stays in the file
        disable=not sys.stderr.isatty(),
    )


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[Progress], None]]:
    if not sys.stderr.isatty():  # a small run would spend a thirtieth of its time on importing it
        yield lambda _: None
        return
    text = "requests · {task.fields[time]} of simulated time"
    with _new_bar(text) as bar:
        task = bar.add_task(title, total=None, time="0 s")

        def show(progress: Progress) -> None:
            done, total, time = progress.done_count, progress.total_count, clock(progress.time_s)
            bar.update(task, completed=done, total=total, time=time)

        yield show


class JobWatch:
    """Shows the progress of a sweep, which consists of many runs called jobs.

    A line is printed when a job ends, and one progress bar covers all jobs. A thread looks for new
    files in the directories of the jobs, so jobs may run in any process.

    Args:
        directory: the directory of the sweep, with one directory per job.
        num_jobs: the number of jobs in the sweep.
        line: returns the text to print about a finished job, given the directory of the job.
    """

    def __init__(self, directory: Path, num_jobs: int, line: Callable[[Path], str]) -> None:
        self.directory, self.num_jobs = directory, num_jobs
        self._line = line
        self._before = self._ends()
        self._kept = {path for path in self._before if is_finished(path)}
        self._ended: set[Path] = set()  # jobs that ended since the start
        self._started_s = time.monotonic()
        self._stopped = threading.Event()
        self._bar = _new_bar("jobs{task.fields[left]}")
        self._task = self._bar.add_task("sweep", total=num_jobs, completed=len(self._kept), left="")
        self._bar.start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._look()
        self._bar.stop()
        for path in self._before:
            if path in self._kept - self._ended:
                self._print(path, "already finished, and nothing has changed since")

    def jobs(self) -> list[Path]:
        return list(find_jobs(self.directory).values())

    def left(self, now_s: float) -> str:
        num_left = self.num_jobs - len(self._kept | self._ended)
        if not self._ended:
            return ""
        return f", {clock((now_s - self._started_s) / len(self._ended) * num_left)} left"

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        for path, at_ns in self._ends().items():
            if path not in self._ended and self._before.get(path) != at_ns:
                self._ended.add(path)
                if is_finished(path):
                    self._print(path, self._line(path))
        done, left = len(self._kept | self._ended), self.left(time.monotonic())
        self._bar.update(self._task, completed=done, left=left)

    def _ends(self) -> dict[Path, int]:
        # the time when each job ended: the modification time of its last file
        ends = {}
        for path in self.jobs():
            for name in (ERROR_FILE, SUMMARY_FILE):
                with suppress(FileNotFoundError):
                    ends[path] = (path / name).stat().st_mtime_ns
        return ends

    def _print(self, path: Path, text: str) -> None:
        number = int(path.name.partition("_")[0])
        title = f"{path.name} ({number + 1} of {self.num_jobs})"
        console().print(f"{title}  →  {text}", soft_wrap=True)


def clock(time_s: float) -> str:
    if time_s < 120:
        return f"{time_s:.0f} s"
    if time_s < 7200:
        return f"{time_s / 60:.0f} min"
    return f"{time_s / 3600:.1f} h"
