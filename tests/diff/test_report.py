import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.diff.compare import Comparison, Row
from experiments.diff.protocol import Hits, Outcome
from experiments.diff.report import dump, names_of, to_json, to_markdown, write_figure
from tests.diff.sides import POOLS, prompt, requests_of

Compared = Callable[..., Comparison]
AGAIN = requests_of(prompt(1, 4), prompt(2, 4), prompt(1, 4), prompt(2, 4))
UNIT_BYTES = {"full": 1 << 28, "swa": 1, "mamba": 1}


def test_the_comment_has_hit_rates_totals_kinds_and_first_differences(compared: Compared) -> None:
    found = compared(AGAIN, head={"pages": "7", "version": "2"})
    comment = to_markdown(found, None, UNIT_BYTES, "Four requests.")
    assert "fake 2 against fake 1" in comment
    assert "Four requests. Hit rate **47.06% → 35.29%** (-11.76 points of 68" in comment
    assert "| hits: full device | 32 tokens (8.0 GiB) | 24 tokens (6.0 GiB) | -25.00% |" in comment
    assert "| head hits fewer tokens | 2 |" in comment
    hits = "**First request with different hits.** Request 2 (prompt of 17 tokens): head hits fewer"
    assert hits in comment
    any_kind = (
        "**First difference of any kind.** Request 1 (prompt of 17 tokens): the same hits and"
    )
    assert any_kind in comment


def test_the_comment_says_that_a_side_did_not_finish(compared: Compared) -> None:
    found = compared(AGAIN, head={"fail_at": "2"})
    comment = to_markdown(found, None, UNIT_BYTES, "")
    assert "**Not finished**: at request 2 fake: no room is left." in comment


def test_sides_of_the_same_name_are_told_apart(compared: Compared) -> None:
    assert names_of(compared(AGAIN)) == ("fake 1 (base)", "fake 1 (head)")


def test_json_is_complete_and_the_same_for_equal_runs(compared: Compared, tmp_path: Path) -> None:
    texts = []
    for number in range(2):
        found = compared(AGAIN, head={"pages": "7"})
        path = tmp_path / f"{number}.json"
        dump(to_json(found, None, UNIT_BYTES, {"asked": {}}), path)
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    values = json.loads(texts[0])
    assert values["requests"] == 4
    assert (values["first"], values["first_hit"]) == (1, 2)
    assert values["kinds"] == {"fewer": 2, "evicted": 1, "equal": 1}
    assert [row["number"] for row in values["worst"]] == [2, 3, 1]
    assert values["totals"]["base"]["hit/full/device"] == 32


def row_of(base: Outcome, head: Outcome, number: int = 0, prompt_len: int = 100) -> Row:
    return Row(number=number, prompt_len=prompt_len, base=base, head=head)


def report_of(*rows: Row, **about: str) -> str:
    sides = {"engine": "fake", "version": "1"}, {"engine": "fake", "version": "2"} | about
    found = Comparison(base=sides[0], head=sides[1], pools=POOLS, rows=rows)
    return to_markdown(found, None, {"full": 1 << 30, "swa": 1 << 29, "mamba": 1 << 31}, "It.")


NOTHING = Outcome(hits=Hits(0, 0, 0))


def test_every_amount_has_a_row_in_tokens_or_states_and_bytes() -> None:
    counts = {"moved/swa/load_back": 1000, "evicted/mamba/host": 3, "moved/full/write": 8}
    head = Outcome(hits=Hits(0, 0, 50), counts=counts, held={"full/storage": 7}, admission="cut")
    base = replace(NOTHING, counts={"moved/full/write": 16}, admission="let in")
    lines = report_of(row_of(base, head)).splitlines()
    assert lines[0] == "### Prefix cache: fake 2 against fake 1"
    assert lines[2] == (
        "It. Hit rate **0.00% → 50.00%** (+50.00 points of 100 prompt tokens);"
        " hits differ in 1 of 1 requests."
    )
    assert lines[4:14] == [
        "| | fake 1 | fake 2 | change |",
        "|---|---:|---:|---:|",
        "| hits: full storage | 0 tokens (0.0 GiB) | 50 tokens (50.0 GiB) | +50 |",
        "| copied: full write | 16 tokens (16.0 GiB) | 8 tokens (8.0 GiB) | -50.00% |",
        "| copied: swa load back | 0 tokens (0.0 GiB) | 1,000 tokens (500.0 GiB) | +1,000 |",
        "| evicted: mamba host | 0 states (0.0 GiB) | 3 states (6.0 GiB) | +3 |",
        "| held at the end: full storage | 0 tokens (0.0 GiB) | 7 tokens (7.0 GiB) | +7 |",
        "| admission: cut | 0 | 1 | +1 |",
        "| admission: let in | 1 | 0 | -1 |",
        "",
    ]
    assert lines[14:20] == [
        "| requests | |",
        "|---|---:|",
        "| head hits more tokens | 1 |",
        "",
        "| request that differs most | kind of difference | amounts (fake 1 → fake 2) |",
        "|---:|---|---|",
    ]
    assert lines[20].startswith("| 0 | head hits more tokens | copied swa/load_back 0 → 1,000")
    assert lines[21] == ""
    assert lines[22].startswith(
        "**First request with different hits.** Request 0 (prompt of 100 tokens): head hits more"
    )
    assert len(lines) == 23


def test_a_report_without_differences_only_marks_equal_amounts() -> None:
    same = replace(NOTHING, held={"full/host": 3})
    lines = report_of(row_of(same, same)).splitlines()
    row = "| held at the end: full host | 3 tokens (3.0 GiB) | 3 tokens (3.0 GiB) | = |"
    assert lines[6] == row
    assert lines[-1] == "| no difference | 1 |"


def test_the_five_requests_that_differ_most_are_listed() -> None:
    rows = [
        row_of(NOTHING, replace(NOTHING, held={"full/host": number % 7}), number)
        for number in range(20)
    ]
    lines = report_of(*rows).splitlines()
    listed = [line.split(" | ")[0] for line in lines if " | different amounts held" in line]
    assert listed == ["| 6", "| 13", "| 5", "| 12", "| 19"]
    assert lines[-1].startswith(
        "**First difference of any kind.** Request 1 (prompt of 100 tokens): different amounts"
    )


def test_the_peak_memory_of_each_process_is_reported() -> None:
    about = {"engine": "fake", "version": "1"}
    peaks = (2_000_000_000, None, 70_000_000)
    found = Comparison(base=about, head=about, pools=POOLS, rows=(), peak_bytes=peaks)
    said = "Peak memory: 2.00 GB (fake 1 (base)), 0.07 GB (this program)."
    assert said in to_markdown(found, None, UNIT_BYTES, "It.").splitlines()


def test_json_lists_the_fifty_requests_that_differ_most() -> None:
    rows = [
        row_of(NOTHING, replace(NOTHING, held={"full/host": number}), number)
        for number in range(60)
    ]
    found = Comparison(base={}, head={}, pools=POOLS, rows=tuple(rows), failure="it ended")
    values = to_json(found, None, UNIT_BYTES, {"asked": {"requests": 60}})
    assert [row["number"] for row in values["worst"]] == list(range(59, 9, -1))
    assert values["worst"][0]["changes"] == {"held/full/host": (0, 59)}
    assert values["worst"][0]["kind"] == "held"
    assert (values["first"], values["first_hit"], values["failure"]) == (1, None, "it ended")
    assert values["totals"]["head"]["held/full/host"] == 59
    assert values["hit_rate"] == {"base": 0, "head": 0}
    assert values["prompt_tokens"] == 6000
    assert values["asked"] == {"requests": 60}
    assert values["pools"]["page_size"] == POOLS.page_size


def test_options_that_are_not_the_default_are_part_of_the_name() -> None:
    assert report_of(core="rust", eviction="lfu").startswith(
        "### Prefix cache: fake 2 (rust, lfu) against fake 1\n"
    )
    assert "fake 2 against" in report_of(core="python", eviction="lru")


def test_json_is_written_one_value_a_line(tmp_path: Path) -> None:
    dump({"b": 1, "a": {"c": None}}, tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == '{\n "a": {\n  "c": null\n },\n "b": 1\n}\n'


def test_the_figure_shows_hit_rates_and_their_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *args, **more: figures.append(self) or save(self, *args, **more),
    )
    rows = [
        row_of(Outcome(hits=Hits(1000, 0, 0)), Outcome(hits=Hits(0, 500, 0)), 0, 2000),
        row_of(Outcome(hits=Hits(0, 0, 1000)), Outcome(hits=Hits(0, 2500, 0)), 1, 6000),
    ]
    sides = {"engine": "fake", "version": "1"}, {"engine": "fake", "version": "2"}
    found = Comparison(base=sides[0], head=sides[1], pools=POOLS, rows=tuple(rows))
    write_figure(found, tmp_path / "diff.png")
    above, below = figures[0].axes
    assert [line.get_ydata().tolist() for line in above.lines] == [[50, 25], [25, 37.5]]
    assert [text.get_text() for text in above.get_legend().get_texts()] == ["fake 1", "fake 2"]
    assert above.lines[0].get_linestyle() != above.lines[1].get_linestyle()
    assert above.get_ylabel() == "hit rate so far (%)"
    assert below.lines[0].get_ydata().tolist() == [-0.5, 1]
    assert below.lines[1].get_ydata() == [0, 0]
    assert (below.get_xlabel(), below.get_ylabel()) == ("request", "head − base (thousand tokens)")
    assert above.get_shared_x_axes().joined(above, below)
    png = (tmp_path / "diff.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (960, 600)


def test_a_path_among_the_options_is_written_as_text(tmp_path: Path) -> None:
    dump({"asked": {"keep": Path("folder")}}, tmp_path / "diff.json")
    assert json.loads((tmp_path / "diff.json").read_text()) == {"asked": {"keep": "folder"}}
