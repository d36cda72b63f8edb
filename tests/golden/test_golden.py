"""Runs of the golden configurations give the golden summaries."""

import os
from pathlib import Path

import pytest

from hicache.runs import provenance
from tests.golden import CONFIGURATIONS, changes, digest, read, summary_of, write

ON_TRACES = pytest.mark.skipif(
    "HICACHE_DATA" not in os.environ, reason="HICACHE_DATA names no directory with the real traces"
)


@ON_TRACES
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_run_gives_its_golden_summary(name: str) -> None:
    changed = changes(read()[name], summary_of(name))
    told = "\n  ".join(
        [f"{len(changed)} keys changed (CONTRIBUTING.md, golden summaries):", *changed]
    )
    assert not changed, told


def test_every_configuration_has_a_golden_summary() -> None:
    assert list(read()) == list(CONFIGURATIONS)


def test_runs_record_the_digest_of_the_golden_summaries() -> None:
    assert digest() == provenance.RULES, "HICACHE_DATA=DIR python -m tests.golden writes RULES"


def test_changes_list_both_values_of_a_key() -> None:
    golden = {"a/count": "1", "b/s": "0.25", "c/gone": "7"}
    found = {"a/count": "1", "b/s": "0.5", "d/new": "0"}
    assert changes(golden, golden) == []
    assert changes(golden, found) == [
        "b/s: 0.25 -> 0.5",
        "c/gone: 7 -> absent",
        "d/new: absent -> 0",
    ]


def test_written_summaries_are_read_back(tmp_path: Path) -> None:
    summaries = {"one": {"a/count": "1", "b/s": "0.25"}, "other": {"a/count": "0"}}
    write(summaries, tmp_path / "summaries.csv")
    assert read(tmp_path / "summaries.csv") == summaries
