"""A stored run may come from anyone: reading it runs no code of its author."""

import json
import subprocess
import sys
from pathlib import Path

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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "run"
    result = experiment.run(config_of(*SMALL))
    begin(config_of(*SMALL), directory)
    write_json(directory / "summary.json", summarize(result.records, result.measures))
    return directory


@pytest.fixture
def theirs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run by another author, in whose folder the user works."""
    for file in made.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "theirs.py").write_text(AUTHORS)
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    write_json(tmp_path / "provenance.json", provenance | {"directory": str(tmp_path)})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change(directory: Path, old: str, new: str) -> None:
    file = directory / "config.yaml"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "knob"),
    [
        ("  policy: lru\n", "  policy: theirs:Mine\n", "cache.policy=theirs:Mine"),
        (
            "storage:\n  kind: memory\n",
            "storage:\n  kind: theirs:Mine\n",
            "storage.kind=theirs:Mine",
        ),
        ("  tokenizer: null\n", "  tokenizer: theirs:Mine\n", "workload.tokenizer=theirs:Mine"),
    ],
)
def test_code_that_a_stored_run_names_does_not_run_unless_it_is_trusted(
    theirs: Path, old: str, new: str, knob: str
) -> None:
    change(theirs, old, new)
    told = f"names code to run, {knob}: if you trust it, add --trust"
    with pytest.raises(ValueError, match=told):
        rerun(theirs)
    assert not (theirs / "RAN").exists()


def test_a_trusted_run_uses_the_users_class(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (theirs / "theirs.py").write_text(f"{AUTHORS}    def on_insert(self, entry, tier): pass\n")
    monkeypatch.syspath_prepend(theirs)
    change(theirs, "  policy: lru\n", "  policy: theirs:Mine\n")
    assert rerun(theirs, trust=True).differences == ()
    assert (theirs / "RAN").exists()


@pytest.mark.parametrize("verb", ["compare", "explain", "validate"])
def test_a_program_that_reads_a_run_imports_nothing_from_the_current_directory(
    theirs: Path, verb: str
) -> None:
    for package in ("pandas", "rich", "pyarrow", "sqlite3"):
        (theirs / f"{package}.py").write_text(AUTHORS)
    arguments = {"compare": [".", "."], "explain": ["."], "validate": [".", "config.yaml"]}[verb]
    command = ["-c", "from hicache.cli.main import main; main()", verb, *arguments]
    subprocess.run([sys.executable, "-P", *command], capture_output=True, check=False)
    assert not (theirs / "RAN").exists()


def test_references_in_a_stored_run_are_not_resolved(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "do not tell")
    change(theirs, "name: adhoc\n", "name: ${oc.env:A_SECRET}\n")
    with pytest.raises(ValueError, match=r"config\.yaml: name holds a reference") as refused:
        stored_config(theirs / "config.yaml")
    assert "do not tell" not in str(refused.value)
    assert load_run(theirs).config["name"] == "${oc.env:A_SECRET}"


def test_nested_aliases_in_a_stored_run_are_refused(theirs: Path) -> None:
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    (theirs / "config.yaml").write_text("\n".join(layers))
    with pytest.raises(ValueError, match=r"config\.yaml is not YAML \(no run writes the alias"):
        read_yaml(theirs / "config.yaml", dict)


@pytest.mark.parametrize("text", ["a: !!binary aGk=", "a: 2024-01-01", "1: a", "a: !!set {b}"])
def test_values_that_no_run_writes_are_refused(theirs: Path, text: str) -> None:
    (theirs / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml is not YAML"):
        read_yaml(theirs / "config.yaml", dict)


def test_an_explanation_contacts_no_server_that_the_run_names(theirs: Path) -> None:
    change(theirs, "storage:\n  kind: memory\n", "storage:\n  kind: redis\n")
    change(theirs, "  root: null\n", "  root: redis://127.0.0.1:1\n")
    assert rerun(theirs).records


def test_a_grid_of_a_stored_sweep_is_bounded() -> None:
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
def test_the_command_answers_without_a_run(
    words: list[str],
    told: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # no checkout, so there is no `hicache diff`
    monkeypatch.setattr(sys, "argv", ["hicache", *words])
    ended: object = 0
    try:
        main()
    except SystemExit as exit_:
        ended = exit_.code
    said = capsys.readouterr()
    assert told in said.out + said.err
    assert "diff" not in said.out
    assert ended == code


def test_the_help_of_compare_needs_no_pandas(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("raise ImportError")
    command = "import sys; sys.path.insert(0, '.'); from hicache.cli.compare import main; main()"
    done = subprocess.run([sys.executable, "-c", command, "--help"], cwd=tmp_path, check=False)
    assert done.returncode == 0
