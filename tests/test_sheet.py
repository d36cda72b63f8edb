import re

import pytest
from rich.console import Console

from experiments import screen
from experiments.sheet import Cell, Column, Sheet, as_csv, as_latex, as_lines, as_markdown, wrapped


@pytest.fixture
def sheet():
    """Two sections of one row, and a note; 68 columns wide."""
    columns = [Column(heading="cache.eviction", names=("cache.eviction",), is_left=True)]
    columns += [
        Column(heading=heading, names=(f"{heading} middle", f"{heading} low", f"{heading} high"))
        for heading in ("token hit rate", "TTFT mean, s")
    ]
    rows = [
        [Cell(name), *(Cell(f"{middle}", "(0.12345–0.98765)", (middle, 0.12345, 0.98765)),) * 2]
        for name, middle in (("lru", 0.54321), ("slru", 0.65432))
    ]
    return Sheet(columns=columns, sections=[[row] for row in rows], notes=["50 % & more"])


def numbers_in(lines):
    return sorted(re.findall(r"0\.\d+", " ".join(lines)))


def widest(lines):
    return max(map(len, lines))


@pytest.mark.parametrize("width", [200, 67, 61, 45, 29, 5, 1])
def test_no_width_of_the_terminal_elides_a_number(sheet, width):
    _, body = as_lines(sheet, width)
    assert numbers_in(body) == sorted(["0.12345", "0.98765"] * 4 + ["0.54321", "0.65432"] * 2)


@pytest.mark.parametrize(
    ("width", "lines_a_row"), [(68, 1), (62, 1), (61, 2), (46, 2), (45, 3), (30, 3)]
)
def test_a_table_is_made_as_narrow_as_the_terminal_wants(sheet, width, lines_a_row):
    head, body = as_lines(sheet, width)
    assert widest([*head, *body]) <= width
    assert len(body) == 2 * lines_a_row + 1  # and an empty line between the sections


def test_the_range_stands_below_its_middle(sheet):
    _, body = as_lines(sheet, 60)
    assert body[0].split() == ["lru", "0.54321", "0.54321"]
    assert body[1].split() == ["(0.12345–0.98765)"] * 2


def test_what_never_fits_is_printed_wider_than_the_terminal(sheet):
    assert as_lines(sheet, 5) == as_lines(sheet, 1)


@pytest.mark.parametrize("width", [None, 60, 40])
def test_no_line_ends_in_blanks(sheet, width):
    head, body = as_lines(sheet, width)
    assert [line for line in (*head, *body) if line != line.rstrip()] == []


def test_a_table_that_is_piped_has_one_line_a_row_and_no_padding(sheet, capsys):
    screen.show_sheet(sheet, "a title")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert "lru             0.54321 (0.12345–0.98765)  0.54321 (0.12345–0.98765)" in lines
    assert widest(lines) == 68


def test_a_terminal_gets_what_fits_it(sheet, capsys, monkeypatch):
    narrow = Console(width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(screen, "console", lambda: narrow)
    screen.show_sheet(sheet, "a title")
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert widest(lines) <= 60


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("TTFT mean ÷ lru's", 9, ["TTFT mean", "÷ lru's"]),
        ("request/ttft_s_mean", 8, ["request/", "ttft_s_", "mean"]),
        ("runs", 2, ["runs"]),
        ("", 2, [""]),
    ],
)
def test_headings_are_cut_between_words_and_inside_keys(text, width, lines):
    assert wrapped(text, width) == lines


def test_what_latex_would_read_as_a_command_is_escaped(sheet):
    text = as_latex(sheet)
    assert r"50 \% \& more" in text
    assert r"0.54321 (0.12345--0.98765) \\" in text
    assert text.count(r"\addlinespace") == 1


def test_a_negative_number_has_a_minus_in_latex_and_a_name_its_hyphen():
    columns = [Column(heading=name, names=(name,)) for name in ("a", "b")]
    cells = [Cell("my-policy_1"), Cell("-0.5", "[-1, 2e-05]")]
    text = as_latex(Sheet(columns=columns, sections=[[cells]], notes=[]))
    assert r"my-policy\_1 & $-$0.5 [$-$1, 2e-05] \\" in text


def test_a_row_of_latex_is_no_argument_of_the_line_before():
    sheet = Sheet(columns=[Column(heading="a", names=("a",))], sections=[[[Cell("[1]")]]], notes=[])
    assert r"{}[1] \\" in as_latex(sheet)


def test_a_program_gets_every_digit_and_an_empty_field_for_what_is_not_there():
    columns = [Column(heading="a", names=("a",)), Column(heading="b", names=("b low", "b high"))]
    rows = [[Cell("x"), Cell("0.333", values=(1 / 3, 2 / 3))], [Cell("y"), Cell("")]]
    lines = as_csv(Sheet(columns=columns, sections=[rows], notes=["n"])).splitlines()
    assert lines == ["a,b low,b high", "x,0.3333333333333333,0.6666666666666666", "y,,"]


def test_a_page_gets_the_note_under_the_table(sheet):
    assert as_markdown(sheet).endswith("|\n\n50 % & more")


def test_what_a_page_would_read_as_markup_is_escaped():
    columns = [Column(heading="a|b", names=("a",)), Column(heading="b", names=("b",))]
    cells = [Cell("x|*y*"), Cell("_i_ my_policies:Mine [1, 2](there) <b> $x$")]
    text = as_markdown(Sheet(columns=columns, sections=[[cells]], notes=["`n`"]))
    assert text.splitlines()[0] == r"| a\|b | b |"
    assert text.splitlines()[2] == (
        r"| x\|\*y\* | \_i\_ my_policies:Mine [1, 2\](there) \<b> \$x\$ |"
    )
    assert text.endswith(r"\`n\`")
