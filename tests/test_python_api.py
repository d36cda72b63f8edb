import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hicache

DOCS = Path(__file__).parents[1] / "docs"
SMALL = ("model=llama3_8b", "workload=agents", "workload.num_sessions=5")


class NewestFirst:
    """Evicts the node that was made last."""

    def __init__(self, world, weight: float = 1.0) -> None:
        self.weight = weight

    def rank(self, entry, tier, kind):
        return -self.weight * entry.created


def run_as_script(sources, folder):
    # as a user would: in a process of its own, so that classes are found in `__main__`
    (folder / "script.py").write_text("\n".join(sources))
    subprocess.run([sys.executable, "script.py"], check=True, cwd=folder)


def test_every_example_of_the_page_runs(tmp_path):
    page = (DOCS / "python.md").read_text()
    run_as_script(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL), tmp_path)


def test_the_notebook_runs(tmp_path):
    cells = json.loads((DOCS / "first_steps.ipynb").read_text())["cells"]
    run_as_script(
        ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"], tmp_path
    )


def test_a_run_is_read_back_from_its_directory(tmp_path):
    run = hicache.run(*SMALL, out_dir=tmp_path / "run")
    again = hicache.load(run.path)
    assert again.summary == run.summary
    assert len(run.requests) == run.summary["request/count"]
    assert all(isinstance(sentence, str) for sentence in run.verdict)


def test_a_class_gets_its_arguments_and_decides(tmp_path):
    tight = (
        *SMALL,
        "workload.num_sessions=20",
        "cache.device_gib=2",
        "storage=none",
        "cache.host_gib=0",
    )
    runs = [
        hicache.run(
            *tight, policy=NewestFirst, policy_args={"weight": w}, out_dir=tmp_path / f"{w}"
        )
        for w in (1.0, -1.0)
    ]
    assert runs[0].summary != runs[1].summary


def test_what_a_run_cannot_import_again_is_no_policy():
    class Local(NewestFirst):
        pass

    for policy in (Local, NewestFirst(None), "module:Class"):
        with pytest.raises(ValueError, match="defined at the top of a module, got"):
            hicache.run(*SMALL, policy=policy)
    for name, hint in (("__main__:Own", "a module of its own"), ("nowhere:Own", "PYTHONPATH")):
        with pytest.raises(ValueError, match=hint):
            hicache.run(*SMALL, f"cache.policy={name}")


def test_a_sweep_runs_every_combination(tmp_path):
    grid = hicache.sweep(*SMALL, "cache.host_gib=1,8", "seed=0,1", out_dir=tmp_path / "grid")
    assert len(grid.runs) == 4
    assert list(grid.table["cache.host_gib"]) == [1, 8]
    assert len(hicache.load(grid.path).runs) == 4


def test_a_finished_run_is_kept_and_not_overwritten_by_another(tmp_path, capsys):
    run = hicache.run(*SMALL, out_dir=tmp_path / "run")
    written = (run.path / "summary.json").stat().st_mtime_ns
    assert hicache.run(*SMALL, out_dir=tmp_path / "run").summary == run.summary
    assert "already finished" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"a finished run with another .*seed was 0 and is 1"):
        hicache.run(*SMALL, "seed=1", out_dir=tmp_path / "run")
    assert (run.path / "summary.json").stat().st_mtime_ns == written


def test_the_grid_of_an_experiment_is_a_sweep(tmp_path):
    few = ("experiment=eviction", "workload=agents", "workload.num_sessions=3", "seed=0")
    with pytest.raises(ValueError, match=r"a grid of .*cache\.\w+.* use hicache\.sweep"):
        hicache.run(*few)
    grid = hicache.sweep(*few, "cache.host_gib=8", out_dir=tmp_path)
    assert len(grid.runs) == len({each.path.name for each in grid.runs}) > 1


def test_an_unknown_knob_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cache\.typo"):
        hicache.run(*SMALL, "+cache.typo=1", out_dir=tmp_path / "run")


def test_an_interpreter_can_complete_the_names():
    assert {"run", "sweep", "load", "compare"} <= set(dir(hicache))


def test_the_cache_is_imported_without_hydra():
    code = "import sys, hicache, hicache.cache.prefix_cache; assert 'hydra' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
