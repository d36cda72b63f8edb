from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from experiments.diff import edges
from experiments.diff.compare import Comparison, Kind, compare
from experiments.diff.engines import ENGINES, prepare
from experiments.diff.rooms import chosen, pools_for

CACHE = user_cache_path("hicache") / "diff" / "vllm"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not (CACHE / "0.33.0").is_dir() or not list(CACHE.glob("shared-*")),
        reason="vLLM 0.33.0 has not been compared here before (python -m experiments.diff)",
    ),
]
SIZES = "device_tokens=65536,host_tokens=131072,max_len=16384"
ENGINE = ENGINES["vllm"]


def compared(
    tmp_path: Path, sides: Sequence[str], component: str = "full", copies: str = "instant"
) -> Comparison:
    more = {"full": "", "swa": ",swa_tokens=32768", "mamba": ",num_states=48"}[component]
    pools = pools_for("builtin", component, SIZES + more, copies, has_storage=False)
    options = {"compat": ENGINE.compat}
    base, head = (replace(prepare(ENGINE, side), options=options) for side in sides)
    requests = chosen("builtin", 40, pools)
    return compare(requests, pools, (base, head), tmp_path)


def test_hicache_decides_as_vllm_does(tmp_path: Path) -> None:
    found = compared(tmp_path, ["0.33.0", "hicache"])
    assert found.failure is None
    assert found.totals("base")["hit/full/host"] > 0
    assert found.kinds == {Kind.equal: 40}


def test_with_two_faults_corrected_hits_and_copies_of_all_edges_are_equal(tmp_path: Path) -> None:
    pools = pools_for(edges.NAME, "full", "", "instant", has_storage=False)
    options = {"compat": ENGINE.compat, "corrected": "yes"}
    base, head = (replace(prepare(ENGINE, side), options=options) for side in ["0.33.0", "hicache"])
    found = compare(edges.edges(), pools, (base, head), tmp_path)
    assert found.failure is None
    assert set(found.kinds) <= {Kind.equal, Kind.evicted, Kind.held}


@pytest.mark.parametrize("component", ["full", "swa", "mamba"])
def test_a_release_does_not_differ_from_itself(tmp_path: Path, component: str) -> None:
    found = compared(tmp_path, ["0.33.0", "0.33.0"], component, "delayed:2")
    assert found.failure is None
    assert found.hit_rate("base") > 0
    assert found.totals("base")[f"moved/{component}/back_up"] > 0
    assert found.kinds == {Kind.equal: 40}
