"""A table and its output formats: terminal, CSV, JSON and Markdown.

No format cuts off text or reads names as markup.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import nan

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from hicache.cli.console import console, show_table


@dataclass(slots=True)
class Row:
    texts: dict[str, str] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)

    def add(self, heading: str, text: str, **values: object) -> None:
        """Add a column to this row of a table.

        Args:
            heading: the heading of the column.
            text: the text of the cell in a printed table.
            values: the unrounded values of the cell for CSV and JSON, by column name.
        """
        self.texts[heading] = text
        self.values |= values


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table of results that can be printed or exported.

    Attributes:
        sections: lists of rows. Printed tables separate the sections.
        notes: sentences to print below the table.
        num_names: how many of the first columns hold names and not numbers.
    """

    sections: Sequence[Sequence[Row]]
    notes: Sequence[str]
    num_names: int

    @cached_property
    def texts(self) -> pd.DataFrame:
        rows = [row.texts for section in self.sections for row in section]
        return pd.DataFrame(rows, dtype=str).fillna("")

    @property
    def values(self) -> pd.DataFrame:
        # NaN and not None, so that columns of numbers have a numeric type
        rows = [
            {name: nan if value is None else value for name, value in row.values.items()}
            for section in self.sections
            for row in section
        ]
        return pd.DataFrame(rows)


def show_result(result: ResultTable, title: str) -> None:
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
    text: str = result.values.convert_dtypes().to_csv(index=False, lineterminator="\n")
    return text.rstrip("\n")


def as_json(result: ResultTable) -> str:
    return json.dumps([row.values for section in result.sections for row in section], indent=2)


def as_markdown(result: ResultTable) -> str:
    texts = result.texts.map(markdown).rename(
        columns=lambda each: markdown(each.replace("\n", " "))
    )
    num_numbers = texts.shape[1] - result.num_names
    aligned = ["left"] * result.num_names + ["right"] * num_numbers
    table = texts.to_markdown(index=False, disable_numparse=True, colalign=aligned)
    return "\n\n".join([str(table), *map(markdown, result.notes)])


def markdown(text: str) -> str:
    # underscores inside a word need no escape, nor do brackets without a link
    return re.sub(r"[\\`*|<$~]|\](?=[(\[:])|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
