import re
from collections import defaultdict

import pytest
from rich.console import Console

from hicache.cli import terminal
from hicache.cli.tables import result_table as forms
from hicache.cli.tables.result_table import ResultTable, Row, as_csv, as_markdown
from hicache.cli.tables.sweep_figure import wrapped


def row(name, middle):
    made = Row()
    made.add("cache.policy", name, **{"cache.policy": name})
    for heading in ("token hit rate", "TTFT mean, s"):
        parts = {f"{heading} middle": middle, f"{heading} low": 0.12345, f"{heading} high": 0.98765}
        made.add(heading, f"{middle} (0.12345–0.98765)", **parts)
    return made


@pytest.fixture
def result():
    """Two sections of one row, and a note."""
    sections = [[row("lru", 0.54321)], [row("slru", 0.65432)]]
    return ResultTable(sections=sections, notes=["50 % & more"], num_names=1)


def shown(result, capsys, monkeypatch, width):
    """The lines on a terminal of this width."""
    narrow = Console(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(forms, "console", lambda: narrow)
    forms.show_result(result, "a title")
    lines = capsys.readouterr().out.splitlines()
    return [re.sub(r"\x1b\[\d*m", "", line) for line in lines]


def widest(lines):
    return max(map(len, lines))


@pytest.mark.parametrize("width", [200, 67, 61, 45, 29, 12])
def test_no_width_of_the_terminal_elides_a_number(result, capsys, monkeypatch, width):
    text = " ".join(shown(result, capsys, monkeypatch, width))
    numbers = sorted(re.findall(r"0\.\d+", text))
    assert numbers == sorted(["0.12345", "0.98765"] * 4 + ["0.54321", "0.65432"] * 2)


@pytest.mark.parametrize("width", [80, 72, 60])
def test_a_table_is_made_as_narrow_as_the_terminal_wants(result, capsys, monkeypatch, width):
    assert widest(shown(result, capsys, monkeypatch, width)) <= width


def test_the_range_stands_below_its_middle_where_both_do_not_fit(result, capsys, monkeypatch):
    lines = shown(result, capsys, monkeypatch, 56)
    (place,) = [index for index, line in enumerate(lines) if line.startswith("lru")]
    assert lines[place].split() == ["lru", "0.54321", "0.54321"]
    assert lines[place + 1].split() == ["(0.12345–0.98765)"] * 2


def test_a_table_that_is_piped_has_one_line_a_row_and_no_padding(result, capsys):
    forms.show_result(result, "a title")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    (line,) = [line for line in lines if line.startswith("lru")]
    assert line.split() == ["lru", *["0.54321", "(0.12345–0.98765)"] * 2]


def test_what_a_user_named_is_no_markup(capsys):
    made = Row()
    made.add("[bold]x[/b]", "[/y]")
    forms.show_result(ResultTable(sections=[[made]], notes=["[/z]"], num_names=1), "[/t]")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("[bold]x[/b]", "[/y]", "[/z]", "[/t]"))


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


def test_a_program_gets_every_digit_and_an_empty_field_for_what_is_not_there():
    first, second = Row(), Row()
    first.add("a", "x", a="x")
    first.add("b", "0.333", **{"b low": 1 / 3, "b high": 2 / 3})
    second.add("a", "y", a="y")
    lines = as_csv(ResultTable(sections=[[first, second]], notes=["n"], num_names=1)).splitlines()
    assert lines == ["a,b low,b high", "x,0.3333333333333333,0.6666666666666666", "y,,"]


def test_columns_of_numbers_are_numeric_and_what_is_not_there_is_nan():
    rows = [Row(values={"size": 8, "low": None, "ratio": None})]
    rows += [Row(values={"size": 1, "low": 2, "ratio": None})]
    result = ResultTable(sections=[rows], notes=[], num_names=1)
    assert [str(each) for each in result.values.dtypes] == ["int64", "float64", "float64"]
    assert as_csv(result).splitlines() == ["size,low,ratio", "8,,", "1,2,"]


def test_a_page_gets_the_note_under_the_table(result):
    lines = as_markdown(result).splitlines()
    assert lines[1].startswith("|:--")
    assert lines[-2:] == ["", "50 % & more"]


def test_what_a_page_would_read_as_markup_is_escaped():
    made = Row()
    made.add("a|b", "x|*y*")
    made.add("b", "_i_ my_policies:Mine [1, 2](there) <b> $x$")
    lines = as_markdown(ResultTable(sections=[[made]], notes=["`n`"], num_names=1)).splitlines()
    cells = [" ".join(line.split()) for line in (lines[0], lines[2])]
    assert cells[0] == r"| a\|b | b |"
    assert cells[1] == r"| x\|\*y\* | \_i\_ my_policies:Mine [1, 2\](there) \<b> \$x\$ |"
    assert lines[-1] == r"\`n\`"


def test_the_table_of_a_run_names_each_tier_before_its_tokens():
    summary = defaultdict(float, {"cache/device_hit_tokens": 3000, "cache/computed_tokens": 1000})
    first, *others = (list(column.cells) for column in terminal._tokens(summary).columns)
    assert first[:4] == list(terminal.TIERS)
    assert [others[0][0], others[1][0]] == ["3,000", "75.0%"]
    assert len(others[2][0]) == 3 * len(others[2][3]) > 0
