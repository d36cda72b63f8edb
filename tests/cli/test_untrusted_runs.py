"""Stored runs of other authors: reading one runs no code of its author."""

import json
import subprocess
import sys

import pytest

from hicache import experiment
from hicache.cli.explain.rerun import rerun
from hicache.cli.main import main
from hicache.cli.tables.groups import load_run
from hicache.results.metrics import summarize
from hicache.results.tracking import write_json
from hicache.runs.grid import MOST_JOBS, choices_of, jobs_of
from hicache.runs.job import begin
from hicache.runs.schema import config_of, stored_config
from hicache.runs.stored import read_yaml

SMALL = ("workload=chat", "workload.limit=5", "model=llama3_8b", "tracker.wandb_mode=disabled")
AUTHORS = "import pathlib\npathlib.Path(__file__).with_name('RAN').touch()\nclass Mine:\n    pass\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made") / "run"
    result = experiment.run(config_of(*SMALL))
    begin(config_of(*SMALL), directory)
    write_json(directory / "summary.json", summarize(result.records, result.measures))
    return directory


@pytest.fixture
def theirs(made, tmp_path, monkeypatch):
    """The directory of another author's run, which is also the working directory."""
    for file in made.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "theirs.py").write_text(AUTHORS)
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    write_json(tmp_path / "provenance.json", provenance | {"directory": str(tmp_path)})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change(directory, old, new):
    file = directory / "config.yaml"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("knob", "old"),
    [
        ("cache.policy", "  policy: lru\n"),
        ("storage.kind", "storage:\n  kind: memory\n"),
        ("workload.tokenizer", "  num_sessions: 1000\n"),
    ],
)
def test_code_that_a_stored_run_names_runs_only_if_it_is_trusted(theirs, knob, old, monkeypatch):
    if knob == "workload.tokenizer":  # of a trace
        change(theirs, "  kind: chat\n", "  kind: trace\n")
        change(theirs, old, "  tokenizer: theirs:Mine\n")
    else:
        change(theirs, old, f"{old.rpartition(' ')[0]} theirs:Mine\n")
    told = f"names code to run, {knob}=theirs:Mine: if you trust it, add --trust"
    with pytest.raises(ValueError, match=told):
        rerun(theirs)
    assert not (theirs / "RAN").exists()
    if knob == "cache.policy":
        (theirs / "theirs.py").write_text(f"{AUTHORS}    def on_insert(self, entry, tier): pass\n")
        monkeypatch.syspath_prepend(theirs)
        assert rerun(theirs, trust=True).differences == ()
        assert (theirs / "RAN").exists()


@pytest.mark.parametrize(
    "command", [["compare", ".", "."], ["explain", "."], ["validate", ".", "config.yaml"]]
)
def test_a_command_that_reads_a_run_imports_nothing_from_its_folder(theirs, command):
    for package in ("pandas", "rich", "pyarrow", "sqlite3"):
        (theirs / f"{package}.py").write_text(AUTHORS)
    program = "from hicache.cli.main import main; main()"
    arguments = [sys.executable, "-P", "-c", program, *command]
    subprocess.run(arguments, capture_output=True, check=False)
    assert not (theirs / "RAN").exists()


def test_references_to_the_environment_in_a_stored_run_are_not_resolved(theirs, monkeypatch):
    monkeypatch.setenv("A_SECRET", "do not tell")
    change(theirs, "name: adhoc\n", "name: ${oc.env:A_SECRET}\n")
    with pytest.raises(ValueError, match=r"config\.yaml: name holds a reference") as refused:
        stored_config(theirs / "config.yaml")
    assert "do not tell" not in str(refused.value)
    assert load_run(theirs).config["name"] == "${oc.env:A_SECRET}"


NESTED = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
NESTED += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]


@pytest.mark.parametrize(
    "text", ["a: !!binary aGk=", "a: 2024-01-01", "1: a", "a: !!set {b}", "\n".join(NESTED)]
)
def test_yaml_that_no_run_writes_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml is not YAML") as refused:
        read_yaml(tmp_path / "config.yaml", dict)
    assert ("(no run writes the alias" in str(refused.value)) == ("&a0" in text)


def test_a_repeated_run_contacts_no_server_that_its_config_names(theirs):
    change(theirs, "storage:\n  kind: memory\n", "storage:\n  kind: redis\n")
    change(theirs, "  root: null\n", "  root: redis://127.0.0.1:1\n")
    assert rerun(theirs).records


def test_a_stored_sweep_of_too_many_jobs_is_refused():
    with pytest.raises(ValueError, match=f"at most {MOST_JOBS:,} jobs"):
        jobs_of(choices_of(["seed=range(0,1000000000)"]))


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (["--version"], "hicache 0", 0),
        (["run", "--version"], "hicache 0", 0),
        (["compar"], "no command 'compar' (did you mean compare?)", 2),
        (["--help"], "explain the slowest requests of a run", 0),
    ],
)
def test_help_version_and_typos_need_no_run(words, told, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # no checkout, so there is no `hicache diff`
    monkeypatch.setattr(sys, "argv", ["hicache", *words])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    assert (ended.value.code or 0) == code
    said = capsys.readouterr()
    assert told in said.out + said.err
    assert "diff" not in said.out


def test_the_help_of_compare_needs_no_pandas(tmp_path):
    (tmp_path / "pandas.py").write_text("raise ImportError")
    command = "import sys; sys.path.insert(0, '.'); from hicache.cli.compare import main; main()"
    subprocess.run([sys.executable, "-c", command, "--help"], cwd=tmp_path, check=True)
