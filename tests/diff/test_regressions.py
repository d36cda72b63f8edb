from dataclasses import replace
from pathlib import Path

import pytest

from experiments.diff.protocol import SideError
from experiments.diff.regressions import FOLDER, Edit, edited_by, edits

TEXT = "if a:\n    go()\nif a:\n    go()\n"
GO = Edit(name="the second is left out", file="x.py", line="go()", instead="pass", place=1)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    original = tmp_path / "original.py"
    original.write_text(TEXT)
    (folder / "x.py").hardlink_to(original)
    return tmp_path


def test_one_line_is_changed_in_the_copy_alone_and_only_meanwhile(copy: Path) -> None:
    path = copy / FOLDER / "x.py"
    with edited_by(GO, copy):
        assert path.read_text() == "if a:\n    go()\nif a:\n    pass\n"
        assert (copy / "original.py").read_text() == TEXT
    assert path.read_text() == TEXT


@pytest.mark.parametrize(
    "missing", [replace(GO, line="stop()"), replace(GO, place=2)], ids=["line", "place"]
)
def test_a_line_that_is_not_there_is_refused(copy: Path, missing: Edit) -> None:
    with pytest.raises(SideError, match=r"has no line '\w+\(\)'"), edited_by(missing, copy):
        pass


def test_the_list_has_twenty_faults_and_three_refactorings() -> None:
    listed = edits()
    assert len({each.name for each in listed if each.is_fault}) >= 20
    assert len({each.name for each in listed if not each.is_fault}) >= 3
    assert sum(bool(each.equivalent) for each in listed) <= 3
    assert all(each.line != each.instead for each in listed if each.is_fault)


def test_the_edit_of_a_match_is_the_one_of_a_match() -> None:
    (match,) = [each for each in edits() if each.name.startswith("a match does not refresh")]
    assert match.line == "node_update.last_access_time = cur_time"
