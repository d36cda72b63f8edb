"""Release habits: one version, entries of the changelog, and one script for all checks."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import hicache

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere():
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited[1] == hicache.__version__


def test_the_workflow_calls_the_script_that_ci_run_calls():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"].values()
    calls = [step["run"].split()[0] for step in job["steps"] if "run" in step]
    assert calls == [".ci/checks"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == ".ci/checks"


@pytest.mark.skipif(shutil.which("towncrier") is None, reason="towncrier is not on the path")
def test_every_entry_of_the_changelog_has_a_kind():
    done = subprocess.run(
        ["towncrier", "build", "--draft", "--version", "0.0.0"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    folder = ROOT / "changelog.d"
    entries = [path for path in folder.glob("*.md") if path.stem not in ("README", "template")]
    for path in entries:
        assert re.fullmatch(r".+\.(added|changed|fixed|removed|deprecated)", path.stem), path
        assert path.read_text().strip() in done.stdout
