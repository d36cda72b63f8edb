"""The programs beside `experiments.diff`, with fake sides."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.diff import regressions
from experiments.diff.compare import Comparison, Row, token_ids
from experiments.diff.engines import Launch
from experiments.diff.process import SideProcess
from experiments.diff.protocol import Hits, Outcome, Pools
from experiments.diff.regressions import Edit, Remembered, is_reported, row
from tests.diff.sides import FAKE, PAGE, POOLS, prompt, requests_of

NOTHING = Outcome(hits=Hits(0, 0, 0))


def started(monkeypatch: pytest.MonkeyPatch, main: object, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()  # type: ignore[operator]
    code = ended.value.code
    return code if isinstance(code, int) else 1


# seeded faults

SCARCE = 'file = "rooms.py"\nline = "1000"\n'
LISTED = f"""
[[fault]]
name = "less room"
{SCARCE}instead = "30"

[[fault]]
name = "less room, but enough"
{SCARCE}instead = "999"
equivalent = "nothing is ever evicted"

[[fault]]
name = "it says what it must not"
{SCARCE}instead = "no number"

[[refactoring]]
name = "a copy"
{SCARCE}instead = "1000"
"""


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A release in a folder, whose one line says how many pages a fake side has room for."""
    line = tmp_path / "release" / "sglang" / "srt" / "rooms.py"
    line.parent.mkdir(parents=True)
    line.write_text("1000")

    def prepare(_: object, spec: str) -> Launch:
        return replace(FAKE, path=(spec if "edited" in spec else str(tmp_path / "release"),))

    monkeypatch.setattr(regressions, "prepare", prepare)
    return line


def open_sides(monkeypatch: pytest.MonkeyPatch, **more: str) -> list[str]:
    """Start sides with the pages that their copy of the release says; collects these."""
    opened: list[str] = []

    def open_side(launch: Launch, pools: Pools, log: Path) -> SideProcess:
        pages = (Path(launch.path[0]) / "sglang" / "srt" / "rooms.py").read_text()
        opened.append(pages)
        assert launch.options == {"write_policy": "write_through"}
        return SideProcess(replace(launch, options={"pages": pages, **more}), pools, log)

    monkeypatch.setattr(regressions, "SideProcess", open_side)
    return opened


def test_faults_must_be_reported_and_what_changes_nothing_must_not(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    release: Path,
) -> None:
    (tmp_path / "faults.toml").write_text(LISTED)
    opened = open_sides(monkeypatch)
    listed = ["--faults", str(tmp_path / "faults.toml"), "--requests", "40"]
    assert started(monkeypatch, regressions.main, *listed) == 0
    assert opened == ["1000", "30", "999", "no number", "1000"]  # the release once
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[2].partition(",")[0] for line in lines] == ["yes", "no", "yes", "no"]
    assert started(monkeypatch, regressions.main, *listed, "--only", "2", "4") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    wrong = LISTED.replace('instead = "30"', 'instead = "998"')
    (tmp_path / "faults.toml").write_text(wrong)
    assert started(monkeypatch, regressions.main, *listed, "--only", "1") == 1
    assert release.read_text() == "1000"


def test_a_row_gives_the_first_difference_and_the_first_amounts() -> None:
    edit = Edit(name="it", file="", line="a", instead="b", kind="swa")
    other = replace(NOTHING, state={"pages/full/device": 1})
    rows = [
        Row(number=4, prompt_len=9, base=NOTHING, head=NOTHING),
        Row(
            number=5,
            prompt_len=9,
            base=replace(other, state={"pages/full/device": 2}),
            head=other,
        ),
        Row(number=6, prompt_len=9, base=NOTHING, head=replace(NOTHING, held={"full/host": 3})),
        Row(number=7, prompt_len=9, base=NOTHING, head=Outcome(hits=Hits(0, 3, 0))),
    ]

    def found(count: int, failure: str | None = None, *stopped: str) -> Comparison:
        kept = tuple(rows[:count])
        return Comparison(
            base={}, head={}, pools=POOLS, rows=kept, failure=failure, stopped=stopped
        )

    assert row(edit, found(1), 2.4) == "| it | swa | no, in 1 requests |  |  |  | 2 |"
    assert not is_reported(found(1))
    assert row(edit, found(2), 2) == (
        "| it | swa | yes | 5 | equal amounts held, but different pages |  | 2 |"
    )
    assert row(edit, found(4), 2) == (
        "| it | swa | yes | 5 | equal amounts held, but different pages;"
        " at 6: held full/host 0 → 3 (+3) | 7: 0 tokens (0 device, 0 host, 0 storage) →"
        " 3 tokens (0 device, 3 host, 0 storage) | 2 |"
    )
    assert row(edit, found(1, "it fails", "head"), 2) == (
        "| it | swa | yes | 1 |  | it fails | 2 |"
    )
    said = "| 5 | equal amounts held, but different pages | it fails | 2 |"
    assert row(edit, found(2, "it fails", "base", "head"), 2).endswith(said)


def test_a_stop_of_one_side_is_reported_and_one_of_both_is_not() -> None:
    def found(*stopped: str) -> Comparison:
        return Comparison(
            base={}, head={}, pools=POOLS, rows=(), failure="it fails", stopped=stopped
        )

    assert is_reported(found("head"))
    assert is_reported(found("base"))
    assert not is_reported(found("base", "head"))
    edit = Edit(name="it", file="", line="a", instead="b")
    assert row(edit, found("base", "head"), 2) == (
        "| it | full | no, in 0 requests | 0 |  | it fails | 2 |"
    )


def test_where_the_release_stops_too_an_edit_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    release: Path,
) -> None:
    fault = '[[fault]]\nname = "less room"\nfile = "rooms.py"\nline = "1000"\ninstead = "{}"\n'
    copy = '[[refactoring]]\nname = "a copy"\nfile = "rooms.py"\nline = "1"\ninstead = "1"\n'
    (tmp_path / "faults.toml").write_text("\n".join([fault.format("30"), fault.format("3"), copy]))
    open_sides(monkeypatch, fail_at="2")
    faults = ["--faults", str(tmp_path / "faults.toml"), "--requests", "40"]
    # thirty pages hold two requests, and the third stops both sides; three pages do not hold one
    assert started(monkeypatch, regressions.main, *faults) == 1
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[2].partition(",")[0] for line in lines] == ["no", "yes", "no"]
    assert "at request 2 fake: no room is left; the edited copy: no room is left" in lines[0]
    assert started(monkeypatch, regressions.main, *faults, "--only", "2", "3") == 0


def test_answers_are_asked_once_and_repeated(tmp_path: Path) -> None:
    (request,) = requests_of(prompt(1, 4))
    tokens = token_ids(request)
    with SideProcess(FAKE, POOLS, tmp_path / "log") as process:
        side = Remembered(process)
        answers = []
        for count in (1, 3, 2):
            assert side.about() == {"engine": "fake", "version": "1"}
            for number in range(count):
                side.ask([("admit", number, tokens, request.prompt_len)])
                answers.append(side.take_outcome())
    assert [sum(each.hits) for each in answers] == [0, 0, 4 * PAGE, 4 * PAGE, 0, 4 * PAGE]
