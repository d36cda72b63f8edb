"""The program of one side's process; see `experiments.diff.protocol`."""

import importlib
import os
import resource
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from experiments.diff.protocol import Pools, Side, SideError


def main(module: str, wire: str) -> None:
    serve(module, Connection(int(wire)))
    os._exit(0)  # engines leave threads behind that wait for ever


def serve(module: str, wire: Connection) -> None:
    try:
        pools, options = wire.recv()
        side = _opener(module)(pools, options)
        wire.send(side.about())
        while calls := wire.recv():
            answers = [getattr(side, name)(*arguments) for name, *arguments in calls]
            wire.send(answers[-1])
        side.close()
        wire.send(peak_bytes())
    except Exception as error:
        traceback.print_exc()  # full traceback for the log
        said = error if isinstance(error, SideError) else f"{type(error).__name__}: {error}"
        wire.send(SideError(str(said).partition("\n")[0]))


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had so far."""
    # in Linux, ru_maxrss also counts the process that started this one
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere it is in KiB


def _opener(module: str) -> Callable[[Pools, dict[str, str]], Side]:
    try:
        opener: Callable[[Pools, dict[str, str]], Side] = importlib.import_module(module).open_side
    except Exception as error:  # any error, also of a release's import
        raise SideError(f"cannot be imported: {type(error).__name__}: {error}") from error
    return opener
