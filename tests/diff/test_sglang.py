from dataclasses import replace
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from experiments.diff.compare import Kind, compare
from experiments.diff.engines import ENGINES, prepare
from experiments.diff.rooms import chosen, pools_for

CACHE = user_cache_path("hicache") / "diff" / "sglang"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not (CACHE / "0.5.23").is_dir() or not list(CACHE.glob("shared-*")),
        reason="SGLang 0.5.23 has not been compared here before (python -m experiments.diff)",
    ),
]


@pytest.mark.parametrize(
    ("component", "more"),
    [("full", ""), ("swa", ",swa_tokens=32768"), ("mamba", ",num_states=48")],
)
def test_hicache_hits_the_same_tokens_as_sglang(tmp_path: Path, component: str, more: str) -> None:
    sizes = f"device_tokens=65536,host_tokens=131072,max_len=16384{more}"
    pools = pools_for("builtin", component, sizes, "instant")
    requests = chosen("builtin", 12, pools)
    engine = ENGINES["sglang"]
    launches = prepare(engine, "0.5.23"), prepare(engine, "hicache")
    found = compare(requests, pools, launches, tmp_path)
    assert found.failure is None
    assert found.hit_rate("base") > 0
    differing = {Kind.fewer, Kind.more, Kind.tier} & set(found.kinds)
    assert not differing


def test_the_free_memory_that_psutil_reports_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from types import SimpleNamespace as Values\n"
        "import psutil\n"
        "psutil.virtual_memory = lambda: Values(total=1 << 30, available=1 << 30)\n"
    )
    base, head = (prepare(ENGINES["sglang"], side) for side in ("0.5.23", "hicache"))
    base = replace(base, path=(str(tmp_path), *base.path))
    pools = pools_for("mooncake_conversation", "swa+mamba", "", "instant")
    found = compare(chosen("builtin", 2, pools), pools, (base, head), tmp_path)
    assert found.failure is None
    assert all(peak is not None and peak < 4e9 for peak in found.peak_bytes)


@pytest.mark.parametrize("votes", ["yes", "no"])
def test_pipeline_stages_that_vote_decide_as_one_cache_and_others_are_reported(
    tmp_path: Path, votes: str
) -> None:
    sizes = "device_tokens=65536,host_tokens=131072,max_len=16384"
    pools = pools_for("builtin", "full", sizes, "delayed:3")
    base, head = (prepare(ENGINES["sglang"], side) for side in ("0.5.23", "hicache"))
    base = replace(base, options={"stages": "2", "votes": votes})
    found = compare(chosen("builtin", 12, pools), pools, (base, head), tmp_path)
    if votes == "yes":
        assert found.failure is None
        assert not {Kind.fewer, Kind.more, Kind.tier} & set(found.kinds)
    else:
        assert "stage 1 differs from stage 0" in str(found.failure)
