"""What a run records of the code and data behind it, and which changes make it another run."""

import hashlib
import json
import os
from dataclasses import replace

import pytest

from hicache.config import (
    CacheConfig,
    ExecutorConfig,
    ExperimentConfig,
    GeneratedConfig,
    TraceConfig,
)
from hicache.runs import checks, job, provenance
from hicache.runs.schema import config_of

BUILTIN = ExperimentConfig(workload=GeneratedConfig(kind="builtin"))
KNOBS = ("workload.tokenizer", "storage.kind", "cache.policy")


def written(config, out_dir):
    provenance.write_provenance(config, out_dir)
    return json.loads((out_dir / "provenance.json").read_text())


@pytest.fixture
def my_policies(tmp_path, monkeypatch):
    """Return a function that writes an importable module and returns the path of its file."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text, name="provenance_policies"):
        provenance._source.cache_clear()  # as in another process
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    write("class Mine:\n    pass\n")
    return write


def finished(config, out_dir):
    """Write the files of a finished run of `config` to `out_dir`."""
    job.begin(config, out_dir)
    (out_dir / "summary.json").write_text("{}")
    assert checks.changes(config, out_dir) == []


def with_own(knob, name="Mine"):
    group, _, field = knob.partition(".")
    # without a file, whose digest would be asked for
    base = TraceConfig(kind="builtin") if field == "tokenizer" else getattr(BUILTIN, group)
    part = replace(base, **{field: f"provenance_policies:{name}"})
    return replace(BUILTIN, **{group: part})


def test_provenance_names_versions_code_and_torch_for_real_runs(tmp_path):
    found = written(BUILTIN, tmp_path)
    versions = {"hicache", "numpy", "platform", "python", "rules"}
    assert found.keys() == versions | {"directory", "policies"}
    assert len(found["hicache"]["sha256"]) == 64
    assert "torch" in written(replace(BUILTIN, executor=ExecutorConfig(kind="torch")), tmp_path)
    assert provenance._checkout(tmp_path) == {}  # no git, so no commit


def test_provenance_names_the_file_and_digest_of_the_users_class(tmp_path, my_policies):
    file = my_policies("import json, numpy, hicache.config\nclass Mine:\n    pass\n")
    assert written(with_own("cache.policy"), tmp_path)["policies"] == {
        "cache.policy": {
            "class": "provenance_policies:Mine",
            "file": str(file),
            "imports": {},  # without installed modules
            "sha256": provenance._digest({"provenance_policies": file}),
        }
    }
    absent = ExperimentConfig(cache=CacheConfig(policy="nowhere_to_be_found:Mine"))
    told = {"class": "nowhere_to_be_found:Mine"}
    assert written(absent, tmp_path)["policies"]["cache.policy"] == told


@pytest.mark.parametrize("knob", KNOBS)
def test_a_change_of_the_users_class_makes_another_run(tmp_path, my_policies, knob):
    finished(with_own(knob), tmp_path)
    with pytest.raises(ValueError, match=f"{knob} was provenance_policies:Mine and is"):
        checks.refuse_other(with_own(knob, "Other"), tmp_path)
    file = my_policies("class Mine:\n    changed = True\n")
    assert checks.changes(with_own(knob), tmp_path) == [knob]
    file.unlink()
    provenance._source.cache_clear()
    assert checks.changes(with_own(knob), tmp_path) == [knob]


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
def test_a_change_of_a_module_that_the_class_imports_makes_another_run(
    tmp_path, my_policies, importing
):
    my_policies("from .inner import weight\n", "provenance_package/__init__")
    my_policies("import far_helper\nweight = far_helper.weight\n", "provenance_package/inner")
    my_policies("import json, numpy\nweight = 1\n", "far_helper")
    my_policies(f"{importing}\n")
    config, out_dir = with_own("cache.policy"), tmp_path / "out"
    finished(config, out_dir)
    my_policies("import json, numpy\nweight = 2\n", "far_helper")
    assert checks.changes(config, out_dir) == ["cache.policy"]


@pytest.mark.parametrize("name", ["python", "numpy"])
def test_another_version_of_python_or_numpy_makes_another_run(tmp_path, name):
    finished(BUILTIN, tmp_path)
    made_of = json.loads((tmp_path / "provenance.json").read_text())
    (tmp_path / "provenance.json").write_text(json.dumps(made_of | {name: "0.1"}))
    assert checks.changes(BUILTIN, tmp_path) == [name]


@pytest.mark.parametrize("change", ["shorter", "equal size and time", "another file"])
def test_a_change_of_the_contents_of_a_trace_makes_another_run(tmp_path, change):
    trace = tmp_path / "traces" / "trace.jsonl"
    trace.parent.mkdir()
    trace.write_text("{}\n" * 9)
    path = str(trace.parent if change == "another file" else trace)
    config = ExperimentConfig(workload=TraceConfig(kind="mooncake_conversation", path=path))
    if path == str(trace):
        digest = hashlib.sha256(trace.read_bytes()).hexdigest()
        assert written(config, tmp_path)["trace"] == {"file": path, "sha256": digest}
    finished(config, tmp_path / "out")
    before = trace.stat()
    if change == "shorter":
        os.truncate(trace, 6)
    elif change == "another file":
        trace.with_name("b.jsonl").write_text("{}")
    else:
        trace.write_text("[]\n" * 9)
        os.utime(trace, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert checks.changes(config, tmp_path / "out") == ["workload"]


def test_the_digest_of_a_package_covers_its_sources_and_their_names(tmp_path):
    digests = set()
    for number, (name, text) in enumerate((("a.py", "1"), ("a.py", "2"), ("b.py", "1"))):
        package = tmp_path / str(number)
        package.mkdir()
        (package / name).write_text(text)
        digests.add(provenance._digest_of_package(package))
    assert len(digests) == 3


def test_sources_are_the_first_eight_digits_of_their_digests():
    made_of = {
        "hicache": {"sha256": "0123456789"},
        "trace": {"file": "t"},
        "policies": {"cache.policy": {"sha256": "abcdefabcdef"}},
    }
    assert provenance.sources_of(made_of) == {"hicache": "01234567", "cache.policy": "abcdefab"}


def test_a_machines_name_may_be_changed_only_with_the_machine():
    typed = ["hardware.name=mine"]
    with pytest.raises(ValueError, match="changes only the name"):
        checks.unheeded(config_of(*typed), typed)
    typed.append("hardware=h100")
    assert checks.unheeded(config_of(*typed), typed) == []


@pytest.mark.parametrize(("storage", "has_effect"), [("peers", True), ("memory", False)])
def test_the_rate_between_engines_has_an_effect_where_one_of_its_uses_is_met(storage, has_effect):
    typed = ["parallel.link_gbps=20", f"storage={storage}", "parallel.replicas=2"]
    assert (checks.unheeded(config_of("model=llama3_8b", *typed), typed) == []) == has_effect
