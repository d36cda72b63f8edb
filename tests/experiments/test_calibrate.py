"""The command that measures the machine one sits at."""

from pathlib import Path

import pytest
import yaml

from experiments.calibrate import main
from hicache.cli.schema import register

SHORT = ["--seed", "101", "workload.limit=3"]


def test_a_machine_is_measured_and_its_profile_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    main(["mine", "--folder", str(tmp_path), *SHORT])
    text = (tmp_path / "mine.yaml").read_text()
    profile = yaml.safe_load(text)
    assert profile["name"] == "mine"
    assert profile["step_s"]["status"] == "measured"
    assert profile["weight_bandwidth"] == {
        "value": 1e30,
        "source": "not fitted: never binds",
        "status": "modelled",
    }
    told = capsys.readouterr().out
    assert "hardware=mine" in told
    assert "e+21" not in told  # of a storage that nothing was read from


@pytest.mark.parametrize("name", ["../evil", "two words"])
def test_a_name_that_is_none_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([name, "--folder", str(tmp_path)])
    assert "the name of a machine must be a single word" in capsys.readouterr().err


def test_a_profile_that_is_there_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("of a colleague")
    with pytest.raises(SystemExit, match="2"):
        main(["mine", "--folder", str(tmp_path), *SHORT])
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "of a colleague"
