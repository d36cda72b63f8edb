"""The command line, with an engine that answers at once: what is printed, written and returned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# stands in for hicache.experiment, so that these tests are about the program around it
PROGRAM = """
import sys, types
sys.path[:0] = [{root!r}, {tests!r}]
from conftest import finished_request
from hicache.metrics import REQUIRED_MEASURES, Progress, Result, Row

def run(config, *, progress=None):
    if config.workload.path == "missing":
        raise FileNotFoundError(2, "No such trace", "missing")
    if config.workload.path == "bug":
        raise RuntimeError("a bug of ours")
    rows = [Row(time_s=10.0 * (i + 1), computed_tokens=300) for i in range(3)]
    for row in rows:
        progress(Progress(done_count=1, total_count=3, time_s=row.time_s, row=row))
    records = [finished_request(i) for i in range(3 + config.seed)]
    measures = dict.fromkeys(REQUIRED_MEASURES, 0)
    measures["load/rho_gpu"] = 0.95 if config.workload.path == "busy" else 0.5
    return Result(records=records, measures=measures, wall_s=0.5, notes=("a note",))

module = types.ModuleType("hicache.experiment")
module.run = run
sys.modules["hicache.experiment"] = module
from experiments.run import main
main()
"""
RUN_FILES = {
    "config.yaml",
    "metrics.jsonl",
    "report.html",
    "requests.parquet",
    "summary.json",
    "timing.json",
    "tokens.png",
    "ttft.png",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Runs the command in a directory of its own, without W&B."""
    script = PROGRAM.format(root=str(ROOT), tests=str(ROOT / "tests"))
    directory = tmp_path_factory.mktemp("somewhere")

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=directory,
            env={**os.environ, "WANDB_MODE": "disabled", "HICACHE_TRACEBACK": "0", **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.fixture(scope="module")
def ordinary(program):
    return program("name=first")


@pytest.fixture(scope="module")
def sweep(program):
    """Two jobs that fail, and two that do not."""
    return program("-m", "workload.path=missing,null", "seed=0,1", "name=grid")


def last_line(done) -> Path:
    return Path(done.stdout.splitlines()[-1])


def test_a_run_leaves_its_files_and_prints_their_directory_last(ordinary):
    assert ordinary.returncode == 0, ordinary.stderr
    run_dir = last_line(ordinary)
    assert run_dir.parent.parts[-2:] == ("outputs", "first")
    assert {path.name for path in run_dir.iterdir()} == {*RUN_FILES, ".hydra"}
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((run_dir / "timing.json").read_text())["requests_per_wall_s"] == 6


def test_equal_runs_have_equal_summaries_in_two_directories(program, ordinary):
    first, second = last_line(ordinary), last_line(program("name=first"))
    assert first != second
    for name in ("summary.json", "metrics.jsonl", "config.yaml"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize(
    "words", ["device hit", "host hit", "storage hit", "computed", "hit 70.0%", "a note"]
)
def test_the_summary_says_where_tokens_came_from(ordinary, words):
    assert words in ordinary.stdout


def test_no_printed_line_is_filled_up_with_blanks(ordinary, sweep):
    lines = ordinary.stdout.splitlines() + sweep.stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


def test_no_number_is_elided_on_a_narrow_terminal(program, ordinary):
    narrow = program("name=narrow", FORCE_COLOR="1", COLUMNS="40").stdout
    assert "…" not in narrow
    assert "1,200" in ordinary.stdout
    assert "1,200" in narrow


def test_an_overloaded_run_makes_no_latency_claim(program, ordinary):
    claim = "overloaded: no latency claim"
    assert claim in program("workload.path=busy").stdout
    assert claim not in ordinary.stdout


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("workload.path=missing", "No such trace: missing"),
        ("cache.page_size=24", "cache.page_size must be a power of two, got 24"),
        ("cache.pagesize=64", "did you mean cache.page_size?"),
        ("+cache.typo=64", "there is no knob cache.typo"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(program, override, told):
    done = program(override)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_traceback_is_there_for_who_asks(program):
    assert "Traceback" in program("workload.path=missing", HICACHE_TRACEBACK="1").stderr


def test_a_bug_shows_its_traceback(program):
    done = program("workload.path=bug")
    assert done.returncode == 1
    assert "a bug of ours" in done.stderr
    assert "Traceback" in done.stderr


def test_a_sweep_goes_on_after_a_job_that_fails(sweep):
    assert sweep.returncode == 1
    found = last_line(sweep).glob("*/summary.json")
    assert sorted(path.parent.name for path in found) == ["2", "3"]


def test_a_failed_job_says_why(sweep):
    told = (last_line(sweep) / "0" / "error.txt").read_text()
    assert told == "No such trace: missing\n"
    assert "job 0 failed: No such trace: missing" in sweep.stderr


def test_the_line_of_a_job_says_what_no_other_job_was_told(sweep):
    lines = [line for line in sweep.stdout.splitlines() if line.startswith("2: ")]
    assert lines[0].startswith("2: workload.path=null seed=0  →  token hit rate")


def test_a_sweep_prints_its_directory_once_and_last(sweep):
    assert last_line(sweep).parent.parts[-2:] == ("outputs", "grid")
    assert sweep.stdout.count(str(last_line(sweep))) == 1


def test_an_experiment_runs_its_whole_grid_and_ends_with_a_figure(program):
    done = program(
        "experiment=prefetch_stop", "hydra/launcher=basic", "storage.read_gbps=2", "seed=0"
    )  # joblib's workers would not have the engine above
    assert done.returncode == 0, done.stderr
    assert len(list(last_line(done).glob("*/summary.json"))) >= 3
    assert (last_line(done) / "sweep.png").exists()
    assert "prefetch.stop" in done.stdout
