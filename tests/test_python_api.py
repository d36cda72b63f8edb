import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hicache
from tests.forked import run_script

DOCS = Path(__file__).parents[1] / "docs"
SMALL = ("model=llama3_8b", "workload=agents", "workload.num_sessions=5")


class NewestFirst:
    """Evicts the newest node first."""

    def __init__(self, world, weight=1.0):
        self.weight = weight

    def rank(self, entry, tier, kind):
        return -self.weight * entry.created


@pytest.mark.parametrize("page", ["python.md", "first_steps.ipynb"])
def test_every_example_of_the_page_and_the_notebook_runs(page, tmp_path):
    text = (DOCS / page).read_text()
    if page.endswith(".md"):
        sources = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    else:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    # as a user would: in a process of its own, so that classes are found in `__main__`
    script = tmp_path / "script.py"
    script.write_text(re.sub(r"workload\.limit=\d+", "workload.limit=20", "\n".join(sources)))
    assert run_script(script, tmp_path, tmp_path / "printed")


def test_a_finished_run_is_loaded_and_not_replaced_by_another_run(tmp_path, capsys):
    run = hicache.run(*SMALL, out_dir=tmp_path)
    assert hicache.load(run.path).summary == run.summary
    assert len(run.requests) == run.summary["request/count"]
    assert all(isinstance(sentence, str) for sentence in run.verdict)
    written = (run.path / "summary.json").stat().st_mtime_ns
    assert hicache.run(*SMALL, out_dir=tmp_path).summary == run.summary
    assert "already finished" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"a finished run with another .*seed was 0 and is 1"):
        hicache.run(*SMALL, "seed=1", out_dir=tmp_path)
    assert (run.path / "summary.json").stat().st_mtime_ns == written


def test_a_policy_class_gets_its_arguments_and_changes_the_results(tmp_path):
    tight = ("workload.num_sessions=20", "cache.device_gib=2", "storage=none", "cache.host_gib=0")
    first, second = (
        hicache.run(
            *SMALL, *tight, policy=NewestFirst, policy_args={"weight": w}, out_dir=tmp_path / f"{w}"
        )
        for w in (1.0, -1.0)
    )
    assert first.summary != second.summary


def test_a_policy_class_that_a_run_cannot_import_again_is_refused():
    class Local(NewestFirst):
        pass

    for policy in (Local, NewestFirst(None), "module:Class"):
        with pytest.raises(ValueError, match="defined at the top of a module, got"):
            hicache.run(*SMALL, policy=policy)
    for name, hint in (("__main__:Own", "a module of its own"), ("nowhere:Own", "PYTHONPATH")):
        with pytest.raises(ValueError, match=hint):
            hicache.run(*SMALL, f"cache.policy={name}")


def test_a_sweep_runs_every_combination(tmp_path):
    grid = hicache.sweep(*SMALL, "cache.host_gib=1,8", "seed=0,1", out_dir=tmp_path)
    assert len(grid.runs) == 4
    assert list(grid.table["cache.host_gib"]) == [1, 8]
    assert len(hicache.load(grid.path).runs) == 4


def test_the_grid_of_an_experiment_is_a_sweep(tmp_path):
    few = ("experiment=host_layout", "workload=agents", "workload.num_sessions=3")
    with pytest.raises(ValueError, match=r"a grid of .*cache\.\w+.* use hicache\.sweep"):
        hicache.run(*few)
    grid = hicache.sweep(*few, "cache.pools=split", out_dir=tmp_path)
    assert len({each.path.name for each in grid.runs}) == 2


def test_the_package_lists_its_names_and_the_cache_needs_no_hydra():
    assert {"run", "sweep", "load", "compare"} <= set(dir(hicache))
    code = "import sys, hicache, hicache.cache.prefix_cache; assert 'hydra' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
