"""Tables of results: on terminals of any width, as Markdown and as CSV."""

import re
from collections import defaultdict

import pytest

from hicache.cli import terminal
from hicache.cli.tables.result_table import ResultTable, Row, as_csv, as_markdown, show_result
from hicache.cli.tables.sweep_figure import wrapped


def row(name, middle):
    made = Row()
    made.add("cache.policy", name, **{"cache.policy": name})
    for heading in ("token hit rate", "TTFT mean, s"):
        parts = {f"{heading} middle": middle, f"{heading} low": 0.12345, f"{heading} high": 0.98765}
        made.add(heading, f"{middle} (0.12345–0.98765)", **parts)
    return made


RESULT = ResultTable(
    sections=[[row("lru", 0.54321)], [row("slru", 0.65432)]], notes=["50 % & more"], num_names=1
)


@pytest.mark.parametrize("width", [200, 80, 72, 67, 61, 60, 56, 45, 29, 12])
def test_a_table_fits_the_terminal_and_shows_every_number(width, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    show_result(RESULT, "a title")
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    numbers = sorted(re.findall(r"0\.\d+", " ".join(lines)))
    assert numbers == sorted(["0.12345", "0.98765"] * 4 + ["0.54321", "0.65432"] * 2)
    assert width < 56 or max(map(len, lines)) <= width
    if width == 56:  # the range is below its middle
        (place,) = [index for index, line in enumerate(lines) if line.startswith("lru")]
        assert lines[place].split() == ["lru", "0.54321", "0.54321"]
        assert lines[place + 1].split() == ["(0.12345–0.98765)"] * 2


def test_a_piped_table_has_one_line_per_row_and_no_padding(capsys):
    show_result(RESULT, "a title")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    (line,) = [line for line in lines if line.startswith("lru")]
    assert line.split() == ["lru", *["0.54321", "(0.12345–0.98765)"] * 2]


def test_text_that_looks_like_markup_is_printed_unchanged_and_escaped_in_markdown(capsys):
    made = Row()
    made.add("[bold]x[/b]", "[/y]")
    show_result(ResultTable(sections=[[made]], notes=["[/z]"], num_names=1), "[/t]")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("[bold]x[/b]", "[/y]", "[/z]", "[/t]"))
    made = Row()
    made.add("a|b", "x|*y*")
    made.add("b", "_i_ my_policies:Mine [1, 2](there) <b> $x$")
    lines = as_markdown(ResultTable(sections=[[made]], notes=["`n`"], num_names=1)).splitlines()
    heading, rule, cells, blank, note = (" ".join(line.split()) for line in lines)
    assert heading == r"| a\|b | b |"
    assert rule.startswith("|:--")
    assert cells == r"| x\|\*y\* | \_i\_ my_policies:Mine [1, 2\](there) \<b> \$x\$ |"
    assert (blank, note) == ("", r"\`n\`")


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


def test_csv_has_every_digit_numeric_columns_and_empty_fields_for_missing_values():
    rows = [
        Row(values={"a": "x", "size": 8, "low": 1 / 3, "ratio": None}),
        Row(values={"a": "y", "size": 1, "low": None, "ratio": None}),
    ]
    result = ResultTable(sections=[rows], notes=["n"], num_names=1)
    assert [str(each) for each in result.values.dtypes[1:]] == ["int64", "float64", "float64"]
    lines = ["a,size,low,ratio", "x,8,0.3333333333333333,", "y,1,,"]
    assert as_csv(result).splitlines() == lines


def test_the_table_of_a_run_names_each_tier_before_its_tokens():
    keys = [f"cache/{name.replace(' ', '_')}_tokens" for name in terminal.TIERS]
    summary = defaultdict(float, dict.fromkeys(keys, 0))
    summary |= {"cache/device_hit_tokens": 3000, "cache/computed_tokens": 1000}
    first, *others = (list(column.cells) for column in terminal._tokens(summary).columns)
    assert first[:5] == list(terminal.TIERS)
    assert [others[0][0], others[1][0]] == ["3,000", "75.0%"]
    assert len(others[2][0]) == 3 * len(others[2][4]) > 0
    del summary["cache/peer_hit_tokens"]  # without reads from peers
    first, *_ = (list(column.cells) for column in terminal._tokens(summary).columns)
    assert "peer hit" not in first
