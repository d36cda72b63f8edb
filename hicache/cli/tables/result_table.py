"""A table and its forms: for a terminal, for a page, for a program.

Nothing is elided in any, and nothing that a user named is read as markup.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from hicache.cli.console import console, show_table


@dataclass(slots=True)
class Row:
    """One row: `texts` by heading, and the `values` behind them, each under a name of its own."""

    texts: dict[str, str] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)

    def add(self, heading: str, text: str, **values: object) -> None:
        """Another column; `values` are named `HEADING`, or `HEADING part` if there are several."""
        self.texts[heading] = text
        self.values |= values


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """Rows in sections, and what a reader of them must know; names stand in the first columns."""

    sections: Sequence[Sequence[Row]]
    notes: Sequence[str]
    num_names: int

    @cached_property
    def texts(self) -> pd.DataFrame:
        """What a person reads, one column a heading."""
        rows = [row.texts for section in self.sections for row in section]
        return pd.DataFrame(rows, dtype=str).fillna("")

    @property
    def values(self) -> pd.DataFrame:
        """Plain values for a program: every number with all its digits."""
        rows = [row.values for section in self.sections for row in section]
        return pd.DataFrame(rows, dtype=object)


def show_result(result: ResultTable, title: str) -> None:
    """Print a table with its notes."""
    terminal = console()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, heading in enumerate(result.texts):
        is_name = place < result.num_names
        table.add_column(
            Text(str(heading)), justify="left" if is_name else "right", overflow="fold"
        )
    texts = result.texts.itertuples(index=False)
    for section in result.sections:
        for _ in section:
            table.add_row(*map(Text, next(texts)))
        table.add_section()
    terminal.print(f"\n{title}", style="italic", soft_wrap=True)
    show_table(terminal, table, wraps=True)
    for note in result.notes:
        terminal.print(note, soft_wrap=not terminal.is_terminal)


def as_csv(result: ResultTable) -> str:
    """Plain values for a program, every number with all its digits; without the notes."""
    text: str = result.values.to_csv(index=False, lineterminator="\n")
    return text.rstrip("\n")


def as_json(result: ResultTable) -> str:
    """The same values as `as_csv`, one object a row; null where a row has no such value."""
    return json.dumps([row.values for section in result.sections for row in section], indent=2)


def as_markdown(result: ResultTable) -> str:
    """A table for a page, and notes under it."""
    texts = result.texts.map(markdown).rename(columns=lambda each: markdown(on_one_line(each)))
    num_numbers = texts.shape[1] - result.num_names
    aligned = ["left"] * result.num_names + ["right"] * num_numbers
    table = texts.to_markdown(index=False, disable_numparse=True, colalign=aligned)
    return "\n\n".join([str(table), *map(markdown, result.notes)])


def markdown(text: str) -> str:
    """The text as a page shows it: no sign of it is taken for markup."""
    # an underscore inside a word is none, nor are brackets that no link follows
    return re.sub(r"[\\`*|<$~]|\](?=[(\[:])|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def on_one_line(heading: str) -> str:
    """A heading without its line breaks."""
    return heading.replace("\n", " ")
