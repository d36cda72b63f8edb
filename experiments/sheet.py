"""A table as text, and its forms: for a terminal, for a page, for a program, for a paper.

No form leaves anything out: what does not fit a terminal is printed wider than it.
"""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GAP = "  "
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column. `names`: those of the columns that a program gets of it."""

    heading: str
    names: tuple[str, ...]
    is_left: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A middle and its range, either may be empty; `values`: one for each of the column's names."""

    text: str
    range: str = ""
    values: tuple[object, ...] = ()

    def on_one_line(self) -> str:
        """The middle, and the range behind it."""
        return f"{self.text} {self.range}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Rows in sections, and what a reader of them must know."""

    columns: Sequence[Column]
    sections: Sequence[Sequence[Sequence[Cell]]]
    notes: Sequence[str]

    @property
    def rows(self) -> list[Sequence[Cell]]:
        """The rows of all sections."""
        return [row for section in self.sections for row in section]


def as_lines(sheet: Sheet, width: int | None) -> tuple[list[str], list[str]]:
    """The lines of the headings and those of the rows, no wider than `width` if that can be.

    First headings are wrapped, then ranges go below their middles, then their ends below each
    other. None: as wide as they are.
    """
    head, body = _laid_out(sheet, _on_one_line, wraps=False)
    for lines_of in (_on_one_line, _on_two_lines, _on_three_lines):
        if width is None or max(map(len, head)) <= width:
            break
        head, body = _laid_out(sheet, lines_of, wraps=True)
    return head, body


def as_markdown(sheet: Sheet) -> str:
    """A table for a page, and notes under it."""
    titles = [column.heading.replace("\n", " ") for column in sheet.columns]
    rules = ["---" if column.is_left else "---:" for column in sheet.columns]
    rows = [[cell.on_one_line() for cell in row] for row in sheet.rows]
    written = [[markdown(text) for text in row] for row in (titles, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in (written[0], rules, *written[1:])]
    return "\n".join([*lines, *(f"\n{markdown(note)}" for note in sheet.notes)])


def markdown(text: str) -> str:
    """The text as a page shows it: no sign of it is taken for markup."""
    # an underscore inside a word is none, nor are brackets that no link follows
    return re.sub(r"[\\`*|<$~]|\](?=[(\[:])|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def as_csv(sheet: Sheet) -> str:
    """Plain values for a program, every number with all its digits; without the notes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([name for column in sheet.columns for name in column.names])
    for row in sheet.rows:
        values = [
            cell.values or (cell.text,) + ("",) * (len(column.names) - 1)
            for cell, column in zip(row, sheet.columns, strict=True)
        ]
        writer.writerow([value for each in values for value in each])
    return text.getvalue().rstrip("\n")


def as_latex(sheet: Sheet) -> str:
    r"""A table for a paper that has `\usepackage{booktabs}`, and notes under it."""
    places = "".join("l" if column.is_left else "r" for column in sheet.columns)
    titles = [column.heading.replace("\n", " ") for column in sheet.columns]
    sections = [
        [_latex_row([cell.on_one_line() for cell in row]) for row in section]
        for section in sheet.sections
    ]
    lines = [rf"\begin{{tabular}}{{{places}}}", r"\toprule", _latex_row(titles), r"\midrule"]
    lines += "\n\\addlinespace\n".join("\n".join(rows) for rows in sections).splitlines()
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par{{\footnotesize {latex(note)}\par}}" for note in sheet.notes]
    return "\n".join(lines)


def latex(text: str) -> str:
    """The text as LaTeX prints it, a minus before a number as one."""
    text = re.sub(r"(?<!\w)-(?=\d)", "−", text)
    return "".join(LATEX.get(sign, sign) for sign in text)


def _latex_row(cells: Sequence[str]) -> str:
    row = " & ".join(map(latex, cells))
    # what begins with one of these would be read as an argument of the line before
    return ("{}" if row.startswith(("[", "*")) else "") + row + r" \\"


def _laid_out(
    sheet: Sheet, lines_of: Callable[[Cell], list[str]], *, wraps: bool
) -> tuple[list[str], list[str]]:
    sections = [[[lines_of(cell) for cell in row] for row in part] for part in sheet.sections]
    headings = [column.heading.split("\n") for column in sheet.columns]
    widths = [
        max((len(line) for rows in sections for row in rows for line in row[place]), default=0)
        for place in range(len(headings))
    ]
    if wraps:
        headings = [
            wrapped(" ".join(lines), width) for lines, width in zip(headings, widths, strict=True)
        ]
    widths = [max(width, *map(len, lines)) for lines, width in zip(headings, widths, strict=True)]
    height = max(map(len, headings))
    headings = [[""] * (height - len(lines)) + lines for lines in headings]  # at the bottom
    are_left = [column.is_left for column in sheet.columns]
    head = _joined(headings, widths, are_left)
    head.append("─" * (sum(widths) + len(GAP) * (len(widths) - 1)))
    body: list[str] = []
    for rows in sections:
        body += [""] if body else []
        body += [line for row in rows for line in _joined(row, widths, are_left)]
    return head, body


def _on_one_line(cell: Cell) -> list[str]:
    return [cell.on_one_line()]


def _on_two_lines(cell: Cell) -> list[str]:
    return [cell.text, *filter(None, [cell.range])]


def _on_three_lines(cell: Cell) -> list[str]:
    return [cell.text, *filter(None, re.split(r"(?<=–)|(?<=,) ", cell.range))]


def _joined(
    cells: Sequence[Sequence[str]], widths: Sequence[int], are_left: Sequence[bool]
) -> list[str]:
    lines = []
    for number in range(max(map(len, cells))):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        padded = [
            part.ljust(width) if is_left else part.rjust(width)
            for part, width, is_left in zip(parts, widths, are_left, strict=True)
        ]
        lines.append(GAP.join(padded).rstrip())
    return lines


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most `width`, cut after spaces and inside keys, not in words."""
    lines = [""]
    for atom in re.split(r"(?<=[ /_.:])", text):
        if lines[-1] and len((lines[-1] + atom).rstrip()) > width:
            lines.append("")
        lines[-1] += atom
    return [line.rstrip() for line in lines]
