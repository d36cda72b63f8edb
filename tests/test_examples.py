"""Each script of `examples/` runs as a newcomer would run it, and prints what it found."""

from pathlib import Path

import pytest

from tests.forked import run_script
from tests.test_must_read import code_lines

ROOT = Path(__file__).parents[1]
PRINTED = {
    "cache": "token hit rate 0.",
    "kernels": "3 pages were backed up",
    "policy": "__main__:NeverHitFirst: token hit rate 0.",
    "scheduler": "shortest_remaining: mean TTFT",
    "storage": "a page of any length is read as it was written",
    "workload": "request 1: 1024 hits, 1024 computed",
}


def test_every_example_is_tested_and_short():
    lengths = {file.stem: code_lines(file.read_text()) for file in (ROOT / "examples").glob("*.py")}
    assert set(lengths) == set(PRINTED)
    assert max(lengths.values()) <= 55


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_and_prints_its_result(name, tmp_path):
    printed = run_script(ROOT / "examples" / f"{name}.py", ROOT, tmp_path / "printed")
    assert PRINTED[name] in printed
    assert "FAILED" not in printed
