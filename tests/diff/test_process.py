from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.diff.process import SideProcess
from experiments.diff.protocol import SideError
from tests.diff.sides import FAKE, POOLS, fake


@pytest.fixture(autouse=True)
def sides_start_quickly() -> None:
    """Not here, where their processes are tested."""


def side(folder: Path, **options: str) -> SideProcess:
    return SideProcess(fake(options), POOLS, folder / "side.log")


def test_what_an_engine_prints_goes_to_the_log_and_no_process_is_left_behind(
    tmp_path: Path,
) -> None:
    with side(tmp_path) as fake:
        assert fake.about() == {"engine": "fake", "version": "1"}
        process = fake._process
    assert "something for the log" in (tmp_path / "side.log").read_text()
    assert process.returncode is not None


def test_finished_requests_are_sent_with_the_next_request(tmp_path: Path) -> None:
    tokens = np.arange(10, dtype=np.int32)
    with side(tmp_path) as fake:
        fake.about()
        for number, finished in ((0, []), (1, [0])):
            calls = [("finish", each) for each in finished]
            fake.ask([*calls, ("admit", number, tokens, 9)])
        assert [sum(fake.take_outcome().hits) for _ in range(2)] == [0, 8]
        assert fake.probe(tokens) == {"full/device": [(0, 8)]}
    assert "finished [0]" in (tmp_path / "side.log").read_text()


def test_a_side_ends_although_an_answer_was_not_read(tmp_path: Path) -> None:
    with side(tmp_path) as fake:
        fake.about()
        fake.ask([("probe", np.arange(10, dtype=np.int32))])
    assert fake.peak_bytes is not None


def test_an_error_names_its_side(tmp_path: Path) -> None:
    with (
        side(tmp_path, will_not_open="1") as fake,
        pytest.raises(SideError, match=r"^fake: it will not open$"),
    ):
        fake.about()


def test_the_error_of_a_dead_process_gives_its_last_line_of_output(tmp_path: Path) -> None:
    launch = replace(FAKE, module="tests.diff.dying_side")
    with (
        SideProcess(launch, POOLS, tmp_path / "side.log") as fake,
        pytest.raises(SideError, match=r"the process ended: the last line of .* is: farewell"),
    ):
        fake.about()


def test_the_error_of_a_dead_process_says_that_it_printed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = replace(FAKE, interpreter="/bin/true")
    with (
        SideProcess(launch, POOLS, tmp_path / "side.log") as fake,
        pytest.raises(SideError, match=r"^fake: the process ended: it printed nothing$"),
    ):
        fake.about()


def test_a_side_imports_modules_of_the_callers_folder_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own_side.py").write_text("from tests.diff.fake_side import open_side\n")
    (tmp_path / "here" / "json.py").write_text("raise ValueError('not the library')\n")
    monkeypatch.chdir(tmp_path / "here")
    with SideProcess(replace(FAKE, module="own_side"), POOLS, tmp_path / "side.log") as fake:
        assert fake.about()["engine"] == "fake"


def test_a_side_is_killed_if_the_caller_raises_an_error(tmp_path: Path) -> None:
    fake = side(tmp_path)
    fake.about()
    fake.__exit__(ValueError)
    assert fake._process.returncode == -9
    assert "finished" not in (tmp_path / "side.log").read_text()


def test_the_peak_memory_of_a_process_is_known_when_it_has_ended(tmp_path: Path) -> None:
    peaks = []
    for megabytes in ("0", "300"):
        with side(tmp_path, megabytes=megabytes) as fake:
            fake.about()
            assert fake.peak_bytes is None
        assert fake.peak_bytes is not None
        peaks.append(fake.peak_bytes)
    assert peaks[1] - peaks[0] == pytest.approx(300e6, rel=0.05)
