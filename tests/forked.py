"""Functions and scripts in a copy of the test's process, which has imported what they import."""

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path


def print_to(output: int) -> None:
    """Send all that this process prints to an open file."""
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    warnings.resetwarnings()  # those of pytest are errors


def _run(script: Path, folder: Path, printed: Path, *arguments: str) -> None:
    with printed.open("w") as output:
        print_to(output.fileno())
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()


class Forked(multiprocessing.get_context("fork").Process):  # type: ignore[name-defined,misc]
    """A call of a function in a copy of this process."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        super().__init__(target=function, args=arguments, daemon=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")
            self.start()


def forked(function: Callable[..., object], *arguments: object) -> int:
    """Call a function in a copy of this process; return the exit code."""
    process = Forked(function, *arguments)
    process.join()
    return process.exitcode or 0


def run_script(script: Path, folder: Path, printed: Path, *arguments: str) -> str:
    """Run a script in a folder as `python SCRIPT` does; return what it printed.

    Raises:
        AssertionError: the script failed.
    """
    code, text = forked(_run, script, folder, printed, *arguments), printed.read_text()
    assert code == 0, text
    return text
