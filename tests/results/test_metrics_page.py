"""docs/metrics.md explains every number of a summary."""

import itertools
import re
from pathlib import Path

import pytest

from hicache.experiment import run
from hicache.results.keys import ALWAYS, KNOWN, SOMETIMES
from hicache.results.metrics import summarize
from tests.test_experiment import config_of

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
TIGHT = ("cache.device_gib=4", "cache.host_gib=4")
AGENTS = ("workload=agents", "workload.limit=4")


def expanded(name: str) -> list[str]:
    """Return the names that braces stand for: `a/b_d` and `a/c_d` for `a/{b,c}_d`."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    return ["".join(each) for each in itertools.product(*parts)]


EXPLAINED = {
    key
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([a-z_{},]+/[^` ]+)`", line.split("|")[1])
    for key in expanded(name)
}


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=qwen3_next_80b", *TIGHT, "prefetch.stop=best_effort"),
        ("model=gemma3_27b", *TIGHT, "parallel.ranks=2"),
        ("model=llama3_8b", *TIGHT, "storage.faults.error_rate=0.3", "storage.faults.delay_ms=1"),
        ("model=llama3_8b", *TIGHT, "storage.tiering=exclusive", "storage.write=on_host_eviction"),
        ("model=llama3_8b", *TIGHT, "storage=peers", "parallel.replicas=2"),
        ("executor=torch", "model=tiny_hybrid", *AGENTS, "executor.verify=true"),
    ],
    ids=" ".join,
)
def test_a_summary_has_all_required_keys_and_no_unknown_one(overrides: tuple[str, ...]) -> None:
    result = run(config_of("workload.limit=40", *overrides))
    found = set(summarize(result.records, result.measures))
    assert found - ALWAYS <= set(SOMETIMES)
    assert ALWAYS - found == set()


def test_every_key_of_a_summary_is_explained_on_the_page() -> None:
    assert set(EXPLAINED) == KNOWN
