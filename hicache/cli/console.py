"""The console to print to, and a function that prints a table without cutting off text."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from hicache.config import ExperimentConfig

WIDTH = 140


def machines_of(config: ExperimentConfig) -> str:
    """Return the engines of a simulated run and their GPUs in words."""
    parallel = config.parallel
    where = f"{config.tp} × {config.hardware.name}"
    if parallel.pp > 1:
        where = f"{parallel.pp} stages × {where}"
    if parallel.prefill:
        return f"{where}, {parallel.prefill} prefill and {parallel.decode} decode engines"
    return f"{where} × {parallel.replicas}" if parallel.replicas > 1 else where


def console() -> Console:
    terminal = _console(None)
    return terminal if terminal.is_terminal else _console(WIDTH)


def show_table(terminal: Console, table: Table, *, wraps: bool = False) -> None:
    """Print a table without cutting off text.

    The table keeps its full width, even if the terminal is narrower. If `wraps` is True, long cells
    are broken between words to fit the terminal.
    """
    size = Measurement.get(terminal, terminal.options.update(width=10_000), table)
    is_narrow = wraps and terminal.is_terminal
    width = max(terminal.width, size.minimum) if is_narrow else size.maximum
    wide = _console(width)
    with wide.capture() as printed:
        wide.print(table)
    for line in printed.get().splitlines():
        terminal.print(line.rstrip(), soft_wrap=True)


def _console(width: int | None) -> Console:
    return Console(highlight=False, markup=False, emoji=False, width=width)
