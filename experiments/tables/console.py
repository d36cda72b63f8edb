"""The terminal, and tables on it."""

from rich.console import Console

from experiments.tables.sheet import Sheet, as_lines

WIDTH = 140


def console() -> Console:
    """Standard output, at one width wherever it is not a terminal."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=WIDTH)


def show_sheet(sheet: Sheet, title: str) -> None:
    """Print a table: to a terminal as narrow as need be, to anything else as wide as it is."""
    screen = console()
    head, body = as_lines(sheet, screen.width if screen.is_terminal else None)
    screen.print(f"\n{title}\n", style="italic", markup=False, soft_wrap=True)
    for line in head:
        screen.print(line, style="bold", markup=False, soft_wrap=True)
    for line in (*body, "") if sheet.notes else body:
        screen.print(line, markup=False, soft_wrap=True)
    for note in sheet.notes:
        screen.print(note, markup=False, soft_wrap=not screen.is_terminal)
