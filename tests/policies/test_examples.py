"""Each policy in `examples/policies/` is short and changes the result of a run."""

import os
from pathlib import Path

import pytest

from hicache.experiment import run
from hicache.results.metrics import summarize
from hicache.runs.schema import config_of
from tests.test_must_read import code_lines

FOLDER = Path(__file__).parents[2] / "examples" / "policies"
TIGHT = ("engine.check_invariants=true", "workload.limit=80")
STORED = ("storage=memory", "storage.read_gbps=1", "workload.start=warm_storage")
LLAMA = ("model=llama3_8b", "parallel.tp=4", "cache.device_gib=12", "cache.host_gib=16")
HYBRID = ("model=qwen3_next_80b", "parallel.tp=4", "cache.device_gib=6", "cache.host_gib=8")
# by file: the class, and a configuration in which it has something to decide
EXAMPLES = {
    "checkpoints": ("BranchesOnly", HYBRID),
    "flop_aware": ("FlopAware", LLAMA),
    "prefetch_amount": ("ByLoad", (*LLAMA, *STORED)),
    "router": ("PrefixAndQueue", (*LLAMA, "parallel.replicas=2")),
    "stop": ("Slack", (*LLAMA, *STORED)),
    "writes": ("Bounded", (*LLAMA, "storage=memory", "storage.write_gbps=0.5")),
}
MOST_LINES = 40


def summary(name: str, workload: str, *own: str) -> object:
    result = run(config_of(f"workload={workload}", *TIGHT, *EXAMPLES[name][1], *own))
    return summarize(result.records, result.measures)


def check(name: str, workload: str) -> None:
    own = f"cache.policy=examples.policies.{name}:{EXAMPLES[name][0]}"
    assert summary(name, workload, own) != summary(name, workload)


def test_every_example_is_run_and_short() -> None:
    lengths = {file.stem: code_lines(file.read_text()) for file in FOLDER.glob("*.py")}
    assert set(lengths) == set(EXAMPLES)
    assert max(lengths.values()) <= MOST_LINES


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_changes_the_run_of_a_generated_workload(name: str) -> None:
    check(name, "agents")


@pytest.mark.soak
@pytest.mark.skipif("HICACHE_DATA" not in os.environ, reason="HICACHE_DATA names no traces")
@pytest.mark.parametrize("workload", ["mooncake_conversation", "weka_agentic"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_changes_the_run_of_a_trace(name: str, workload: str) -> None:
    check(name, workload)
