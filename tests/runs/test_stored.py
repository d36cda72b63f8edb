"""Damaged files of stored runs are named in one sentence."""

import pytest

from hicache.cli import compare
from hicache.cli.tables.groups import load_run
from hicache.results.tracking import write_json
from hicache.runs.checks import refuse_other
from hicache.runs.schema import config_of
from tests.cli.test_groups import write_run

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
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
    ],
)
def test_a_damaged_file_of_a_run_is_named(file, text, told, tmp_path, capsys):
    run_dir = tmp_path / "run"
    write_run(run_dir)
    (run_dir / ".hydra").mkdir()
    (run_dir / ".hydra" / "overrides.yaml").write_text("- seed=0\n")
    write_json(run_dir / "provenance.json", {})
    load_run(run_dir)
    (run_dir / file).write_text(text)
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(run_dir), str(run_dir)])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{run_dir / file} {told}")
    if text == "a: [":
        with pytest.raises(ValueError, match=r"run/config\.yaml is not YAML"):
            refuse_other(config_of(), run_dir)
