from pathlib import Path

import pytest

from experiments.diff.protocol import SideError
from experiments.diff.regressions import NOTHING, REGRESSIONS, ROOM, Regression, planted_in

TEXT = "if a:\n    go()\nif a:\n    go()\n"
GO = Regression(
    name="the second is left out",
    component="full",
    file="x.py",
    line="go()",
    instead="pass",
    place=1,
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / ROOM
    folder.mkdir(parents=True)
    original = tmp_path / "original.py"
    original.write_text(TEXT)
    (folder / "x.py").hardlink_to(original)
    return tmp_path


def test_one_line_is_changed_in_the_copy_alone_and_only_meanwhile(copy: Path) -> None:
    path = copy / ROOM / "x.py"
    with planted_in(GO, copy):
        assert path.read_text() == "if a:\n    go()\nif a:\n    pass\n"
        assert (copy / "original.py").read_text() == TEXT
    assert path.read_text() == TEXT


def test_a_line_that_is_not_there_is_refused(copy: Path) -> None:
    missing = Regression(name="", component="full", file="x.py", line="stop()", instead="")
    with pytest.raises(SideError, match=r"has no line 'stop\(\)'"), planted_in(missing, copy):
        pass


def test_an_untouched_copy_stays_so(copy: Path) -> None:
    with planted_in(NOTHING, copy):
        assert (copy / ROOM / "x.py").read_text() == TEXT


def test_there_are_ten_or_more_and_each_changes_something() -> None:
    assert len({each.name for each in REGRESSIONS}) >= 10
    assert all(each.line != each.instead for each in REGRESSIONS)
