"""A sweep of 48 jobs on each launcher gives equal tables, even if a worker is killed."""

import json
import os
import re
import subprocess
import sysconfig
import venv
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[1]
THRESHOLDS = [64 * number for number in range(1, 25)]
DEADLY = THRESHOLDS[10]  # of jobs 20 and 21
GRID = ("prefetch.threshold=" + ",".join(map(str, THRESHOLDS)), "seed=0,1")
LAUNCHERS = {
    "joblib": ("hydra.launcher.n_jobs=2",),
    "ray": ("+hydra.launcher.ray.init.num_cpus=2",),
    "submitit_local": ("hydra.sweeper.max_batch_size=4",),
}
# notes each job that begins; kills its process in one job, the first time
POLICY = f"""
import os, pathlib, signal

class Mortal:
    def __init__(self, world):
        folder = pathlib.Path(os.environ["FOLDER"])
        with (folder / "begun").open("a") as file:
            file.write(f"{{world.config.prefetch.threshold}}\\n")
        if world.config.prefetch.threshold == {DEADLY} and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def may_stop(self, prefetch, now_ns):
        return True
"""


@pytest.fixture(scope="module")
def hicache(tmp_path_factory):
    """The path of `hicache` in a new environment: this one's packages, Ray and submitit."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib"))
    pip = (folder / "bin" / "pip", "install", "--quiet", "--editable", f"{ROOT}[ray,slurm]")
    subprocess.run(pip, check=True)
    return folder / "bin" / "hicache"


def run(hicache: Path, folder: Path, launcher: str) -> subprocess.CompletedProcess[str]:
    (folder / "mortal.py").write_text(POLICY)
    variables = {"PYTHONPATH": str(folder), "FOLDER": str(folder), "WANDB_MODE": "disabled"}
    command = [hicache, "run", "-m", f"hydra/launcher={launcher}", *LAUNCHERS[launcher], *GRID]
    command += ["name=grid", "cache.policy=mortal:Mortal", "workload.limit=5"]
    return subprocess.run(
        [*command, "hydra.sweep.dir=sweep"],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def table_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\ngrid")[2].rpartition("\n/")[0]


def begun(folder: Path) -> Counter[int]:
    return Counter(map(int, (folder / "begun").read_text().split()))


@pytest.fixture(scope="module")
def expected(hicache, tmp_path_factory):
    """The directory of a sweep by joblib whose workers all live, and its table."""
    folder = tmp_path_factory.mktemp("joblib")
    (folder / "killed").touch()
    table = table_of(run(hicache, folder, "joblib"))
    assert len(table.splitlines()) > len(THRESHOLDS)
    assert begun(folder) == dict.fromkeys(THRESHOLDS, 2)
    return folder, table


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_sweep_finishes_every_job_once_after_a_worker_is_killed(
    hicache, expected, launcher, tmp_path
):
    done = run(hicache, tmp_path, launcher)
    if launcher != "ray":  # which starts the job again by itself
        assert done.returncode == 1
        (told,) = re.findall(
            r"a worker process died .*: (\d+) of 48 jobs are finished", done.stderr
        )
        assert 15 <= int(told) <= 25
        assert "Traceback" not in done.stderr
        done = run(hicache, tmp_path, launcher)
    folder, table = expected
    assert table_of(done) == table
    for name in ("sweep.csv", "sweep.json"):
        assert (tmp_path / "sweep" / name).read_bytes() == (folder / "sweep" / name).read_bytes()
    jobs = {path.name for path in (tmp_path / "sweep").glob("*_threshold=*")}
    assert jobs == {path.name for path in (folder / "sweep").glob("*_threshold=*")}
    assert len(jobs) == 48
    for name in jobs:
        assert json.loads((tmp_path / "sweep" / name / "provenance.json").read_text())
    assert done.stdout.count("  →  ") == 48
    twice = begun(tmp_path) - Counter(dict.fromkeys(THRESHOLDS, 2))
    assert sum(twice.values()) <= 2  # those that were running when the worker died
    assert twice[DEADLY] >= 1
