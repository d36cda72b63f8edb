"""Damaged files of runs are named in one sentence, by every program that reads them."""

from pathlib import Path

import pytest

from hicache.cli import compare
from hicache.cli.tables.groups import load_run
from hicache.results.tracking import write_json
from hicache.runs.checks import refuse_other
from hicache.runs.schema import config_of
from tests.cli.test_groups import write_run

DEEP = "[" * 100_000
DAMAGED = [
    ("summary.json", "[]", "must hold a JSON object, got list"),
    ("summary.json", "{", "is not JSON"),
    ("summary.json", DEEP, "is not JSON"),
    ("provenance.json", "[]", "must hold a JSON object, got list"),
    ("provenance.json", "{", "is not JSON"),
    ("config.yaml", "a: [", "is not YAML"),
    ("config.yaml", "- a", "must hold a mapping"),
    ("config.yaml", "7", "must hold a mapping"),
    ("config.yaml", DEEP, "is not YAML"),
    ("config.yaml", "\x00", "is not YAML"),
    (".hydra/overrides.yaml", "a: 1", "must hold a list"),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", stop="timeout", rate=1.0, seed=0, ttft=1.0)
    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("- seed=0\n")
    write_json(tmp_path / "run" / "provenance.json", {})
    load_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(("file", "text", "told"), DAMAGED)
def test_a_damaged_file_of_a_run_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, told: str
) -> None:
    (run_dir / file).write_text(text)
    with pytest.raises(SystemExit) as ended:
        compare.main([str(run_dir), str(run_dir)])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{run_dir / file} {told}")
    assert ended.value.code == 2


def test_a_damaged_config_is_named_by_a_run_into_its_directory(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"run/config\.yaml is not YAML"):
        refuse_other(config_of(), run_dir)
