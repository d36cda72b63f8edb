"""The command `hicache run` with a stand-in for the engine: output, files and exit codes."""

import concurrent.futures
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache.runs import checks

ROOT = Path(__file__).parents[2]
# Imports what a run needs once, and forks for each command line: the child continues below the
# loop, as if just started. A function that returns at once stands in for hicache.experiment.run.
PROGRAM = """
import gc, json, os, resource, socket, sys, types
sys.path[:0] = [{root!r}, {tests!r}]
from conftest import finished_request, keep_parsed, row_at
from hicache.results.metrics import REQUIRED_MEASURES, Progress, Result
from hicache.storage.base import StorageError
from hicache.secret import PASSWORD

def run(config, *, progress=None):
    if config.storage.root == "missing":
        raise FileNotFoundError(2, "No such trace", "missing")
    if config.storage.kind == "redis":
        if "closed" in config.storage.root:
            raise StorageError("no server at " + config.storage.root)
        assert os.environ[PASSWORD] == "s3cr3t"
    if config.storage.root == "bug":
        raise RuntimeError("a bug of ours")
    if config.storage.root == "huge":
        raise MemoryError
    if "GATE" in os.environ:
        open(os.environ["GATE"]).read()
    if config.storage.root == "slow" and "HURRY" not in os.environ:
        raise KeyboardInterrupt
    for i in range(3):
        row = row_at(10.0 * (i + 1), computed=300)
        progress(Progress(done_count=1, total_count=3, time_s=row["time_s"], row=row))
    records = [finished_request(i) for i in range(3 + config.seed)]
    if config.storage.root == "nobody":
        records = []
    measures = dict.fromkeys(REQUIRED_MEASURES, 0)
    measures["load/rho_gpu"] = 0.5
    return Result(records=records, measures=measures, wall_s=0.5, notes=("a note",))

module = types.ModuleType("hicache.experiment")
module.run = run
sys.modules["hicache.experiment"] = module
from hicache.runs.schema import config_of
from hicache.cli.run import main
from hicache.cli.tables import result_table, sweep_figure, comparison
from hicache.results import figures
from hydra._internal.hydra import Hydra
from hydra.core.plugins import Plugins

Plugins.instance()  # looks for them in all that is installed
keep_parsed(setattr)
config_of("seed=1")  # the first override is parsed slowly
gc.freeze()
gc.disable()
asking = socket.socket(fileno=0)
while True:
    told, streams, *_ = socket.recv_fds(asking, 1 << 16, 2)
    if not told:
        sys.exit()
    child = os.fork()
    if child == 0:
        break
    for stream in streams:
        os.close(stream)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    asking.send(str(code).encode())
call = json.loads(told)
for place, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
    os.dup2(stream, place)
for stream in streams:
    os.close(stream)
if call["max_file_bytes"] is not None:  # to a file that has grown too large a disk is full
    resource.setrlimit(resource.RLIMIT_FSIZE, (call["max_file_bytes"],) * 2)
sys.argv[1:] = call["arguments"]
os.environ |= call["variables"]
if "DRAW" not in os.environ:  # what most of a sweep's end is spent on
    figures.save = lambda figure, path: path.touch()
if not any(word.startswith("experiment=") for word in sys.argv):
    Hydra.get_mode = lambda *told, **named: None  # composes all of it, for only they have a mode
main()
"""
RUN_FILES = {
    *("config.yaml", "metrics.jsonl", "provenance.json", "report.html", "requests.parquet"),
    *("summary.json", "timing.json"),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return a function that runs `hicache run` without W&B and returns its CompletedProcess."""
    script = PROGRAM.format(root=str(ROOT), tests=str(ROOT / "tests"))
    asking, answering = socket.socketpair()
    forking = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path_factory.mktemp("somewhere"),
        env={**os.environ, "WANDB_MODE": "disabled", "HICACHE_TRACEBACK": "0"},
        stdin=answering,
    )
    answering.close()

    def call(*arguments, max_file_bytes=None, stdout=None, **variables):
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        told = {"arguments": arguments, "variables": variables, "max_file_bytes": max_file_bytes}
        streams = [to_out if stdout is None else stdout, to_err]
        socket.send_fds(asking, [json.dumps(told).encode()], streams)
        os.close(to_out)
        os.close(to_err)
        with open(out) as printed, open(err) as complained:  # noqa: PTH123 - pipes have no path
            texts = printed.read(), complained.read()
        return subprocess.CompletedProcess(arguments, int(asking.recv(8)), *texts)

    with forking, asking:
        yield call


@pytest.fixture(scope="module")
def ordinary(program):
    return program("name=first")


@pytest.fixture(scope="module")
def sweep(program):
    """The ended process of a sweep in which two jobs failed and two finished."""
    return program("-m", "storage.root=missing,null", "seed=0,1", "name=grid")


def last_line(done):
    return Path(done.stdout.splitlines()[-1])


def names_in(directory):
    return {path.name for path in directory.iterdir()} - {".hydra"}


def contents_of(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def sentence_of(done):
    """Return the only line that a command prints to stderr, and check that it was refused."""
    (told,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    return told


@contextmanager
def locked(directory):
    """Hold the lock of a directory within the block, as a run does while it is under way."""
    holder = os.open(directory, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(holder)


def test_a_directory_can_be_locked_again_once_it_is_unlocked(tmp_path):
    for _ in range(2):
        with checks.locked(tmp_path), pytest.raises(checks.BusyError):
            checks.lock(tmp_path)


def test_a_run_prints_its_summary_and_leaves_its_files_in_the_directory_it_prints_last(ordinary):
    assert ordinary.returncode == 0, ordinary.stderr
    words = ["device hit", "host hit", "storage hit", "computed", "hit 70.0%", "a note", "1,200"]
    assert [word for word in words if word not in ordinary.stdout] == []
    run_dir = last_line(ordinary)
    assert run_dir.parent.parts[-2:] == ("outputs", "first")
    assert names_in(run_dir) == RUN_FILES
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((run_dir / "timing.json").read_text())["requests_per_wall_s"] == 6
    wall = r"wall time: 0\.5 s for the replay \(6 requests per second\), .* s with reports\n"
    assert re.search(wall, ordinary.stdout)


def test_cfg_job_prints_the_settings_that_a_run_stores(program, ordinary):
    done = program("--cfg", "job", "name=first")
    assert done.stdout == (last_line(ordinary) / "config.yaml").read_text()
    assert program("--cfg", "job", "cache.typo=1").returncode == 2


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["storage.root=missing"], "No such trace: missing"),
        (["storage.root=nobody"], "must be shorter than the workload"),
        (["storage.root=huge"], "lower cache.host_gib (64.0) or cache.device_gib (40.0)"),
        (["cache.host_gib=1,2"], "add -m to run every value"),
        (["-m", "seed=0,1", "hydra.launcher.n_jobs=1"], "hydra/launcher=joblib"),
        (["hydra.run.dir=/proc/none"], "hydra.run.dir=/proc/none: cannot create the directory"),
        ([f"hydra.run.dir={__file__}/x"], "cannot create the directory: Not a directory"),
        (["metrics=[request/ttft_mean]"], "metrics: unknown metric request/ttft_mean (did you m"),
        (["-m", "seed=0,1", "metrics=[request/ttft_mean]"], "unknown metric request/ttft_mean"),
        (["hardware.name=a100"], "hardware.name=a100 changes only the name"),
    ],
)
def test_input_that_cannot_be_used_is_refused_in_one_sentence(program, overrides, told):
    assert told in sentence_of(program(*overrides))


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ("metrics=[load_back/copy_s,request/ttft_s_mean]", "this run has no metric load_back/copy"),
        ("prefetch.stop=best_effort prefetch.timeout_base_s=3", "prefetch.timeout_base_s has no "),
        ("prefetch.timeout_base_s=3", None),
        (
            "cache.host_gib=64 cache.host.sglang_ratio=2",
            "cache.host_gib has no effect: cache.host.",
        ),
        ("storage=none prefetch.stop=best_effort", "prefetch.stop has no effect: it is used only"),
    ],
)
def test_settings_and_metrics_without_effect_are_reported(program, overrides, warning):
    done = program(*overrides.split())
    assert done.returncode == 0
    told = [line for line in done.stderr.splitlines() if "no effect" in line or "no metric" in line]
    assert bool(told) == bool(warning)
    assert not told or told[0].startswith(warning)


@pytest.mark.parametrize(
    ("mode", "setting"),
    [
        ((), "storage.root=redis://me:s3cr3t%2F%2Bpw@open"),
        (("-m",), "storage.root=redis://:s3cr3t/+pw@open:6379/0,redis://:s3cr3t/+pw@closed:1/0"),
        ((), "++storage.root=redis://open/s3cr3t"),
        ((), 'name="redis://open#s3cr3t"'),
        ((), "hydra.job.env_set.HICACHE_STORAGE_PASSWORD=s3cr3t"),
        (("-m",), "hydra.sweeper.params.storage.root=redis://s3cr3t@open"),
        ((), "experiment=mine"),
    ],
)
def test_a_secret_in_a_setting_is_refused_and_written_nowhere(program, tmp_path, mode, setting):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nstorage: {kind: redis, root: 'redis://:s3cr3t@open'}\n"
    )
    out = tmp_path / "out"
    settings = [f"hydra.searchpath=[{tmp_path}]"] if "mine" in setting else ["storage=redis"]
    settings += [setting, f"hydra.{'sweep' if '-m' in mode else 'run'}.dir={out}"]
    done = program(*mode, *settings)
    assert done.returncode == 2
    assert "may hold a password or another secret" in done.stderr
    assert "s3cr3t" not in done.stdout + done.stderr
    assert not out.exists() or not list(out.iterdir())


def test_a_password_from_the_environment_is_written_nowhere(program, tmp_path):
    root = ("storage=redis", "storage.root=redis://open:6379", f"hydra.run.dir={tmp_path / 'ok'}")
    done = program(*root, HICACHE_STORAGE_PASSWORD="s3cr3t")
    assert done.returncode == 0, done.stderr
    assert not any(b"s3cr3t" in content for content in contents_of(tmp_path).values())
    closed = ("storage=redis", "storage.root=redis://closed:6379", f"hydra.run.dir={tmp_path}")
    done = program(*closed, HICACHE_STORAGE_PASSWORD="no server at")  # a part of the error
    assert sentence_of(done) == "*** redis://closed:6379"
    assert (tmp_path / "error.txt").read_text() == done.stderr


@pytest.mark.parametrize("max_file_bytes", [0, 20_000])
def test_a_full_disk_is_reported_in_one_sentence_and_leaves_no_empty_file(
    program, tmp_path, max_file_bytes
):
    done = program(f"hydra.run.dir={tmp_path}", max_file_bytes=max_file_bytes)
    assert done.returncode == 2
    told = done.stderr.splitlines()[-1]
    assert told.startswith(f"File too large: cannot write to {tmp_path}; ")
    assert not (tmp_path / "summary.json").exists()
    if max_file_bytes == 0:
        assert sentence_of(done)
        assert not (tmp_path / "error.txt").exists()
    else:
        assert "3 requests: 3 finished" in done.stdout
        assert (tmp_path / "error.txt").read_text() == f"{told}\n"
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert program(f"hydra.run.dir={tmp_path}").returncode == 0
    assert names_in(tmp_path) == RUN_FILES


def test_a_run_whose_output_cannot_be_printed_still_writes_all_its_files(program, tmp_path):
    with Path("/dev/full").open("w") as full:  # has no room
        done = program(f"hydra.run.dir={tmp_path}", stdout=full.fileno())
    told = done.stderr.splitlines()[0]
    assert told.startswith("No space left on device: cannot write to the output of this command; ")
    assert "Traceback" not in done.stderr
    assert names_in(tmp_path) == RUN_FILES


def test_a_traceback_is_shown_for_a_fault_of_the_library_or_on_request(program):
    assert "Traceback" in program("storage.root=missing", HICACHE_TRACEBACK="1").stderr
    done = program("storage.root=bug")
    assert done.returncode == 1
    assert "a bug of ours" in done.stderr
    assert "Traceback" in done.stderr


def test_a_sweep_continues_after_failed_jobs_and_reports_each_job(sweep):
    assert sweep.returncode == 1
    directory = last_line(sweep)
    assert directory.parent.parts[-2:] == ("outputs", "grid")
    assert sweep.stdout.splitlines().count(str(directory)) == 1
    failed = directory / "0_root=missing,seed=0"
    assert (failed / "error.txt").read_text() == "No such trace: missing\n"
    assert f"job {failed.name} failed: No such trace: missing" in sweep.stderr
    names = ["2_root=null,seed=0", "3_root=null,seed=1"]
    assert sorted(path.parent.name for path in directory.glob("*/summary.json")) == names
    lines = [line for line in sweep.stdout.splitlines() if "token hit rate 0" in line]
    assert [line.partition("  →  ")[0] for line in lines] == [
        f"{name} ({number} of 4)" for number, name in enumerate(names, 3)
    ]


def test_an_experiment_runs_its_whole_grid_and_draws_a_figure(program):
    done = program(
        "experiment=prefetch_stop",
        "workload=builtin",  # a trace may not be there
        "hydra/launcher=basic",  # joblib's workers would not have the function above
        "goodput.num_rates=0",  # the function above takes no workload
        "storage.read_gbps=2",
        "seed=0",
    )
    assert done.returncode == 0, done.stderr
    assert len(list(last_line(done).glob("*/summary.json"))) >= 3
    assert (last_line(done) / "sweep.png").exists()
    assert "prefetch.stop" in done.stdout
    assert "wandb sync" not in done.stdout  # W&B is off


def test_a_finished_run_is_not_repeated(program, ordinary):
    run_dir = last_line(ordinary)
    before = (run_dir / "timing.json").stat().st_mtime_ns
    done = program("name=first", f"hydra.run.dir={run_dir}")
    assert (done.returncode, done.stdout) == (0, f"{run_dir}\n")
    assert done.stderr == "already finished, and nothing has changed since\n"
    assert (run_dir / "timing.json").stat().st_mtime_ns == before


@pytest.fixture
def used(ordinary, tmp_path):
    """The directory of a finished run, `name=first`."""
    return shutil.copytree(last_line(ordinary), tmp_path / "used")


def test_a_run_into_the_directory_of_another_run_is_refused(program, used):
    before = contents_of(used)
    done = program("name=first", "seed=1", f"hydra.run.dir={used}")
    assert "another configuration (seed was 0 and is 1)" in sentence_of(done)
    done = program("name=first", "seed=1", "cache.page_size=32", f"hydra.run.dir={used}")
    assert "(seed was 0 and is 1, cache.page_size was 64 and is 32)" in sentence_of(done)
    assert contents_of(used) == before


def test_a_run_made_by_other_code_is_repeated(program, used):
    made_of = json.loads((used / "provenance.json").read_text())
    made_of["hicache"]["sha256"] = "0" * 64
    (used / "provenance.json").write_text(json.dumps(made_of))
    done = program("name=first", f"hydra.run.dir={used}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "first: runs again, because of changes in hicache"
    assert "already finished" in program("name=first", f"hydra.run.dir={used}").stderr


def test_a_run_with_other_settings_may_use_the_directory_of_a_failed_run(program, used):
    (used / "summary.json").rename(used / "error.txt")
    assert program("seed=1", f"hydra.run.dir={used}").returncode == 0
    assert names_in(used) == RUN_FILES


@pytest.mark.parametrize(("place", "mode"), [("run", ()), ("sweep", ("-m", "seed=0,1"))])
def test_a_second_run_in_a_locked_directory_is_refused(program, tmp_path, place, mode):
    told = (*mode, f"hydra.{place}.dir={tmp_path}")
    with locked(tmp_path):
        said = sentence_of(program(*told))
    assert said.startswith(f"another run is writing to {tmp_path}: wait for its end")
    assert list(tmp_path.iterdir()) == []
    assert program(*told).returncode == 0


def test_a_run_locks_its_directory_until_its_process_ends(program, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        os.mkfifo(tmp_path / "gate")
        run_dir = f"hydra.run.dir={tmp_path / 'run'}"
        first = threads.submit(program, run_dir, GATE=str(tmp_path / "gate"))
        with (tmp_path / "gate").open("w"):  # opened once the first run is under way
            holder = os.open(tmp_path / "run", os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert first.result().returncode == 0
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(holder)


def test_an_interrupted_sweep_sums_up_its_finished_jobs_and_can_be_continued(program, tmp_path):
    told = ("-m", "storage.root=null,slow", f"hydra.sweep.dir={tmp_path}")
    done = program(*told)
    assert done.returncode == 130
    assert last_line(done) == tmp_path
    assert "interrupted: 1 of 2 jobs are finished" in done.stderr
    assert len(json.loads((tmp_path / "sweep.json").read_text())) == 1
    before = (tmp_path / "0_root=null" / "timing.json").stat().st_mtime_ns
    done = program(*told, HURRY="1")
    assert done.returncode == 0, done.stderr
    finished = "0_root=null (1 of 2)  →  already finished, and nothing has changed since\n"
    assert finished in done.stdout
    assert (tmp_path / "0_root=null" / "timing.json").stat().st_mtime_ns == before
    assert (tmp_path / "1_root=slow" / "summary.json").exists()
    assert len(json.loads((tmp_path / "sweep.json").read_text())) == 2


def test_a_sweep_can_be_extended_in_its_directory(program, tmp_path):
    place = f"hydra.sweep.dir={tmp_path}"
    program("-m", "seed=0", place)
    done = program("-m", "seed=0,1", place)
    assert done.returncode == 0, done.stderr
    assert "0 (1 of 2)  →  already finished" in done.stdout
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"0", "1_seed=1"}


def test_a_job_that_another_process_is_running_is_reported_and_not_run_again(program, tmp_path):
    told = ("-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}")
    program(*told)
    job = tmp_path / "0_seed=0"
    (job / "summary.json").unlink()
    with locked(job):  # as by a worker that outlived its command
        done = program(*told)
    assert done.returncode == 1
    assert f"another run is writing to {job}: wait for its end" in done.stderr
    assert not {"error.txt", "summary.json"} & names_in(job)


@pytest.mark.parametrize(
    ("grid", "job"),
    [
        (["seed=0,1,5,0"], "0_root=missing,seed=0"),
        (["seed=0"], "0_root=missing,seed=0"),
        (["storage.root=missing,null", "seed=0,7"], "1_root=missing,seed=1"),
    ],
)
def test_a_sweep_into_the_directory_of_another_sweep_is_refused(program, sweep, grid, job):
    directory = last_line(sweep)
    before = contents_of(directory)
    done = program("-m", *grid, "name=grid", f"hydra.sweep.dir={directory}")
    assert done.returncode == 2
    assert f"contains job {job} of another sweep, which was storage.root" in done.stderr
    assert contents_of(directory) == before


def wandb_run(out_dir):
    """Return W&B's record of the only run below `out_dir`, and the names of the files it keeps."""
    (log,) = out_dir.glob("wandb/offline-run-*/run-*.wandb")
    wandb = Path(sys.executable).with_name("wandb")
    found = subprocess.run(
        [wandb, "leet", "inspect", "--json", log], capture_output=True, text=True, check=True
    )
    records = [json.loads(line) for line in found.stdout.splitlines()]
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    return run, {path.name for path in log.parent.glob("files/*")}


REQUESTS = "media/table/requests_*.json"


def test_wandb_has_one_group_for_a_sweep_with_a_run_for_each_job_and_one_summary(program, tmp_path):
    told = (f"hydra.sweep.dir={tmp_path / 'mine'}", "tracker.wandb_requests=true", "-m")
    grid = ("seed=0,1,2", "cache.host_gib=8,16", "storage.read_gbps=2")
    done = program(*grid, *told, WANDB_MODE="offline", DRAW="1")
    assert done.returncode == 0, done.stderr
    assert "Differences to the first row of each section" in done.stdout
    run, kept = wandb_run(tmp_path / "mine" / "1_seed=0,host_gib=16")
    names = (run["run_group"], run["display_name"], run["tags"][1:])
    assert names == ("adhoc/mine", "host_gib=16 seed=0", ["builtin", "seed=0", "host_gib=16"])
    assert run["job_type"] == "host_gib=16"
    assert "requests.parquet" in kept
    summary, kept = wandb_run(tmp_path / "mine")
    names = (summary["run_group"], summary["display_name"], summary["job_type"])
    assert names == ("adhoc/mine", "summary", "summary")
    assert {"sweep.csv", "sweep.json", "sweep.png", "sweep.pdf"} <= kept
    assert summary["notes"].startswith("Recommendation by mean TTFT: host_gib=8, as no arm is")
    assert "token hit rate: host_gib=16 0 [0, 0], the same, against" in summary["notes"]
    settings = run["config"]["update"]
    assert settings["choices"]["executor"] == settings["executor"]["kind"] == "simulated"
    assert "policy_args" not in settings["cache"]  # a group without values
    assert summary["config"]["update"]["cache.host_gib"] == ["8", "16"]
    media = (tmp_path / "mine").glob("**/wandb/offline-run-*/files/media/*/*")
    names = {re.sub(r"_\d+_\w+\.", ".", path.name): path for path in media}
    assert {"sweep_png.png", "sweep_html.html", "arms.table.json"} <= names.keys()
    num_metrics = len(run["config"]["update"]["metrics"])
    assert len(json.loads(names["intervals.table.json"].read_text())["data"]) == num_metrics
    rows = [json.loads(path.read_text())["data"] for path in (tmp_path / "mine").rglob(REQUESTS)]
    assert sorted(map(len, rows)) == [3, 3, 4, 4, 5, 5]
    (told,) = [line for line in done.stdout.splitlines() if "wandb sync" in line]
    command = told.partition(": ")[2].replace(
        "wandb sync", f"{Path(sys.executable).with_name('wandb')} sync --dry-run"
    )
    listed = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert "Would sync 7 run(s)" in listed.stderr + listed.stdout
