"""What a run says about what made it."""

import gzip
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.config import CacheConfig, ExecutorConfig, ExperimentConfig, WorkloadConfig
from hicache.runs import checks, job, provenance

BUILTIN = ExperimentConfig(workload=WorkloadConfig(kind="builtin"))


def written(config, out_dir) -> dict:
    provenance.write_provenance(config, out_dir)
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
    versions = {"hicache", "numpy", "platform", "python", "rules"}
    assert found.keys() == versions | {"directory", "policies"}
    assert len(found["hicache"]["sha256"]) == 64


def test_a_policy_of_the_users_own_has_its_file_and_digest(tmp_path, my_policies):
    config = ExperimentConfig(cache=CacheConfig(policy="provenance_policies:Mine"))
    assert written(config, tmp_path)["policies"] == {
        "cache.policy": {
            "class": "provenance_policies:Mine",
            "file": str(my_policies),
            "imports": {},
            "sha256": provenance._digest({"provenance_policies": my_policies}),
        }
    }


KNOBS = ("workload.tokenizer", "storage.kind", "cache.policy")


def finished(config, out_dir) -> None:
    """Leave a run behind that has just been made."""
    job.begin(config, out_dir)
    (out_dir / "summary.json").write_text("{}")
    assert checks.changes(config, out_dir) == []


def with_own(knob) -> ExperimentConfig:
    group, _, name = knob.partition(".")
    part = replace(getattr(BUILTIN, group), **{name: "provenance_policies:Mine"})
    return replace(BUILTIN, **{group: part})


@pytest.mark.parametrize("knob", KNOBS)
def test_a_run_is_another_one_when_any_class_of_the_users_own_has_changed(
    tmp_path, my_policies, knob
):
    config = with_own(knob)
    finished(config, tmp_path)
    my_policies.write_text("class Mine:\n    changed = True\n")
    provenance._source.cache_clear()  # as in another process
    assert checks.changes(config, tmp_path) == [knob]


@pytest.mark.parametrize("knob", KNOBS)
def test_another_class_is_not_taken_for_the_one_that_was_run(tmp_path, my_policies, knob):
    finished(with_own(knob), tmp_path)
    group, _, name = knob.partition(".")
    part = replace(getattr(BUILTIN, group), **{name: "provenance_policies:Other"})
    with pytest.raises(ValueError, match=f"{knob} was provenance_policies:Mine and is"):
        checks.refuse_other(replace(BUILTIN, **{group: part}), tmp_path)


@pytest.mark.parametrize(
    "importing",
    [
        "import far_helper",
        "from far_helper import weight",
        "from provenance_package import weight",
        "from provenance_package.inner import weight",
        "class Mine:\n    def rank(self):\n        import far_helper",
    ],
)
def test_a_run_is_another_one_when_a_module_has_changed_that_a_class_imports(
    tmp_path, my_policies, importing
):
    package = tmp_path / "provenance_package"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import weight\n")
    (package / "inner.py").write_text("import far_helper\nweight = far_helper.weight\n")
    helper = tmp_path / "far_helper.py"
    helper.write_text("import json, numpy\nweight = 1\n")
    my_policies.write_text(f"{importing}\n")
    provenance._source.cache_clear()
    config, out_dir = with_own("cache.policy"), tmp_path / "out"
    finished(config, out_dir)
    helper.write_text("import json, numpy\nweight = 2\n")
    provenance._source.cache_clear()
    assert checks.changes(config, out_dir) == ["cache.policy"]


def test_a_class_whose_module_has_gone_is_not_taken_for_the_one_that_was_run(tmp_path, my_policies):
    config = with_own("cache.policy")
    finished(config, tmp_path / "out")
    my_policies.unlink()
    provenance._source.cache_clear()
    assert checks.changes(config, tmp_path / "out") == ["cache.policy"]


def test_what_is_installed_is_no_part_of_a_class(my_policies):
    my_policies.write_text("import json, numpy, hicache.config\n")
    assert provenance._source("provenance_policies")["imports"] == {}


@pytest.mark.parametrize("name", ["python", "numpy"])
def test_a_run_is_another_one_under_another_version(tmp_path, name):
    finished(BUILTIN, tmp_path)
    made_of = json.loads((tmp_path / "provenance.json").read_text())
    (tmp_path / "provenance.json").write_text(json.dumps(made_of | {name: "0.1"}))
    assert checks.changes(BUILTIN, tmp_path) == [name]


def test_only_a_real_run_depends_on_the_version_of_torch(tmp_path):
    real = replace(BUILTIN, executor=ExecutorConfig(kind="torch"))
    assert "torch" in written(real, tmp_path)
    assert "torch" not in written(BUILTIN, tmp_path)


@pytest.fixture
def traced(tmp_path) -> ExperimentConfig:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n" * 9)
    return ExperimentConfig(workload=WorkloadConfig(kind="mooncake_conversation", path=str(trace)))


def test_a_run_is_another_one_when_its_trace_was_cut_short(tmp_path, traced):
    finished(traced, tmp_path / "out")
    with Path(traced.workload.path).open("r+") as trace:
        trace.truncate(6)
    assert checks.changes(traced, tmp_path / "out") == ["workload"]


def test_a_trace_is_told_by_its_contents_not_by_size_and_time(tmp_path, traced):
    path = Path(traced.workload.path)
    finished(traced, tmp_path / "out")
    before = path.stat()
    path.write_text("[]\n" * 9)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert checks.changes(traced, tmp_path / "out") == ["workload"]


def test_a_trace_that_is_a_folder_is_told_by_its_files(tmp_path, traced):
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "a.json").write_text("{}")
    config = replace(traced, workload=replace(traced.workload, path=str(folder)))
    finished(config, tmp_path / "out")
    (folder / "b.json").write_text("{}")
    assert checks.changes(config, tmp_path / "out") == ["workload"]


def test_a_policy_that_is_nowhere_is_left_for_the_run_to_refuse(tmp_path):
    config = ExperimentConfig(cache=CacheConfig(policy="nowhere_to_be_found:Mine"))
    assert written(config, tmp_path)["policies"]["cache.policy"] == {
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
        "policies": {"cache.policy": {"sha256": "abcdefabcdef"}},
    }
    assert provenance.sources_of(made_of) == {"hicache": "01234567", "cache.policy": "abcdefab"}
