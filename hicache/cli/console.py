"""The console to print to, and functions that print a table without cutting off text."""

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

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


def show_numbers(terminal: Console, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table of numbers, where a last cell without a heading stands on the left."""
    columns = [Column(each, justify="right" if each else "left") for each in headings]
    table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    show_table(terminal, table, wraps=True)


def _console(width: int | None) -> Console:
    return Console(highlight=False, markup=False, emoji=False, width=width)
