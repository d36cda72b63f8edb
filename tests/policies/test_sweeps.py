"""A user's own policy in a sweep, whose jobs run in one process."""

import sys

import hicache

LEAKY = """
import beside

BUILT = []

class Leaky:
    def __init__(self, world):
        for built in (BUILT, beside.BUILT):
            built.append(self)
            assert len(built) == 1, "a job finds what an earlier one has left"

    def rank(self, entry, tier, kind):
        return entry.used
"""


def test_a_module_of_a_policy_is_imported_anew_for_each_job_of_a_sweep(tmp_path, monkeypatch):
    (tmp_path / "leaky.py").write_text(LEAKY)
    (tmp_path / "beside.py").write_text("BUILT = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = "cache.policy=leaky:Leaky"
    grid = hicache.sweep("model=tiny_hybrid", "workload.limit=5", own, "seed=0,1", out_dir=tmp_path)
    assert len(grid.table) == 1
    assert not {"leaky", "beside"} & set(sys.modules)
