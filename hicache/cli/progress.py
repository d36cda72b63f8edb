"""A progress bar on stderr; one final line where stderr is not a terminal.

Jobs of a sweep end with a line of their own, and those that run side by side would draw over each
other: `line` and `bar` leave out what would be too much.
"""

import sys
from typing import Self

from rich import progress as rich_progress
from rich.console import Console

from hicache.results.metrics import Progress


class ProgressBar:
    """Shows how many requests are done and how far time has come in the run."""

    def __init__(self, title: str, *, bar: bool = True, line: bool = True) -> None:
        self._title = title
        self._line = line
        self._last: Progress | None = None
        self._bar: rich_progress.Progress | None = None
        self._task: rich_progress.TaskID | None = None
        if bar and sys.stderr.isatty():
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}", markup=False),
                rich_progress.BarColumn(),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TextColumn("requests · {task.fields[time]} of simulated time"),
                rich_progress.TimeElapsedColumn(),
                rich_progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def show(self, progress: Progress) -> None:
        """Redraw, if there is anything to draw on."""
        self._last = progress
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(self._title, total=progress.total_count, time="0 s")
        self._bar.update(self._task, completed=progress.done_count, time=clock(progress.time_s))

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._line and self._last is not None:
            sys.stderr.write(
                f"{self._title}: {self._last.done_count:,} of {self._last.total_count:,} requests, "
                f"{clock(self._last.time_s)} replayed\n"
            )


def clock(time_s: float) -> str:
    """Seconds as a person would say them."""
    if time_s < 120:
        return f"{time_s:.0f} s"
    if time_s < 7200:
        return f"{time_s / 60:.0f} min"
    return f"{time_s / 3600:.1f} h"
