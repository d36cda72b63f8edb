"""What each choice of the simulation changes: the same run twice, in every window."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.studies import choices
from tests.workload.traces import mooncake_record, write_lines

CHOICES: Any = OmegaConf.load(Path(choices.__file__).with_suffix(".yaml")).choices


def cells(name: str, path: Path) -> list[str]:
    """The row of a choice over two windows of a short trace."""
    records = [
        mooncake_record((500 * turn, 3000, 20, list(range(turn, turn + 6)))) for turn in range(60)
    ]
    write_lines(path, records)
    base = f"workload=mooncake_conversation workload.path={path} model=llama3_8b workload.windows=2"
    (choice,) = (each for each in CHOICES if each["name"].startswith(name))
    return [cell.strip() for cell in choices.row(choice, base, 2).strip("|").split(" | ")]


def test_what_must_change_nothing_changes_nothing_in_any_window(tmp_path: Path) -> None:
    found = cells("decode steps taken at once", tmp_path / "mooncake_conversation.jsonl")
    assert found[4:6] == ["+0.0%", "+0.0% to +0.0%"]


def test_a_change_is_of_the_mean_and_lies_between_the_least_and_the_most(tmp_path: Path) -> None:
    found = cells("weights are read once a step", tmp_path / "mooncake_conversation.jsonl")
    least, most = (float(each.rstrip("%")) for each in found[5].split(" to "))
    assert least <= float(found[4].rstrip("%")) <= most < 0


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: str(choice["name"]))
def test_the_two_runs_of_a_choice_are_told_apart(choice: Any) -> None:
    assert choice["with_it"]["says"] != choice["without"]["says"]
    assert choice["with_it"].get("overrides") != choice["without"].get("overrides") or (
        choice["without"].get("loads_first")
    )
