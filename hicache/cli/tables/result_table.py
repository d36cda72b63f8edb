"""A table and its forms: for a terminal, for a page, for a program, for a paper.

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

# what LaTeX reads as a command, and signs that not every font of it has
LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "−": "$-$",
    "÷": r"$\div$",
    "ρ": r"$\rho$",
}


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

    def places(self, left: str, right: str) -> list[str]:
        """Names to the left, numbers to the right."""
        num_numbers = self.texts.shape[1] - self.num_names
        return [left] * self.num_names + [right] * num_numbers


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
    aligned = result.places("left", "right")
    table = texts.to_markdown(index=False, disable_numparse=True, colalign=aligned)
    return "\n\n".join([str(table), *map(markdown, result.notes)])


def as_latex(result: ResultTable) -> str:
    r"""A table for a paper that has `\usepackage{booktabs}`, and notes under it."""
    texts = result.texts.rename(columns=on_one_line)
    styler = texts.style.hide(axis="index").format(latex_cell)
    styler = styler.format_index(latex, axis="columns")
    lines = styler.to_latex(hrules=True, column_format="".join(result.places("l", "r")))
    head, body = lines.split("\\midrule\n")
    rows, foot = body.split("\\bottomrule\n")
    cells = iter(rows.splitlines())
    parts = ["\n".join(next(cells) for _ in section) for section in result.sections]
    body = "\n\\addlinespace\n".join(parts)
    notes = [rf"\par{{\footnotesize {latex(note)}\par}}" for note in result.notes]
    return "\n".join([f"{head}\\midrule\n{body}\n\\bottomrule\n{foot}".rstrip("\n"), *notes])


def markdown(text: str) -> str:
    """The text as a page shows it: no sign of it is taken for markup."""
    # an underscore inside a word is none, nor are brackets that no link follows
    return re.sub(r"[\\`*|<$~]|\](?=[(\[:])|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def on_one_line(heading: str) -> str:
    """A heading without its line breaks."""
    return heading.replace("\n", " ")


def latex(text: object) -> str:
    """The text as LaTeX prints it, a minus before a number as one."""
    text = re.sub(r"(?<!\w)-(?=\d)", "−", str(text))
    return "".join(LATEX.get(sign, sign) for sign in text)


def latex_cell(text: object) -> str:
    """The text of a cell; what begins like an argument of the line before is kept apart from it."""
    return ("{}" if str(text).startswith(("[", "*")) else "") + latex(text)
