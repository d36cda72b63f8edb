"""Damaged files of stored runs are named in one sentence."""

import sys

import pytest

from hicache.cli import compare
from hicache.cli.tables.groups import load_run
from hicache.results.tracking import write_json
from hicache.runs.checks import refuse_other
from hicache.runs.grid import choices_of_sweep, find_jobs
from hicache.runs.schema import config_of
from hicache.runs.stored import Numbers
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


def test_the_largest_number_is_finite():
    largest = sys.float_info.max
    assert Numbers("file", {"a": largest, "b": -largest}) == {"a": largest, "b": -largest}


def test_names_of_metrics_must_be_texts(tmp_path):
    write_run(tmp_path / "run")
    with (tmp_path / "run" / "config.yaml").open("a") as file:
        file.write("metrics: [request/ttft_s_mean, 7]\n")
    with pytest.raises(ValueError, match="metrics must be a list of names"):
        load_run(tmp_path / "run")


def test_the_grid_of_an_experiments_file_is_that_of_its_sweep():
    stored = {"sweeper": {"params": {"seed": "0,1"}}, "overrides": {"task": ["storage=none"]}}
    assert choices_of_sweep(stored) == {
        "seed": ["seed=0", "seed=1"],
        "storage": ["storage=none"],
    }


def test_a_file_with_the_name_of_a_job_is_no_job(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").touch()
    assert find_jobs(tmp_path) == {1: tmp_path / "1"}
