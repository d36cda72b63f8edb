"""Results pages: their numbers come from results files, and canaries say which are stale."""

import json
import os
import re
from dataclasses import replace
from itertools import islice

import pytest
import yaml

from experiments import pages
from experiments.pages import (
    CANARIES,
    RESULTS,
    ROOT,
    arms_table,
    canary_of,
    claims_table,
    conditions_of,
    conditions_table,
    text_of,
    verdict,
    with_text,
)
from hicache.cli.tables.intervals import Estimate
from hicache.runs.schema import config_of

PAGES = pages.pages()
MADE = [name for name in PAGES if (RESULTS / f"{name}.json").exists()]
NOW = json.loads(CANARIES.read_text())
ON_TRACES = pytest.mark.skipif(
    "HICACHE_DATA" not in os.environ, reason="HICACHE_DATA names no directory with the real traces"
)
# a command, a program at its commit, or a page or file of measurements
SOURCE = r"hicache \w+|python -m|experiments[./]|\bat [0-9a-f]{7,}|\.(?:md|yaml)[)#]|issue|#\d{4}"
FOUND = yaml.safe_load("""
settings: [a=1]
arms: {old: [], new: [b=2]}
blocks: [0/3, 1/3, 2/3]
seeds: [4, 5]
conditions: {first: {}, second: {settings: [a=3], seeds: [4]}}
claims: [{says: more hits, arm: new, over: old, metric: x_rate, wants: more}]
""")
ARMS = {
    "old": {"x_rate": [[0.1], [0.2], [0.3]], "y_s": [[1.0], [2.0], [4.0]]},
    "new": {"x_rate": [[0.2], [0.3], [0.4]], "y_s": [[2.0], [4.0], [8.0]]},
}
for each in ARMS.values():
    each |= {"overloaded": [[0.0]], "rejected": [[0.0]]}


def test_a_condition_replaces_settings_and_seeds_of_its_finding() -> None:
    first, second = conditions_of(FOUND)
    runs = [*first.runs()]
    assert len(runs) == 2 * 3 * 2
    assert runs[1] == (
        4,
        "workload.slice=0/3",
        "new",
        ["a=1", "b=2", "workload.slice=0/3", "seed=4"],
    )
    assert next(run[3][:2] for run in second.runs()) == ["a=1", "a=3"]
    assert {run[0] for run in second.runs()} == {4}
    own = {**FOUND, "conditions": {"own": {"arms": {"new": ["b=3"]}}}}
    assert conditions_of(own)[0].arms == {"new": ["b=3"]}


def test_stored_conditions_are_not_run_again_and_the_order_is_that_of_the_finding() -> None:
    found = {**FOUND, "conditions": {"first": {}, "second": {}}}
    stored = {"second": ARMS, "first": ARMS}  # to run one would fail: it has no such settings
    assert [*pages.run(found, stored)] == ["first", "second"]


def test_tables_show_differences_of_rates_in_points_and_of_times_in_percent() -> None:
    assert "| first | +10.0 [+10.0, +10.0] **holds** |" in claims_table(FOUND, {"first": ARMS})
    claims = [{**FOUND["claims"][0], "says": "fewer", "metric": "z_count"}, *FOUND["claims"]]
    both = {
        arm: {**found, "z_count": [[0.0], [1.0], [place]]}
        for place, (arm, found) in enumerate(ARMS.items())
    }
    table = claims_table({**FOUND, "claims": claims}, {"first": both})
    assert "| condition | fewer | more hits |" in table
    assert "| first | +0.3 [-1.1, +1.8] open | +10.0 [+10.0, +10.0] **holds** |" in table
    table = {"arms": "first", "over": "old", "metrics": {"y_s": "time"}}
    assert "| new | 4.67 | +100.0 % [+100.0, +100.0] |" in arms_table({"first": ARMS}, table)
    table = {"title": "time", "columns": ["new", "old"], "conditions": ["first"], "metric": "y_s"}
    late = {**ARMS, "old": {**ARMS["old"], "overloaded": [[0.0], [1.0]]}}
    told = "| time | new | old |\n|---|---|---|\n| first | 4.67 | 2.33 (overloaded) |"
    assert conditions_table({"first": late}, table) == told


@pytest.mark.parametrize(
    ("interval", "wants", "told"),
    [
        ((0.1, 0.2), "more", "**holds**"),
        ((0.1, 0.2), "less", "*reverses*"),
        ((-0.2, -0.1), "less", "**holds**"),
        ((-0.1, 0.2), "more", "open"),
        ((-0.1, 0.2), 0.2, "**holds**"),
        ((-0.1, 0.3), 0.2, "open"),
        ((0.25, 0.3), 0.2, "*reverses*"),
        (None, "more", "open"),
    ],
)
def test_the_interval_decides_if_a_claim_holds_is_open_or_reverses(interval, wants, told) -> None:
    found = Estimate(middle=0.0, interval=interval, least=None, needed=None)
    assert verdict(found, wants) == told


def test_text_replaces_what_stands_between_the_marks() -> None:
    page = "# A\n<!-- begin -->\nold 3\n<!-- end -->\nafter\n"
    assert with_text(page, "new\n") == page.replace("old 3", "new")
    with pytest.raises(ValueError, match="no <!-- begin -->"):
        with_text("# A\n", "new\n")


@pytest.mark.parametrize("name", PAGES)
def test_arms_and_conditions_of_a_page_have_settings_that_exist(name: str) -> None:
    for number, condition in enumerate(conditions_of(PAGES[name])):
        first = replace(condition, blocks=condition.blocks[:1], seeds=condition.seeds[:1])
        for *_, overrides in islice(first.runs(), None if number == 0 else 1):
            config_of(*overrides)


@pytest.mark.parametrize("name", MADE)
def test_the_numbers_of_a_page_come_from_its_results(name: str) -> None:
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    page = (ROOT / "docs" / f"{name}.md").read_text()
    text = text_of(name, PAGES[name], stored, NOW[name])
    assert with_text(page, text) == page, f"python -m experiments.pages --canaries {name}"


def test_the_index_of_findings_has_each_claim_with_its_conditions() -> None:
    page = (ROOT / "docs" / "findings.md").read_text()
    assert with_text(page, pages.index(PAGES) + "\n") == page
    assert "| [routing](routing.md) | hits, host credited .8 | as stated; " in page


@pytest.mark.parametrize("name", MADE)
def test_a_table_outside_the_marks_has_its_command_or_commit_in_its_section(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    outside = page[: page.index("<!-- begin -->")] + page[page.index("<!-- end -->") :]
    for section in re.split(r"^## ", outside, flags=re.MULTILINE):
        if re.search(r"^\|.*\d.*\|$", section, flags=re.MULTILINE):
            assert re.search(SOURCE, section), section


@ON_TRACES
@pytest.mark.parametrize("name", NOW)
def test_the_canary_of_a_page_is_unchanged(name: str) -> None:
    told = f"docs/{name}.md may be stale: python -m experiments.pages --canaries {name} marks it"
    assert canary_of(PAGES[name]) == NOW[name], told


def test_documented_flags_exist_in_their_engines_and_settings_exist_here() -> None:
    known = json.loads((RESULTS / "flags.json").read_text())  # of the releases' argument lists
    page, settings = ((ROOT / "docs" / name).read_text() for name in ("flags.md", "knobs.md"))
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", page, flags=re.MULTILINE)[2:]
    assert len(rows) > 15
    for row in rows:
        for cell, engine in zip(row, known, strict=False):
            for flag in re.findall(r"--[a-z-]+", cell):
                assert flag in known[engine], (flag, engine)
        for setting in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", row[2]):
            assert f"`{setting}`" in settings, setting
