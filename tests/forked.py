"""A script in a copy of the test's process, which has imported what the script imports."""

import multiprocessing
import os
import runpy
import sys
import warnings
from pathlib import Path


def _run(script: Path, folder: Path, printed: Path) -> None:
    with printed.open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(folder)
    warnings.resetwarnings()  # those of pytest are errors
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()


def run_script(script: Path, folder: Path, printed: Path) -> str:
    """Run a script in a folder as `python SCRIPT` does; return what it printed.

    Raises:
        AssertionError: the script failed.
    """
    with warnings.catch_warnings(action="ignore"):  # that a process with threads forks
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(script, folder, printed)
        )
        process.start()
    process.join()
    text = printed.read_text()
    assert process.exitcode == 0, text
    return text
