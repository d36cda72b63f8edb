"""What a run says about what made it."""

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import job, provenance, resume
from hicache.config import CacheConfig, ExperimentConfig, WorkloadConfig

BUILTIN = ExperimentConfig(workload=WorkloadConfig(kind="builtin"))


def written(config, out_dir) -> dict:
    provenance.write_provenance(config, out_dir)
    provenance.add_trace(config, out_dir)
    return json.loads((out_dir / "provenance.json").read_text())


@pytest.fixture
def my_policies(tmp_path, monkeypatch) -> Path:
    """The file of a module that can be imported."""
    path = tmp_path / "provenance_policies.py"
    path.write_text("class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    provenance._source.cache_clear()  # as in another process
    return path


def test_versions_and_code_are_named(tmp_path):
    found = written(BUILTIN, tmp_path)
    assert found.keys() == {"hicache", "numpy", "platform", "policies", "python"}
    assert len(found["hicache"]["sha256"]) == 64


def test_a_policy_of_the_users_own_has_its_file_and_digest(tmp_path, my_policies):
    config = ExperimentConfig(cache=CacheConfig(eviction="provenance_policies:Mine"))
    assert written(config, tmp_path)["policies"] == {
        "cache.eviction": {
            "class": "provenance_policies:Mine",
            "file": str(my_policies),
            "sha256": hashlib.sha256(my_policies.read_bytes()).hexdigest(),
        }
    }


KNOBS = (
    "cache.checkpoints",
    "cache.eviction",
    "prefetch.stop",
    "scheduler.order",
    "scheduler.swa_budget",
)


@pytest.mark.parametrize("knob", KNOBS)
def test_a_run_is_by_other_code_when_any_class_of_the_users_own_has_changed(
    tmp_path, my_policies, knob
):
    group, _, name = knob.partition(".")
    part = replace(getattr(BUILTIN, group), **{name: "provenance_policies:Mine"})
    config = replace(BUILTIN, **{group: part})
    job.begin(config, tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    assert resume.is_as_before(config, tmp_path)
    my_policies.write_text("class Mine:\n    changed = True\n")
    provenance._source.cache_clear()  # as in another process
    with pytest.raises(ValueError, match=rf"other code \(of {knob}\)"):
        resume.is_as_before(config, tmp_path)


def test_every_knob_that_may_name_a_class_is_known_here():
    assert dict(provenance._policies(BUILTIN)).keys() == set(KNOBS)


def test_a_policy_that_is_nowhere_is_left_for_the_run_to_refuse(tmp_path):
    config = ExperimentConfig(cache=CacheConfig(eviction="nowhere_to_be_found:Mine"))
    assert written(config, tmp_path)["policies"]["cache.eviction"] == {
        "class": "nowhere_to_be_found:Mine"
    }


def test_a_trace_has_its_file_and_digest(tmp_path):
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress(b"{}"))
    config = ExperimentConfig(
        workload=WorkloadConfig(kind="mooncake_conversation", path=str(trace))
    )
    assert written(config, tmp_path)["trace"] == {
        "file": str(trace),
        "sha256": hashlib.sha256(trace.read_bytes()).hexdigest(),
    }


def test_outside_a_checkout_there_is_no_commit(tmp_path):
    assert provenance._checkout(tmp_path) == {}


def test_the_digest_of_a_package_is_of_its_sources_and_their_names(tmp_path):
    digests = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "1")):
        package = tmp_path / str(len(digests))
        package.mkdir()
        (package / name).write_text(text)
        digests.append(provenance._digest_of_package(package))
    assert len(set(digests)) == 3


def test_sources_are_short_digests_by_what_they_are_of():
    made_of = {
        "hicache": {"sha256": "0123456789"},
        "trace": {"file": "t"},
        "policies": {"cache.eviction": {"sha256": "abcdefabcdef"}},
    }
    assert provenance.sources_of(made_of) == {"hicache": "01234567", "cache.eviction": "abcdefab"}
