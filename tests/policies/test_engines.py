"""The same policy evicts the same pages in this cache and in SGLang's and vLLM's own caches."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from experiments.diff import edges
from experiments.diff.compare import Kind, compare
from experiments.diff.engines import ENGINES, ROOT, environment_of, prepare

RELEASES = {"sglang": "0.5.23", "vllm": "0.33.0"}
LEAST_EVICTIONS = 10_000  # pages, of all streams or requests together
pytestmark = pytest.mark.soak


def needs(engine: str) -> pytest.MarkDecorator:
    cache = user_cache_path("hicache") / "diff" / engine
    return pytest.mark.skipif(
        not (cache / RELEASES[engine]).is_dir() or not list(cache.glob("shared-*")),
        reason=f"{engine} has not been compared here before (python -m experiments.diff)",
    )


@needs("sglang")
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("tests.policies.in_sglang:OurLfu", "lfu"), ("slru", "tests.policies.in_sglang:sglang_slru")],
    ids=["our LFU in both", "their SLRU in both"],
)
def test_the_cached_pages_are_those_of_sglang_after_each_request(
    tmp_path: Path, theirs: str, ours: str
) -> None:
    engine = ENGINES["sglang"]
    launches = (
        replace(prepare(engine, RELEASES["sglang"]), options={"eviction": theirs}),
        replace(prepare(engine, "hicache"), options={"eviction": ours}),
    )
    found = compare(edges.edges(1_000), edges.POOLS, launches, tmp_path)
    assert found.failure is None
    assert found.kinds == {Kind.equal: 1_000}
    evicted = sum(found.totals("head")[f"evicted/full/{tier}"] for tier in ("device", "host"))
    assert evicted // edges.PAGE > LEAST_EVICTIONS


@needs("vllm")
def test_evicted_pages_are_those_of_vllms_offloading_manager() -> None:
    launch = prepare(ENGINES["vllm"], RELEASES["vllm"])
    done = subprocess.run(
        [launch.interpreter, "-m", "tests.policies.in_vllm"],
        cwd=ROOT,
        env=environment_of(launch),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert {case: theirs == ours for case, (theirs, ours) in found.items()} == dict.fromkeys(
        found, True
    )
    by_case: dict[str, int] = {}
    for case, (_, ours) in found.items():
        policy = case.rpartition(",")[0]
        by_case[policy] = by_case.get(policy, 0) + len(ours)
    assert min(by_case.values()) > LEAST_EVICTIONS
